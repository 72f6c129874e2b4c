"""Measure the writing of a checkpoint: jitmpi.save by several processes at once, against plain writes and torch.save.

Rule: all ways write the same bytes, by the same number of processes, in turns; a turn's ways are compared with each
    other, so that a disk that slows down slows all of them.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from bench.children import REPO, started, tail
from bench.rows import BenchError, Row, ratios, row
from bench.state import infos, plan
from jitmpi import commit
from jitmpi.events import Context, Fault, Piece, Written

SAVERS = 3
WAYS = ("save", "plain", "torch")
PATIENCE = 120.0  # seconds for one write of 100 MB a process
MIB = 1 << 20
CONTEXT = {
    "random/torch": bytes(5056),
    "random/python": bytes(2500),
    "random/numpy": bytes(2500),
    "position": bytes(60),
}

Answer = dict[str, Any]


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    turns = 3 if quick else 9
    (REPO / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-save-", dir=REPO / "build"))
    try:
        with open(folder / "log", "w", encoding="utf-8") as log:
            seconds, sizes, over = _turns(folder, turns, log, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    mib = {way: [size / MIB / s for size, s in zip(sizes[way], seconds[way], strict=True)] for way in WAYS}
    return [
        row("bytes_over_unique", "ratio", over, target=1.02),
        row("save_over_plain_write", "ratio", ratios(mib["save"], mib["plain"]), target=0.8, higher=True),
        row("save_over_torch_save", "ratio", ratios(mib["save"], mib["torch"]), higher=True),
        *(row(f"{way}_mib_per_s", "MiB/s", mib[way], higher=True) for way in WAYS),
    ]


def _turns(
    folder: Path, turns: int, log: IO[str], say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[int]], list[float]]:
    """Return way -> seconds and way -> bytes of every turn, and bytes on disk over bytes of state."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes: dict[str, list[int]] = {way: [] for way in WAYS}
    over = []
    lines = [[sys.executable, "-m", "bench.writer", str(folder), str(rank), str(SAVERS)] for rank in range(SAVERS)]
    with started(lines, [dict(os.environ)] * SAVERS, log, pipes=True) as writers:
        _read(writers, log)
        for turn in range(turns + 1):  # the first one warms up: files, memory and code are new to it
            order = WAYS[turn % 3 :] + WAYS[: turn % 3]
            for way in order:
                os.sync()  # what others wrote before is not this turn's burden
                answers = _tell(writers, f"{way} {turn}", log)
                if turn:
                    seconds[way].append(max(a["end"] for a in answers) - min(a["begin"] for a in answers))
                    sizes[way].append(sum(a["bytes"] for a in answers))
                if way == "save":
                    over.append(_commit(folder, turn, answers))
                _clear(folder)
            say(f"save: turn {turn} of {turns}")
    return seconds, sizes, over


def _commit(folder: Path, turn: int, answers: Sequence[Answer]) -> float:
    """Make the written files a checkpoint and return its bytes on disk over the bytes of the state."""
    tensors = infos()
    written = [
        Written(**{**a["written"], "pieces": tuple(Piece(**p) for p in a["written"]["pieces"])}) for a in answers
    ]
    world = [f"n{rank}" for rank in range(SAVERS + 1)]
    commit.commit(
        str(folder), plan(str(folder), SAVERS, turn), written=written, tensors=tensors,
        contexts=[Context(rank, turn, True, CONTEXT) for rank in range(len(world))], scalars=bytes(20_000),
        fault=Fault("death", (SAVERS,), (), turn, "measured", time.time()), world=world, attempt=turn, job_id="bench",
        exact=True, notes=(), times={}, versions={}, keep=1,
    )  # fmt: skip
    # the claim is a link to the manifest, not a second copy
    sizes = {(s.st_dev, s.st_ino): s.st_size for p in folder.rglob("*") if p.is_file() and p.name != "log"
             for s in [p.stat()]}  # fmt: skip
    return sum(sizes.values()) / sum(tensor.nbytes for tensor in tensors)


def _tell(writers: Sequence[subprocess.Popen[str]], line: str, log: IO[str]) -> list[Answer]:
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(line + "\n")
        writer.stdin.flush()
    return [json.loads(answer) for answer in _read(writers, log)]


def _read(writers: Sequence[subprocess.Popen[str]], log: IO[str]) -> list[str]:
    """Read one line of every writer."""
    deadline = time.monotonic() + PATIENCE
    found: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        for index, writer in enumerate(writers):
            assert writer.stdout is not None
            selector.register(writer.stdout, selectors.EVENT_READ, index)
        while len(found) < len(writers):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                found[key.data] = key.fileobj.readline()  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
            if not ready or not all(found.values()):
                raise BenchError(f"a writer ended or took longer than {PATIENCE:g} s\n{tail(log)}")
    return [found[index] for index in range(len(writers))]


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "log":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
