"""Job arrays, salloc, interactive srun, sbatch inside a job: each has what it can have, and nobody else's."""

from __future__ import annotations

from pathlib import Path

from testbed import Cluster
from tests.slurm.training import QUICK, Training, decisions, program

ARRAY = "#!/bin/bash\nexec jit-srun --ntasks-per-node=1 {program}\n"
PATIENCE = 150.0


def options(out: Path, more: str = "") -> str:
    """The option with a directory of the test's own."""
    out.mkdir(parents=True, exist_ok=True)
    return f"--jit-ckpt=dir={out}/checkpoints,{QUICK}{more}"


def test_two_tasks_of_an_array_fail_at_once(cluster: Cluster, out: Path) -> None:
    """Each saves into its own directory, goes back to the queue by itself, and comes to the same end as the other."""
    words = program(out, "kill:backward:1:5", "--epochs=1").replace(f"--out={out}", f"--out={out}/$SLURM_ARRAY_TASK_ID")
    given = [options(out, ",relaunch=off"), "--array=1-2", "--nodes=2", f"--output={out}/%a.out"]
    job = cluster.sbatch(*given, script=ARRAY.format(program=words))
    runs = [Training(cluster, f"{job}_{task}", out / str(task), out / "checkpoints", 2) for task in (1, 2)]
    for run in runs:
        assert run.end() == "COMPLETED", (out / f"{run.out.name}.out").read_text()
        assert decisions(run) == ["requeue", "done"]
        assert cluster.job(run.job)["Restarts"] == "1"
        assert run.manifests()[0]["job_id"] == run.job
        assert run.replayed() <= 1
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [run.job for run in runs]
    assert runs[0].finals() == runs[1].finals()


def test_salloc_and_jit_srun(cluster: Cluster, out: Path) -> None:
    """Started again inside the allocation, from the terminal that holds it."""
    words = program(out, "kill:backward:1:5", "--epochs=1").split()
    line = ["salloc", options(out), "-N2", "--ntasks-per-node=1", "jit-srun", *words]
    done = cluster.on("head", *line, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    (directory,) = (out / "checkpoints").iterdir()
    run = Training(cluster, directory.name, out, out / "checkpoints", 2)
    assert decisions(run) == ["relaunch", "done"]
    assert run.replayed() <= 1


def test_salloc_and_plain_srun(cluster: Cluster, out: Path) -> None:
    """Saved, and the way on is said: nobody is there to start the ranks again."""
    words = program(out, "kill:backward:1:5", "--epochs=1").split()
    line = ["salloc", options(out), "-w", "n1,n2", "--ntasks-per-node=1", "srun", *words]
    saved_and_said(cluster, out, line)


def test_interactive_srun(cluster: Cluster, out: Path) -> None:
    """srun that makes its own allocation: saved, and the way on is said."""
    words = program(out, "kill:backward:1:5", "--epochs=1").split()
    saved_and_said(cluster, out, ["srun", options(out), "-w", "n1,n2", "--ntasks-per-node=1", *words])


def saved_and_said(cluster: Cluster, out: Path, line: list[str]) -> None:
    """The command fails, leaves one checkpoint, and names it."""
    meet = {"MASTER_ADDR": "n1", "MASTER_PORT": "21777"}  # what a script without jit-srun sees to by itself
    done = cluster.on("head", *line, timeout=PATIENCE, check=False, env=meet)
    assert done.returncode != 0
    (saved,) = (out / "checkpoints").glob("*/m5-r0")
    assert f"--jit-ckpt=resume={saved}" in done.stderr


def test_sbatch_inside_a_job(cluster: Cluster, out: Path) -> None:
    """A job submitted from a batch script has the option only if it asks, and then a directory of its own."""
    out.mkdir()
    inner = (
        "#!/bin/bash\necho option=[$JIT_CKPT] training=[$JIT_CKPT_TRAINING] srun=$(command -v srun)\nsrun hostname\n"
    )
    (out / "inner.sh").write_text(inner)
    words = program(out, "kill:backward:1:5", "--epochs=1")
    (out / "asks.sh").write_text(f"#!/bin/bash\nexec jit-srun --ntasks-per-node=1 {words}\n")
    outer = (
        f"#!/bin/bash\nsbatch --parsable -N1 -o {out}/inner.out {out}/inner.sh\n"
        f"sbatch --parsable -N2 -o {out}/asks.out {options(out)} {out}/asks.sh >{out}/asks.id\n"
        f"srun true\n"
    )
    job = cluster.sbatch(options(out), "-N1", f"--output={out}/outer.out", script=outer)
    assert cluster.wait_state(job, "COMPLETED", 60)
    asks = (out / "asks.id").read_text().strip()
    run = Training(cluster, asks, out, out / "checkpoints", 2)
    assert run.end() == "COMPLETED", (out / "asks.out").read_text()
    assert decisions(run) == ["relaunch", "done"]
    told = (out / "inner.out").read_text()
    assert "option=[] training=[]" in told, told
    assert str(cluster.settings.folder) not in told
    assert [path.name for path in (out / "checkpoints").iterdir()] == [asks]
