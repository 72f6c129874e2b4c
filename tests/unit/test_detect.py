"""detect: hangs by progress, and one cause among many symptoms."""

from __future__ import annotations

import pytest

from jitmpi.detect import MEASURED, Progress, merge
from jitmpi.events import Fault, Report


def fault(kind: str, *ranks: int, away: tuple[int, ...] = (), when: float = 1.0, detail: str = "") -> Fault:
    return Fault(kind, ranks, away, 3, detail, when)


def report(rank: int, minibatch: int = 3, phase: str = "between", error: str = "") -> Report:
    return Report(rank, minibatch, True, 0, (), (), error, phase)


def test_the_first_minibatches_are_never_a_hang() -> None:
    """Compilation and warm-up may take as long as they like."""
    progress = Progress(10.0, 1.0)
    for i in range(MEASURED):
        progress.passed(float(i))
        assert progress.overdue_at() is None
    progress.passed(float(MEASURED))
    assert progress.overdue_at() == MEASURED + 10.0


def test_the_floor_holds_for_fast_loops() -> None:
    """A loop of milliseconds is not judged by milliseconds."""
    progress = Progress(10.0, 300.0)
    for i in range(20):
        progress.passed(i * 0.001)
    assert progress.overdue_at() == pytest.approx(300.019)


def test_a_pause_is_no_minibatch() -> None:
    """An evaluation between two epochs neither hangs nor counts in the median."""
    progress = Progress(2.0, 1.0)
    for i in range(10):
        progress.passed(float(i))
    progress.pause()
    assert progress.overdue_at() is None
    progress.passed(1000.0)
    assert progress.overdue_at() == 1002.0


def test_detection_can_be_turned_off() -> None:
    """hang=off means never."""
    progress = Progress(0.0, 1.0)
    for i in range(20):
        progress.passed(float(i))
    assert progress.overdue_at() is None


def test_a_death_explains_the_errors_of_its_peers() -> None:
    """Survivors raise because of the death; the death is the cause."""
    merged = merge(
        [fault("exception", 0, when=1.0), fault("death", 1, when=1.1, detail="rank 1")], [report(0)], {1}, ()
    )
    assert (merged.kind, merged.ranks, merged.detail, merged.when) == ("death", (1,), "rank 1", 1.0)


def test_a_planned_end_explains_everything() -> None:
    """Slurm's kill after the signal is not a failure of a node."""
    merged = merge([fault("death", 2, away=(2,)), fault("signal", 0, 1)], [], {2}, {2})
    assert (merged.kind, merged.ranks) == ("signal", (0, 1))


def test_a_silent_rank_is_the_one_that_hangs() -> None:
    """A stopped process answers nothing; whoever waits for it is not to blame."""
    merged = merge([fault("hang"), fault("hang", 3)], [report(0), report(1), report(2)], {3}, ())
    assert (merged.kind, merged.ranks, merged.unreachable) == ("hang", (3,), ())


def test_without_a_silent_rank_the_furthest_behind_is_blamed() -> None:
    """A rank stuck in its data loader is one minibatch behind, or nobody stands out."""
    assert merge([fault("hang")], [report(0, 4), report(1, 3), report(2, 4)], (), ()).ranks == (1,)
    assert merge([fault("hang")], [report(0), report(1)], (), ()).ranks == ()


def test_an_exception_on_every_rank_names_every_rank() -> None:
    """A bug of the script is told from a bad node by being everywhere."""
    reports = [report(0, error="ValueError"), report(1, error="ValueError")]
    assert merge([fault("exception", 0)], reports, (), ()).ranks == (0, 1)


def test_unreachable_are_only_lost_ranks() -> None:
    """The node of a rank that lives is not called dead."""
    assert merge([fault("death", 1, away=(1,))], [], {1, 2}, {1, 0}).unreachable == (1,)
