"""Every batch script of sbatch_templates: submitted as it is, but for sizes and GPUs, with a failure to survive."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.plugin import REPO
from tests.slurm.training import HERE, QUICK, Training, decisions

TEMPLATES = sorted(path.name for path in (REPO / "sbatch_templates").glob("*.sbatch"))
# On this cluster: no GPUs, two ranks a training, a partition of another name.
SMALL = (
    (r"#SBATCH --gpus-per-node=8\n", ""),
    (r"--cpus-per-task=8", "--cpus-per-task=1"),
    (r"--nodes=4", "--nodes=2"),
    (r"--nodes=5", "--nodes=3"),
    (r"--ntasks-per-node=8", "--ntasks-per-node=2"),
    (r"--nproc-per-node=8", "--nproc-per-node=2"),
    (r"--array=0-9", "--array=3"),
    (r"--partition=preemptible", "--partition=low"),
)
TRAIN = """import runpy, sys
sys.argv = [word for word in sys.argv if not word.startswith("--seed")]
runpy.run_path({trainee!r}, run_name="__main__")
"""
# A container whose root file system is the host's, without Slurm: no programs, no configuration, no key.
APPTAINER = """#!/bin/bash
while [ "$1" != train.sif ]; do shift; done
shift
exec unshare -m bash -euc '
    for program in srun sbatch salloc scontrol scancel squeue sinfo sattach sbcast sacct; do
        mount --bind /dev/null "/usr/bin/$program"
    done
    mount -t tmpfs none /etc/slurm
    mount -t tmpfs none /run/munge 2>/dev/null || true
    ! scontrol ping 2>/dev/null || exit 99
    mkdir -p /tmp/image
    mount --rbind / /tmp/image
    exec chroot /tmp/image "$BASH" -c "cd \\"$PWD\\"; exec \\"\\$@\\"" bash "$@"' bash "$@"
"""


def small(name: str, out: Path) -> Path:
    """Copy a template beside a train.py, made fit for this cluster."""
    text = (REPO / "sbatch_templates" / name).read_text()
    for pattern, instead in SMALL:
        text = re.sub(pattern, instead, text)
    shutil.rmtree(out, ignore_errors=True)
    (out / "bin").mkdir(parents=True)
    (out / "train.py").write_text(TRAIN.format(trainee=str(HERE / "trainee.py")))
    (out / "bin" / "apptainer").write_text(APPTAINER)
    (out / "bin" / "apptainer").chmod(0o755)
    (out / name).write_text(text)
    return out / name


def submit(cluster: Cluster, template: Path, *words: str, options: str = "") -> Training:
    """Submit a template with arguments for the trainee."""
    out = template.parent
    given = f"--jit-ckpt=dir={out}/checkpoints,{QUICK}{options}"
    path = f"{out}/bin:{REPO}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    more = [f"--output={out}/slurm.out", str(template), f"--out={out}", "--epochs=1", *words]
    job = cluster.sbatch(given, *more, cwd=str(out), env={"PATH": path})
    return Training(cluster, job, out, out / "checkpoints", 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_survives_a_killed_rank(cluster: Cluster, out: Path, name: str) -> None:
    """Saved by the other rank, started again, trained to the end."""
    run = submit(cluster, small(name, out), "--inject=kill:backward:1:5")
    assert run.end() == "COMPLETED", run.log
    (directory,) = run.directory.iterdir()
    run.job = directory.name  # an array's task has another name than the array
    assert decisions(run) == ["relaunch", "done"], run.log
    assert len(run.manifests()) == 1
    assert run.replayed() <= 1
    assert {row["attempt"] for row in run.rows(0)} == {"0", "1"}


def test_torchrun_and_the_warning_before_the_time_limit(cluster: Cluster, out: Path) -> None:
    """USR1 reaches the ranks and does not end torchrun: saved, and back through the queue."""
    run = submit(cluster, small("torchrun.sbatch", out), "--pause=0.3", "--wait=12")
    run.wait_minibatch(5)
    cluster.on("head", "scancel", "-s", "USR1", run.job)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["requeue", "done"]
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    assert run.replayed() <= 1


def test_torchrun_and_a_slow_save(cluster: Cluster, out: Path) -> None:
    """The survivor beside the dead rank needs longer than the 30 s that torchrun gives it."""
    run = submit(cluster, small("torchrun.sbatch", out), "--inject=kill:backward:1:5", "--slow-save=35")
    run.ranks = 4
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["relaunch", "done"]
    assert 0 in [file["rank"] for file in run.manifests()[0]["files"]]
