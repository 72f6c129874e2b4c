"""What Slurm and people end on purpose: saved before, and back where it should be; see docs/planned_ends.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, decisions, submit


@dataclass(frozen=True)
class End:
    """One way to end, or to disturb, a job in the middle of its training.

    Attributes:
        act: done once minibatch 8 is reached.
        decided, saved: the decisions of jit-srun and the kinds of the faults in the manifests, in all the job's life.
        inject, user: how the job is submitted.
    """

    act: Callable[[Cluster, Training], object]
    decided: tuple[str, ...]
    saved: tuple[str, ...]
    inject: tuple[str, ...] = ()
    user: bool = False
    state: str = "COMPLETED"


def scontrol(*words: str, user: bool = False) -> Callable[[Cluster, Training], object]:
    """One call of scontrol; JOB stands for the job's number."""
    return lambda cluster, run: cluster.on(
        "head", "scontrol", *(run.job if w == "JOB" else w for w in words), user=user
    )


def cancel(cluster: Cluster, run: Training) -> None:
    """Cancelled by its owner, and not heard of again."""
    cluster.on("head", "scancel", run.job)
    cluster.wait_state(run.job, "CANCELLED", 60)
    time.sleep(5)


def suspend(cluster: Cluster, run: Training) -> None:
    """Suspended for longer than what would be a hang."""
    scontrol("suspend", "JOB")(cluster, run)
    time.sleep(15)
    scontrol("resume", "JOB")(cluster, run)


def drain(cluster: Cluster, run: Training) -> None:
    """A node that the ranks use is drained; heal() undoes it."""
    node = run.journal()[0]["nodes"][2]
    scontrol("update", f"NodeName={node}", "State=DRAIN", "Reason=test")(cluster, run)


LATER = ("kill:backward:1:36",)
ENDS = {
    "requeued-by-an-administrator": End(scontrol("requeue", "JOB"), ("requeue", "done"), ("signal",)),
    "requeued-by-its-owner": End(scontrol("requeue", "JOB", user=True), ("requeue", "done"), ("signal",), user=True),
    "cancelled": End(cancel, (), ("signal",), state="CANCELLED"),
    "suspended-and-resumed": End(suspend, ("done",), ()),
    "a-node-drained-before-a-failure": End(drain, ("relaunch", "done"), ("death",), inject=LATER),
    "partition-down-before-a-failure": End(
        scontrol("update", "PartitionName=main", "State=DOWN"), ("relaunch", "done"), ("death",), inject=LATER
    ),
}


@pytest.fixture
def partition(cluster: Cluster) -> Iterator[None]:
    """The partition is up again afterwards."""
    yield
    cluster.on("head", "scontrol", "update", "PartitionName=main", "State=UP")


@pytest.mark.usefixtures("partition")
@pytest.mark.parametrize("name", ENDS)
def test_the_matrix_of_planned_ends(cluster: Cluster, reference: Training, out: Path, name: str) -> None:
    """What is saved, what is decided, how the job ends; and what goes on ends in the undisturbed run's bits."""
    end = ENDS[name]
    run = submit(cluster, out, *end.inject, trainee=("--pause=0.3", "--wait=30"), user=end.user)
    run.wait_minibatch(8)
    end.act(cluster, run)
    run.go()
    assert run.end() == end.state, run.log
    assert [manifest["fault"]["kind"] for manifest in run.manifests()] == list(end.saved), run.log
    if end.state == "COMPLETED":
        assert tuple(decisions(run)) == end.decided, run.log
        assert_equal(run, reference)
    else:
        assert "requeue" not in decisions(run), run.log
    if "drained" in name:
        first, second = (entry["nodes"] for entry in run.journal() if entry["entry"] == "launch")
        assert first[2] not in second


def test_a_reservation_that_ends_early_is_outlived(cluster: Cluster, reference: Training, out: Path) -> None:
    """Slurm ends its jobs as at a time limit: saved, requeued, finished outside of it."""
    scontrol = ("head", "scontrol")
    cluster.on(
        *scontrol,
        "create",
        "reservation",
        "ReservationName=r",
        "StartTime=now",
        *("Duration=60", "Users=root", "Nodes=ALL"),
    )
    try:
        run = submit(cluster, out, sbatch=("--reservation=r", "--time=10"), trainee=("--pause=1.0",))
        run.wait_minibatch(8)
        cluster.on(*scontrol, "update", "ReservationName=r", "EndTime=now+1")
        assert run.end() == "COMPLETED", run.log
    finally:
        cluster.on(*scontrol, "delete", "ReservationName=r", check=False)
    assert_equal(run, reference)
    assert decisions(run) == ["requeue", "done"]
    assert [manifest["fault"]["kind"] for manifest in run.manifests()] == ["signal"]


def test_a_time_limit_is_outlived(cluster: Cluster, reference: Training, out: Path) -> None:
    """At the limit Slurm ends the ranks with TERM: saved within KillWait, requeued, finished in the next allocation."""
    run = submit(cluster, out, sbatch=("--time=1",), trainee=("--pause=2.5",))
    assert run.end(timeout=400) == "COMPLETED", run.log
    assert {manifest["fault"]["kind"] for manifest in run.manifests()} == {"signal"}
    assert decisions(run)[0] == "requeue"
    assert_equal(run, reference)


def test_a_preempted_job_comes_back(cluster: Cluster, reference: Training, out: Path) -> None:
    """A job of a better partition takes the nodes: saved within the grace time, requeued, finished afterwards."""
    run = submit(cluster, out, options="hang=off", sbatch=("--partition=low",), trainee=("--pause=0.2", "--wait=30"))
    run.wait_minibatch(12)
    high = cluster.sbatch(
        "--partition=high", "--nodes=5", "--exclusive", "--output=/dev/null", script="#!/bin/sh\nsleep 3\n"
    )
    cluster.wait_state(high, ("RUNNING", "COMPLETED"), 120)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    # Slurm 24.11 requeues a job once more after its good end when it had been preempted with a grace time before.
    assert run.replayed() <= 1 or not cluster.version().startswith("22.")
