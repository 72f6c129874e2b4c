"""What Slurm ends on purpose: the state is saved before, and the job comes back where it should."""

from __future__ import annotations

from pathlib import Path

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, decisions, submit


def test_a_time_limit_is_outlived(cluster: Cluster, reference: Training, out: Path) -> None:
    """Slurm's own warning before the limit: saved, requeued, finished in the next allocation."""
    limit = ("--time=2", "--signal=USR1@60")  # Slurm looks once in a while and may warn up to a minute earlier
    run = submit(cluster, out, sbatch=limit, trainee=("--pause=2.0",))
    run.wait(lambda: bool(run.manifests()), 150)
    assert run.end(timeout=400) in ("COMPLETED", "TIMEOUT"), run.log
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    assert decisions(run)[0] == "requeue"
    assert "limit of" not in run.log


def test_a_preempted_job_comes_back(cluster: Cluster, reference: Training, out: Path) -> None:
    """A job of a better partition takes the nodes: saved within the grace time, requeued, finished afterwards."""
    run = submit(cluster, out, sbatch=("--partition=low",), trainee=("--pause=0.2",))
    run.wait_minibatch(12)
    cluster.sbatch("--partition=high", "--nodes=5", "--exclusive", "--output=/dev/null", script="#!/bin/sh\nsleep 3\n")
    assert run.end(timeout=300) == "COMPLETED", run.log
    assert_equal(run, reference)
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    # Slurm 24.11 requeues a job once more after its good end when it had been preempted with a grace time before.
    assert run.replayed() <= 1 or not cluster.version().startswith("22.")
