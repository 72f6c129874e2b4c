"""How much suspicion weighs on a node: entries that lose half their weight with every half-life. Pure.

    <unix time> <who> <what>        one line an entry, in the spool

Rule 1: `who` (a user, or the check that found it) counts once, by the newest entry: whatever one user's jobs do, they
        weigh one at most.
Rule 2: a damaged file weighs nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

FILE: Final = "suspicion"  # its name in the spool
MOST: Final = 64  # entries that are kept, the newest
FORGOTTEN: Final = 10.0  # half-lives after which an entry weighs nothing (a thousandth)

_LINE: Final = re.compile(r"(\d{1,12}) ([a-z0-9-]{1,40}) ([\x20-\x7e]{0,200})")


@dataclass(frozen=True)
class Suspicion:
    """One entry."""

    when: float
    who: str
    what: str


def parse(text: bytes) -> tuple[Suspicion, ...]:
    """Read the file; what is no entry is left out."""
    lines = text.decode("ascii", "replace").splitlines()[:MOST]
    found = (_LINE.fullmatch(line) for line in lines)
    return tuple(Suspicion(float(m.group(1)), m.group(2), m.group(3)) for m in found if m)


def write(entries: Iterable[Suspicion]) -> bytes:
    """Write the file so that `parse` reads the same entries."""
    return "".join(f"{entry.when:.0f} {entry.who} {entry.what}\n" for entry in entries).encode("ascii", "replace")


def add(entries: Iterable[Suspicion], new: Suspicion, half_life: float) -> tuple[Suspicion, ...]:
    """Add an entry, newest first; it replaces the one of the same `who`, and forgotten ones go."""
    others = [e for e in entries if e.who != new.who and new.when - e.when < FORGOTTEN * half_life]
    return (new, *sorted(others, key=lambda e: -e.when))[:MOST]


def score(entries: Iterable[Suspicion], now: float, half_life: float) -> float:
    """Sum the weights; half_life in seconds. A clock that was set back makes nothing heavier than one."""
    return sum(math.exp2(-max(0.0, now - e.when) / half_life) for e in entries)
