"""process: what the hooks of a protected run do, and that they do it in the rank's own process only."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys, warnings
from types import SimpleNamespace

from jitmpi import process
from jitmpi.settle import Gate, Place

warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork
agent = SimpleNamespace(gate=Gate(lambda: os.write(2, b"parked ")), settings=SimpleNamespace(rank=0))
agent.gate.at(Place("idle", 3))
agent.tell = lambda event: print("tells", event["event"], os.getpid() == parent, flush=True)
agent.finish = lambda patience: print("finishes", os.getpid() == parent, flush=True) or True
parent = os.getpid()
signal.signal(signal.SIGTERM, handler := lambda *_: None)
reader, writer = os.pipe()
os.set_blocking(writer, False)
taken = process.take_signals(writer)
process.install(agent)
child = os.fork()
if child == 0:
    print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, signal.getsignal(signal.SIGTERM) is handler, flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("the child's own")
    sys.exit(3)
print(sorted(taken), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60)


def test_a_child_that_the_script_forked_ends_as_it_would_without_us() -> None:
    """It says no goodbye in its parent's name, and keeps the script's own signal handlers."""
    ended = run("exit")
    assert ended.stdout.splitlines() == [
        "True True",
        "[10] 3",
        "tells finished True",
        "finishes True",
    ], ended.stderr


def test_an_exception_in_a_forked_child_parks_nobody() -> None:
    """The child prints its traceback and ends with 1."""
    ended = run("raise")
    assert "[10] 1" in ended.stdout, ended.stderr
    assert "the child's own" in ended.stderr
    assert "parked" not in ended.stderr


CHAINED = """
import sys
from types import SimpleNamespace

from jitmpi import process

raised = []
agent = SimpleNamespace(gate=SimpleNamespace(raised=raised.append))
process.catch_exceptions(agent)
process.catch_exceptions(agent)
sys.excepthook = lambda *details: print("theirs", flush=True)  # a library's own, which forgets the one before
process.catch_exceptions(agent)
sys.excepthook(ValueError, ValueError("x"), None)
print(len(raised), raised[0].strip())
"""


def test_a_librarys_own_hook_does_not_hide_an_exception() -> None:
    """Ours comes first again, once, and theirs after it."""
    ended = subprocess.run([sys.executable, "-c", CHAINED], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["theirs", "1 ValueError: x"], ended.stderr
