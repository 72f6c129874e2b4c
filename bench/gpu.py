"""Measure what protection costs on a GPU: a minibatch with and without it, and how fast the state leaves the device.

One rank, twins that take turns. Without a CUDA device there are no rows.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.children import REPO, started, wait
from bench.hot_path import environment
from bench.rows import Row, differences, ratios, row

SIZES: Final = {"13M": (512, 4), "101M": (1024, 8)}  # width and layers of a transformer: parameters
MICRO: Final = 1e6
TIMEOUT: Final = 180.0  # seconds for one size


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group; `quick` leaves the larger model out."""
    import torch  # here: only this group needs it

    if not torch.cuda.is_available():
        say("gpu: no CUDA device, nothing is measured")
        return []
    rows = []
    for size in list(SIZES)[: 1 if quick else None]:
        rows += _rows(size, _run(*SIZES[size]))
        say(f"gpu: {size} done")
    return rows


def _rows(size: str, found: dict[str, Any]) -> list[Row]:
    plain, protected = found["plain"], found["protected"]
    return [
        row(f"gpu_minibatch_us.{size}.without", "us", [MICRO * v for v in plain]),
        row(f"gpu_minibatch_us.{size}.added", "us", [MICRO * v for v in differences(protected, plain)]),
        row(f"gpu_minibatch_ratio.{size}", "", ratios(protected, plain)),
        row(
            f"gpu_read_over_plain_copy.{size}", "", ratios(found["read"], found["plain_copy"]), target=0.8, higher=True
        ),
    ]


def _run(width: int, layers: int) -> dict[str, Any]:
    (REPO / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=REPO / "build"))
    try:
        script = str(REPO / "bench" / "ranks" / "gpu.py")
        line = [sys.executable, script, str(folder), f"--width={width}", f"--layers={layers}"]
        environ = environment(dict(os.environ), 0, 1, str(folder), 0) | {"PYTHONPATH": str(REPO)}
        with open(folder / "log", "w", encoding="utf-8") as log, started([line], [environ], log) as children:
            wait(children, TIMEOUT, log)
        found: dict[str, Any] = json.loads((folder / "0.json").read_text(encoding="utf-8"))
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
