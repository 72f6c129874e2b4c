"""The controller's hook, against a Slurm in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_plugin.controller_epilog import DEADLINE, REVOKED, hasten, job_of, limit
from slurm_plugin.slurm_text import JobInfo, NodeInfo
from tests.unit.fake_slurm import FakeSlurm

NODES = [
    NodeInfo("n1", "IDLE", "", "n1", 6818),
    NodeInfo("n2", "IDLE*", "", "n2", 6818),
    NodeInfo("n3", "DOWN+DRAIN", "disk", "n3", 6818),
]


class Time:
    """A clock that sleeping moves on; the job leaves its nodes at `until`."""

    def __init__(self, slurm: FakeSlurm, until: float, then: JobInfo) -> None:
        self.now, self.waits, self._slurm, self._until, self._then = 0.0, 0, slurm, until, then

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.waits += 1
        if self.now >= self._until:
            self._slurm.jobs["7"] = self._then


def run(then: JobInfo, until: float = 5.0) -> tuple[str, FakeSlurm, Time]:
    """Run the hook's work for job 7, which completes until then."""
    slurm = FakeSlurm({"7": JobInfo("7", "PENDING", completing=True, restarts=1), "8": JobInfo("8", "PENDING")}, NODES)
    time = Time(slurm, until, then)
    done = hasten(slurm, "7", ("n1", "n2", "n3"), clock=lambda: time.now, sleep=time.sleep)
    return done, slurm, time


def test_a_requeued_job_starts_now_without_its_sick_nodes() -> None:
    """Once it is pending, but not in the second in which its nodes ended it; what was excluded before stays so."""
    done, slurm, time = run(JobInfo("7", "PENDING", restarts=1, excluded=("n9",)))
    assert 5.0 + REVOKED <= time.now < 5.0 + 2 * REVOKED
    assert slurm.done == [("update", "7", "now", ("n9", "n2", "n3"))]
    assert done == "job 7 may start now without n9,n2,n3"


@pytest.mark.parametrize(("until", "late", "looks"), [(0.5, 0.5, 2), (1.4, 0.5, 3), (20.0, 5.0, 10), (300.0, 5.0, 68)])
def test_it_looks_seldom_and_is_in_time(until: float, late: float, looks: int) -> None:
    """Each look is two requests to a slurmctld that may have a hundred jobs on their way out."""
    done, _, time = run(JobInfo("7", "PENDING", restarts=1), until)
    assert done
    assert time.now <= until + late + REVOKED
    assert time.waits <= looks


@pytest.mark.parametrize(
    "then",
    [JobInfo("7", "COMPLETED"), JobInfo("7", "CANCELLED", restarts=1), JobInfo("7", "PENDING", restarts=0)],
)
def test_a_job_that_does_not_come_back_is_not_touched(then: JobInfo) -> None:
    """Neither an ended one nor one that never was requeued."""
    done, slurm, _ = run(then)
    assert (done, slurm.done) == ("", [])


def test_a_slurmctld_that_does_not_answer_for_a_while_is_asked_again() -> None:
    """With many jobs on their way out it may be slower than its commands wait; nobody waits two minutes for that."""
    slurm = FakeSlurm({"7": JobInfo("7", "PENDING", completing=True, restarts=1)}, NODES)
    time = Time(slurm, 40.0, JobInfo("7", "PENDING", restarts=1))
    slurm.refuse = 30
    assert hasten(slurm, "7", ("n1",), clock=lambda: time.now, sleep=time.sleep) == "job 7 may start now"


def test_a_job_that_slurm_holds_after_a_failed_launch_is_released() -> None:
    """Nobody would be told of it; but not more often than the job may be requeued."""
    held = JobInfo("7", "PENDING", restarts=2, held=True)
    done, slurm, _ = run(replace(held, excluded=("n2", "n3")))
    assert slurm.done == [("update", "7", "now", None), ("release", "7")]
    assert "released" in done
    done, slurm, _ = run(replace(held, restarts=11))
    assert slurm.done == []
    assert "stays held" in done


def test_the_limit_is_the_jobs_own() -> None:
    """And the default where the text says nothing or nonsense."""
    assert limit({"SPANK_JIT_CKPT": "dir=/x,requeues=3"}) == 3
    assert limit({"SPANK_JIT_CKPT": "nonsense"}) == limit({}) == 10


def test_it_gives_up_at_its_deadline() -> None:
    """A job that never leaves its nodes is not watched for ever."""
    done, slurm, time = run(replace(JobInfo("7", "PENDING"), completing=True), until=10 * DEADLINE)
    assert "left alone" in done
    assert slurm.done == []
    assert time.now < DEADLINE + 5


def test_only_jobs_of_ours_with_a_real_number_are_looked_at() -> None:
    """Others, and ids that are none, are nobody's business."""
    ours = {"SPANK_JIT_CKPT": "dir=/x", "SLURM_JOB_ID": "7"}
    assert job_of(ours) == "7"
    assert job_of({**ours, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}) == "5_2"
    assert job_of({"SLURM_JOB_ID": "7"}) == ""
    assert job_of({**ours, "SLURM_JOB_ID": "7 StartTime=now"}) == ""
