"""The site's file in whole jobs: protected without asking, saved before the time limit without a signal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import Cluster
from tests.slurm.training import HERE, Training, assert_equal, decisions, submit


@pytest.fixture
def policed(cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; what a test writes into its site's file is gone afterwards."""
    yield cluster
    cluster.write_site("")


def test_a_job_that_did_not_ask_is_protected(policed: Cluster, reference: Training, out: Path) -> None:
    """The site's file alone gives the option, directory, deadlines and a spare node; a rank is killed."""
    out.mkdir()
    where = f"enable = main\ndefault-partition = main\ndir = {out}/%u/run-%j\n"
    policed.write_site(f"{where}spares = 1\nhang-floor = 6\nsettle = 4\nsave = 60\n")
    (out / "root").mkdir()
    program = f"python {HERE / 'trainee.py'} --out={out} --inject=kill:backward:1:7"
    script = out / "job.sh"
    script.write_text(f"#!/bin/bash\nexec jit-srun --ntasks-per-node=1 {program}\n")
    job = policed.sbatch("--nodes=4", f"--output={out}/slurm.out", str(script))
    run = Training(policed, job, out, out / "root" / f"run-{job}", 3)
    assert run.end() == "COMPLETED", run.log
    assert decisions(run)[0] == "relaunch", run.log
    assert_equal(run, reference)


def test_a_time_limit_needs_no_signal_of_the_user(policed: Cluster, reference: Training, out: Path) -> None:
    """sbatch sets Slurm's warning by itself; it reaches the ranks, which save; the job goes back to the queue."""
    run = submit(policed, out, sbatch=("--time=2",), trainee=("--pause=4.0",))
    run.wait(lambda: bool(run.manifests()), 180)
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    run.wait(lambda: bool(decisions(run)), 30)
    assert decisions(run)[0] == "requeue"
    assert "limit of" not in run.log
