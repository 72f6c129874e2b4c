"""What a user or a stranger can do to the cluster's side and to other people's jobs: nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_plugin import contract
from testbed import Cluster
from tests.slurm.training import Training, assert_equal, decisions, submit

STRANGER = Path(__file__).with_name("stranger.py")


def door_of(job: str) -> tuple[str, str]:
    """Find where jit-srun of a job listens: in the environment of one of its processes, which only root may read."""
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            env = dict(pair.split("=", 1) for pair in process.read_bytes().decode().split("\0") if "=" in pair)
        except (OSError, UnicodeDecodeError):
            continue
        if env.get("SLURM_JOB_ID") == job and contract.ENV_LAUNCHER in env:
            host, port, _ = env[contract.ENV_LAUNCHER].rsplit(":", 2)
            return host, port
    raise AssertionError(f"no process of job {job} knows of jit-srun")


def test_strangers_do_not_disturb_a_failure(cluster: Cluster, reference: Training, out: Path) -> None:
    """Connections of nonsense to jit-srun without end while a rank dies: same bits, one minibatch again."""
    run = submit(cluster, out, "kill:backward:1:36", trainee=("--pause=0.4",), sbatch=("--exclude=n5",))
    run.wait_minibatch(2)
    stranger = cluster.popen("n5", sys.executable, str(STRANGER), *door_of(run.job), "10000", user=True)
    assert run.end(timeout=300) == "COMPLETED", run.log
    accepted = int(stranger.communicate(timeout=90)[0].splitlines()[-1])
    assert accepted > 100, "the stranger was not let near; nothing was tried"
    assert_equal(run, reference)
    assert decisions(run)[0] == "relaunch", run.log
    assert run.replayed() == 1
    assert "brought no notice" in run.log


HOSTILE = "dir=/x;touch {mark},\n$(touch {mark})`touch {mark}`\n../../../etc/passwd"


def test_hooks_take_words_of_users_as_words(cluster: Cluster, out: Path) -> None:
    """Shell text, newlines and other people's names in a hook's environment run nothing, mark nothing, end with 0."""
    out.mkdir()
    mark = out / "mark"
    text = HOSTILE.format(mark=mark)
    others = cluster.sbatch("--nodelist=n2", "--output=/dev/null", script="#!/bin/sh\nsleep 60\n")
    cluster.wait_state(others, "RUNNING", 30)
    names = (contract.ENV_OPTIONS_HOOK, "SLURM_JOB_NODELIST", "SLURMD_NODENAME", "SLURM_JOB_USER", "SLURM_JOB_GPUS")
    for job in (text, f"{others}; scontrol requeue {others}", "../../etc", "-1", "9" * 4000, "0"):
        for hook in (cluster.settings.folder / "hooks").iterdir():
            env = {**dict.fromkeys(names, text), "SLURM_JOB_ID": job, "SLURM_ARRAY_JOB_ID": job}
            done = cluster.on("n1", str(hook), env=env, check=False)
            assert done.returncode == 0, (hook.name, done.stderr)
    assert not mark.exists()
    assert cluster.job(others)["JobState"] == "RUNNING"
    assert set(cluster.nodes().values()) <= {"idle", "mixed", "allocated"}


def test_planted_links_in_an_open_spool_lead_root_nowhere(cluster: Cluster, out: Path) -> None:
    """What a user plants for the next job in a spool that is open by mistake is neither written nor removed."""
    out.mkdir()
    victim = out / "victim"
    victim.mkdir()
    (victim / contract.TASKS).write_text("precious\n")
    out.chmod(0o777)
    option = f"--jit-ckpt=dir={out}/checkpoints"
    job = cluster.sbatch(
        "--hold", option, "--nodelist=n1", f"--output={out}/log", script="#!/bin/sh\nfalse\n", user=True
    )
    cluster.on("n1", "sh", "-c", f"mkdir -p {contract.SPOOL}; chmod 777 {contract.SPOOL}")
    try:
        cluster.on("n1", "ln", "-s", str(victim), f"{contract.SPOOL}/{job}", user=True)
        cluster.on("head", "scontrol", "release", job)
        cluster.wait_state(job, "FAILED", 60)
        cluster.wait_idle(30)
    finally:
        cluster.on("n1", "rm", "-rf", contract.SPOOL)
    assert (victim / contract.TASKS).read_text() == "precious\n"


def test_nobody_acts_on_another_users_job(cluster: Cluster, out: Path) -> None:
    """jit-srun that claims to be another user's job changes nothing about it."""
    out.mkdir()
    out.chmod(0o777)
    others = cluster.sbatch("--nodelist=n2", "--output=/dev/null", script="#!/bin/sh\nsleep 60\n")
    before = cluster.wait_state(others, "RUNNING", 30)
    env = {"SLURM_JOB_ID": others, contract.ENV_OPTIONS_JOB: f"dir={out}/c,relaunch=off", "SLURM_JOB_NUM_NODES": "1"}
    done = cluster.on("n2", "jit-srun", "sh", "-c", "kill -9 $$", user=True, env=env, check=False, cwd="/")
    assert done.returncode != 0
    after = cluster.job(others)
    assert [after[key] for key in ("JobState", "Restarts", "ExcNodeList")] == [
        before[key] for key in ("JobState", "Restarts", "ExcNodeList")
    ]
