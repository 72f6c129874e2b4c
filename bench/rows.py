"""Turn samples into rows, and rows into a table and a JSON file. Pure but for `write`.

Rule 1: a row's `p99` is the value that 99 of 100 samples are at least as good as: high where low is good, low where
    high is good. With fewer than 100 samples it is the worst one.
Rule 2: a target is met by the median; a row without a target is there to explain the others.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class BenchError(Exception):
    """Something could not be measured; the message says what."""


@dataclass(frozen=True)
class Row:
    """One measured number; `target` and `met` are None where none was set."""

    name: str
    unit: str
    median: float
    p99: float
    target: float | None = None
    met: bool | None = None


def row(name: str, unit: str, samples: Sequence[float], *, target: float | None = None, higher: bool = False) -> Row:
    """Summarize samples; `higher` says that high is good.

    Raises:
        BenchError: no samples.
    """
    if not samples:
        raise BenchError(f"{name}: nothing was measured")
    median = statistics.median(samples)
    met = None if target is None else (median >= target if higher else median <= target)
    return Row(name, unit, _round(median), _round(_p99(samples, higher)), target, met)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide pairwise: what was measured side by side is compared side by side."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def differences(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Subtract pairwise."""
    return [a - b for a, b in zip(these, those, strict=True)]


def table(rows: Sequence[Row]) -> str:
    """Lay rows out for people."""
    cells = [("name", "median", "p99", "unit", "target", "met")]
    for r in rows:
        target = "" if r.target is None else f"{r.target:g}"
        met = "" if r.met is None else ("yes" if r.met else "NO")
        cells.append((r.name, _shown(r.median), _shown(r.p99), r.unit, target, met))
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    right = (False, True, True, False, True, False)
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in cells
    )


def write(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Write `{"rows": [...], ...}`; `about` is what else a reader wants to know."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": [asdict(r) for r in rows], **about}, indent=2) + "\n", encoding="utf-8")


def _p99(samples: Sequence[float], higher: bool) -> float:
    ordered = sorted(samples, reverse=higher)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def _round(value: float) -> float:
    """Keep four significant digits and whole numbers: more would be noise."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
