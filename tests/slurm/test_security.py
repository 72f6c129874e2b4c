"""What a user or a stranger can do to the cluster's side and to other people's jobs: nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(400)
def test_strangers_do_not_disturb_a_failure(cluster: Cluster, reference: Training, out: Path) -> None:
    """10,000 connections of nonsense to jit-srun while a rank dies: same bits, one relaunch, one minibatch again."""
    run = submit(cluster, out, "kill:backward:1:12", trainee=("--pause=0.3",), sbatch=("--exclude=n5",))
    run.wait_minibatch(2)
    stranger = cluster.popen("n5", sys.executable, str(STRANGER), *door_of(run.job), "10000", user=True)
    assert run.end(timeout=300) == "COMPLETED", run.log
    accepted = int(stranger.communicate(timeout=90)[0].splitlines()[-1])
    assert accepted > 1000, "the stranger was not let near; nothing was tried"
    assert_equal(run, reference)
    assert decisions(run)[0] == "relaunch"
    assert run.replayed() == 1
    assert "brought no notice" in run.log
