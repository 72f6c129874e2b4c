"""outage: silence is waited for, a refusal is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_plugin.outage import OUTAGE, ask, forgot
from slurm_plugin.slurm_text import JobInfo, SlurmError
from tests.unit.fake_slurm import FakeSlurm


class Asking:
    """Questions about job 7 on a clock of their own; `at_each` happens in every pause."""

    def __init__(self, refuse: int = 0) -> None:
        self.slurm, self.now, self.said = FakeSlurm({"7": JobInfo("7", "RUNNING")}, []), 0.0, list[str]()
        self.slurm.refuse = refuse
        self.at_each: Callable[[], None] = lambda: None

    def ask(self, job: str = "7", refusals: float = 0.0) -> JobInfo:
        """Ask for a job."""
        question = lambda: self.slurm.job(job)  # noqa: E731
        return ask(self.slurm, question, self.said.append, refusals=refusals, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at_each()


def test_an_outage_of_half_an_hour_is_sat_out() -> None:
    """The question is answered in the end, and the trouble was told once."""
    asking = Asking(refuse=1800)
    assert asking.ask().state == "RUNNING"
    assert asking.now == pytest.approx(1800)
    assert asking.said == ["slurmctld does not answer; waiting for it"]


def test_an_outage_without_an_end_has_a_deadline() -> None:
    """Nobody waits for ever."""
    asking = Asking(refuse=10**6)
    with pytest.raises(SlurmError, match="does not answer"):
        asking.ask()
    assert asking.now == OUTAGE


def test_a_refusal_is_asked_once_more_and_then_believed() -> None:
    """Slurm may have come back between the question and the look at it."""
    asking = Asking()
    with pytest.raises(SlurmError, match="job 8 is not known"):
        asking.ask("8")
    assert asking.now == 1.0
    with pytest.raises(SlurmError, match="job 8 is not known"):
        asking.ask("8", refusals=60.0)
    assert asking.now == 61.0
    assert asking.said == ["Slurm: job 8 is not known"]


def test_the_time_of_an_outage_does_not_count_as_refused() -> None:
    """What was refused before it may be granted after it."""
    asking = Asking()

    def fate() -> None:
        if asking.now == 3.0:
            asking.slurm.refuse = 100
        if asking.now > 100.0 and not asking.slurm.refuse:
            asking.slurm.jobs["8"] = JobInfo("8", "PENDING")

    asking.at_each = fate
    assert asking.ask("8", refusals=10.0).state == "PENDING"


@pytest.mark.parametrize(
    ("boot", "submitted", "lost"),
    [
        (11.0, 12.0, True),
        (11.0, 11.0, True),
        (9.0, 12.0, True),
        (4.0, 12.0, False),
        (11.0, 10.5, False),
        (0.0, 12.0, False),
    ],
)
def test_slurm_forgets_by_being_started_between_the_end_and_the_return(
    boot: float, submitted: float, lost: bool
) -> None:
    """A slurmctld that has run all the time, or was started while the job waited, has put it back on purpose."""
    slurm = FakeSlurm({"7": JobInfo("7", "RUNNING", submitted=submitted)}, [])
    slurm.boot = boot
    assert forgot(slurm, print, "7", 10.0) == lost
    assert not forgot(slurm, print, "8", 10.0), "what cannot be asked is not assumed"
