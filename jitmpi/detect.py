"""Turn what the agents saw into one Fault: hang detection by progress, and the cause among many symptoms.

Rule 1: no I/O and no clock here; times come in as arguments.
Rule 2: a hang is judged only inside a minibatch (data, forward, backward, update); evaluation may take for ever.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from jitmpi.events import Fault, Report

MEASURED = 5  # minibatches timed before a hang can be called: the first ones compile, allocate and fill caches
WINDOW = 31  # minibatches whose median counts

# A kind explains those after it: a planned end ends in deaths, a death makes its peers raise and hang.
CAUSES = ("signal", "death", "exception", "hang")


class Progress:
    """How long this rank's minibatches take, and from when on silence is a hang.

    Args:
        factor: times the median; 0 turns detection off.
        floor: seconds below which nothing is a hang.
    """

    def __init__(self, factor: float, floor: float) -> None:
        self.factor, self.floor = factor, floor
        self.last: float | None = None
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._count = 0

    def passed(self, now: float) -> None:
        """Note that the training thread passed a boundary at `now` (seconds, monotonic)."""
        if self.last is not None:
            self._durations.append(now - self.last)
            self._count += 1
        self.last = now

    def pause(self) -> None:
        """Note that the loop ended or rests: the time until the next boundary is not a minibatch."""
        self.last = None

    def postpone(self, now: float) -> None:
        """Begin to count anew: what took so long was no part of the minibatch."""
        if self.last is not None:
            self.last = now

    def overdue_at(self) -> float | None:
        """Return when (monotonic seconds) silence becomes a hang; None while that cannot be said."""
        last = self.last
        if not self.factor or last is None or self._count < MEASURED:
            return None
        return last + max(self.floor, self.factor * statistics.median(list(self._durations)))


def merge(
    faults: Sequence[Fault], reports: Iterable[Report], lost: Collection[int], unreachable: Collection[int]
) -> Fault:
    """Name the one cause of a round from all that was seen in it.

    A death explains exceptions and hangs elsewhere. A hang is blamed on ranks that do not answer, else on those that
    are furthest behind.

    Raises:
        ValueError: `faults` is empty.
    """
    if not faults:
        raise ValueError("a round has at least one fault")
    silent = _silent(faults, lost)
    deaths = tuple(sorted(set(lost) - set(silent)))
    kind = min((f.kind for f in faults), key=CAUSES.index)
    if deaths and kind != "signal":
        kind = "death"
    first = min((f for f in faults if f.kind == kind), key=lambda f: f.when, default=faults[0])
    raised = {r.rank: r.error for r in reports if r.error}
    if kind == "death":
        ranks = deaths
    elif kind == "exception":
        ranks = tuple(sorted({r for f in faults if f.kind == kind for r in f.ranks} | set(raised)))
    elif kind == "hang":
        ranks = silent or _furthest_behind(reports)
    else:
        ranks = tuple(sorted({r for f in faults if f.kind == kind for r in f.ranks}))
    away = tuple(sorted(set(unreachable) & set(lost)))
    return Fault(kind, ranks, away, max(f.minibatch for f in faults), first.detail, min(f.when for f in faults))


def _silent(faults: Sequence[Fault], lost: Collection[int]) -> tuple[int, ...]:
    hung = {r for f in faults if f.kind == "hang" for r in f.ranks}
    dead = {r for f in faults if f.kind == "death" for r in f.ranks}
    return tuple(sorted((hung - dead) & set(lost)))


def _furthest_behind(reports: Iterable[Report]) -> tuple[int, ...]:
    progress = {r.rank: (r.minibatch, r.phase != "between") for r in reports}
    if not progress or len(set(progress.values())) == 1:
        return ()  # all in the same place: nobody stands out, so nobody is blamed
    least = min(progress.values())
    return tuple(sorted(r for r, p in progress.items() if p == least))
