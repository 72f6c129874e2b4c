"""Turn one disturbed run into the moments of its recovery (Marks), its stages, and what every node did when (lanes).

Rule 1: no I/O; times are seconds since the epoch as the processes wrote them, all on one clock (one machine).
Rule 2: a moment that cannot be found is an error with its name, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo.record import DemoError, Entry, Loss, Record


@dataclass(frozen=True)
class Marks:
    """When things happened, seconds since the epoch; `failure` is when the power was cut."""

    launched: float
    first_update: float
    failure: float
    detected: float
    settled: float
    saved: float
    committed: float
    relaunched: float
    restored: float
    replayed: float
    ended: float


@dataclass(frozen=True)
class Span:
    """What went on from `start` to `end`: `what` is "start", "training", "off", "spare" or the name of a stage."""

    what: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class Lane:
    """One node over time; `ticks` are the moments its ranks logged a loss."""

    node: str
    spans: tuple[Span, ...]
    ticks: tuple[float, ...]


@dataclass(frozen=True)
class Places:
    """The node of every rank before and after the failure, the node that failed, the spare ones."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    failed: str
    spare: tuple[str, ...]


# The stages in order: name, the mark it begins with, the mark it ends with.
STAGES = (
    ("detect", "failure", "detected"),
    ("settle", "detected", "settled"),
    ("save", "settled", "saved"),
    ("commit", "saved", "committed"),
    ("relaunch", "committed", "relaunched"),
    ("restore", "relaunched", "restored"),
    ("replay", "restored", "replayed"),
)
AFTER_LAUNCH = 5  # index of the first stage that the relaunched ranks do


def floor(calm: Record) -> float:
    """Return the seconds from the start of the undisturbed run's step to its first update."""
    launch = _first(calm.journal, "launch", "launch of the undisturbed run")
    update = _notice(calm.journal, "update", launch.time, "first update of the undisturbed run")
    return update.time - launch.time


def find_marks(rough: Record, failure: float) -> Marks:
    """Find every moment of the recovery from the failure at `failure`.

    Raises:
        DemoError: one cannot be found; names it.
    """
    if rough.manifest is None:
        raise DemoError("the run committed no checkpoint, so there is nothing to draw")
    times = rough.manifest.times
    missing = {"detected", "settled", "saved", "committed"} - times.keys()
    if missing:
        raise DemoError(f"the manifest does not say when the state was {', '.join(sorted(missing))}")
    launch = _first(rough.journal, "launch", "first launch")
    first = _notice(rough.journal, "update", launch.time, "first update")
    again = _first(rough.journal, "launch", "launch after the failure", lambda e: e.time > failure)
    restored = _notice(rough.journal, "started", again.time, "start of training after the failure")
    replayed = _notice(rough.journal, "update", restored.time, "first update after the failure")
    ended = max(line.time for losses in rough.losses.values() for line in losses)
    early = (times["detected"], times["settled"], times["saved"], times["committed"])
    return Marks(launch.time, first.time, failure, *early, again.time, restored.time, replayed.time, ended)


def stages(marks: Marks) -> tuple[Span, ...]:
    """Return the recovery as consecutive stages, from the failure to the first replayed update."""
    return tuple(Span(name, getattr(marks, a), getattr(marks, b)) for name, a, b in STAGES)


def times_s(marks: Marks, floor_s: float) -> dict[str, float]:
    """Return the summary's times in seconds: each stage, failure to first replayed update, the floor."""
    found = {stage.what: round(stage.end - stage.start, 3) for stage in stages(marks) if stage.what != "replay"}
    return {**found, "first_update": round(marks.replayed - marks.failure, 3), "floor": round(floor_s, 3)}


def lanes(marks: Marks, places: Places, losses: Mapping[int, Sequence[Loss]]) -> tuple[Lane, ...]:
    """Return one lane a node; `losses` (rank -> its log) gives the ticks."""
    nodes = sorted({*places.before, *places.after, *places.spare})
    return tuple(Lane(node, _spans(node, marks, places), _ticks(node, marks, places, losses)) for node in nodes)


def _spans(node: str, marks: Marks, places: Places) -> tuple[Span, ...]:
    if node in places.before:
        found = [
            Span("start", marks.launched, marks.first_update),
            Span("training", marks.first_update, marks.failure, _ranks(node, places.before)),
        ]
    else:
        found = [Span("spare", marks.launched, marks.relaunched, "spare")]
    if node == places.failed:
        return (*found, Span("off", marks.failure, marks.ended, "powered off"))
    recovery = stages(marks)
    if node in places.before:
        found += recovery[:AFTER_LAUNCH]
    if node in places.after:
        found += recovery[AFTER_LAUNCH:]
        found.append(Span("training", marks.replayed, marks.ended, _ranks(node, places.after)))
    return tuple(found)


def _ranks(node: str, nodes: Sequence[str]) -> str:
    ranks = [str(rank) for rank, name in enumerate(nodes) if name == node]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else ""


def _ticks(node: str, marks: Marks, places: Places, losses: Mapping[int, Sequence[Loss]]) -> tuple[float, ...]:
    found = []
    for rank, lines in losses.items():
        for line in lines:
            nodes = places.before if line.time < marks.relaunched else places.after
            if rank < len(nodes) and nodes[rank] == node:
                found.append(line.time)
    return tuple(found)


def _notice(journal: Sequence[Entry], event: str, since: float, what: str) -> Entry:
    return _first(journal, "notice", what, lambda e: e.time >= since and _event(e.data) == event)


def _event(data: Mapping[str, Any]) -> str:
    return str(data.get("notice", {}).get("event", ""))


def _first(journal: Sequence[Entry], kind: str, what: str, test: Callable[[Entry], bool] = lambda e: True) -> Entry:
    for entry in journal:
        if entry.kind == kind and test(entry):
            return entry
    raise DemoError(f"jit-srun's journal does not hold the {what} ({len(journal)} lines)")
