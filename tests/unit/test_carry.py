"""carry: what a rank does with its hands; the last of it in a process of its own, for it ends the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jitmpi.carry import Carrier
from jitmpi.events import SavePlan, TensorInfo
from jitmpi.round import Write

LOST_AT_START = """
from types import SimpleNamespace

from jitmpi.carry import Carrier
from jitmpi.events import Fault, Member
from jitmpi.round import Round
from jitmpi.settle import Gate

settings = SimpleNamespace(rank=0, node="n1", launcher="")
plane = SimpleNamespace(broadcast=lambda *_: None, flush=lambda deadline: True)
gate = Gate(lambda: None)
gate.error = "Traceback ...\\nValueError: a bug in the set-up\\n"
carrier = Carrier(settings, [Member(0, "n1", "h", 1), Member(1, "n2", "h", 1)], plane, None, gate, {})
fault = Fault("death", (1,), (), -1, "rank 1 on n2 closed its connection", 0.0)
carrier.lost_at_start(fault, Round(0, 2, (0, 1), 30.0, 100.0, "/d"))
"""


def test_an_exception_before_training_shows_its_traceback() -> None:
    """The others leave because of it and close their connections: the cause is printed all the same."""
    ended = subprocess.run([sys.executable, "-c", LOST_AT_START], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 84
    assert "ValueError: a bug in the set-up" in ended.stderr


class Reads:
    """A vault of one tensor whose first read waits, and the round that hears how the writes ended."""

    def __init__(self) -> None:
        self.go, self.reading = threading.Event(), threading.Event()
        self.readers = 0
        self.ended: list[tuple[str, int]] = []

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo("model/w", (2 << 20, 4), "float32", 32 << 20)]

    def read(self, index: int, start: int, stop: int) -> memoryview:
        self.readers += 1
        assert self.readers == 1, "two writes read through the same buffers"
        self.reading.set()
        self.go.wait(60)
        self.readers -= 1
        return memoryview(bytes((stop - start) * 16))

    def failed(self, epoch: int, reason: str, now: float) -> None:
        self.ended.append((reason, epoch))

    def saved(self, written: Any, now: float, wall: float, described: Any) -> None:
        self.ended.append(("", written.epoch))


def test_a_newer_plan_ends_the_write_of_the_older_one(tmp_path: Path) -> None:
    """Never two writes at once: they would share pinned buffers, and checksums would vouch for mixed bytes."""
    vault: Any = Reads()
    settings: Any = SimpleNamespace(rank=0, options=SimpleNamespace(save=60.0))
    plane: Any = SimpleNamespace(wake=lambda: None)
    carrier = Carrier(settings, [], plane, vault, None, {})  # type: ignore[arg-type]
    for epoch in (1, 2):
        carrier.carry(Write(SavePlan(epoch, 0, 5, {0: (0,)}, str(tmp_path / f"e{epoch}"))), vault)
        assert vault.reading.wait(60)
    vault.go.set()
    deadline = time.monotonic() + 60
    while len(vault.ended) < 2 and time.monotonic() < deadline:
        carrier.bring_back()
        time.sleep(0.01)
    assert vault.ended == [("a newer plan replaces it", 1), ("", 2)]
