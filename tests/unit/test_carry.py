"""carry: what a rank does with its hands; the last of it in a process of its own, for it ends the process."""

from __future__ import annotations

import subprocess
import sys

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
