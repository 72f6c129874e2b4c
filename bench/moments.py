"""Turn what one job left behind (updates, manifests, starts of its batch script) into the moments that are compared.

Rule 1: pure; all times are seconds since the epoch on the one clock of this machine.
Rule 2: a moment that cannot be found is an error that names it, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rows import BenchError

NEEDED = ("detected", "committed")


@dataclass(frozen=True)
class Update:
    """One update that a rank has done."""

    attempt: int
    minibatch: int
    time: float
    pid: int


@dataclass(frozen=True)
class Recovered:
    """One failure and what followed.

    Attributes:
        failed: when the process was killed or the power cut.
        detected, committed: as the manifest says.
        updated: the first update of the launch after it.
        lost: updates that were done and had to be done again; the interrupted minibatch had no update yet.
    """

    failed: float
    detected: float
    committed: float
    updated: float
    lost: int


def read_updates(text: str) -> tuple[Update, ...]:
    """Read a rank's log; a line cut off by the failure is left out."""
    found = []
    for line in text.splitlines():
        try:
            raw = json.loads(line)
            found.append(Update(int(raw["attempt"]), int(raw["minibatch"]), float(raw["time"]), int(raw["pid"])))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(found)


def first_update(updates: Sequence[Update], attempt: int) -> Update:
    """Return the first update of a launch.

    Raises:
        BenchError: there is none.
    """
    for update in updates:
        if update.attempt == attempt:
            return update
    raise BenchError(f"launch {attempt} did no update ({len(updates)} updates in all)")


def recovered(
    failed: float, attempt: int, manifests: Sequence[Mapping[str, Any]], updates: Sequence[Update]
) -> Recovered:
    """Put together what followed the failure of launch `attempt` at `failed`.

    Raises:
        BenchError: no manifest of that launch, a time missing in it, or no update after it.
    """
    times = _times(attempt, manifests)
    again = first_update(updates, attempt + 1)
    before = [u.minibatch for u in updates if u.attempt == attempt]
    lost = sum(1 for minibatch in before if minibatch >= again.minibatch)
    return Recovered(failed, times["detected"], times["committed"], again.time, lost)


def detected_after(failed: float, attempt: int, manifests: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from the failure of launch `attempt` to the first survivor that knew.

    Raises:
        BenchError: no manifest of that launch, or it was known before it happened.
    """
    seconds = _times(attempt, manifests)["detected"] - failed
    if seconds < 0:
        raise BenchError(f"launch {attempt} failed {-seconds:.3f} s before it was made to fail: another failure")
    return seconds


def _times(attempt: int, manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    for manifest in manifests:
        if manifest["attempt"] == attempt:
            times: Mapping[str, float] = manifest["times"]
            missing = [name for name in NEEDED if name not in times]
            if missing:
                raise BenchError(f"the manifest of launch {attempt} does not say when it was {', '.join(missing)}")
            return times
    raise BenchError(f"launch {attempt} committed no checkpoint")
