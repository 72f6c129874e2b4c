"""hands: work is done beside the caller, also where Python starts no thread any more."""

from __future__ import annotations

import subprocess
import sys
import threading

from jitmpi.hands import SET_ASIDE, Hands


def test_calls_are_done_beside_the_caller() -> None:
    """As many at once as are asked for: one that is stuck holds up no other."""
    hands, stuck, done = Hands(), threading.Event(), threading.Semaphore(0)
    for _ in range(2 * SET_ASIDE):
        hands.do(lambda: stuck.wait(30) and None)
    hands.do(done.release)
    assert done.acquire(timeout=30)
    stuck.set()


def test_where_no_thread_can_be_started_those_set_aside_work() -> None:
    """A stuck write of an older plan, the newer one, and the commit."""

    def begin(call: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    hands, stuck, done = Hands(begin), threading.Event(), threading.Semaphore(0)
    hands.do(lambda: stuck.wait(30) and None)
    for _ in range(2 * SET_ASIDE):
        hands.do(done.release)
    assert all(done.acquire(timeout=30) for _ in range(2 * SET_ASIDE))
    stuck.set()


def test_a_script_at_its_end_still_has_them() -> None:
    """In atexit, where a rank waits for the others; Python 3.12 refuses new threads there."""
    program = (
        "import atexit, threading\n"
        "from jitmpi.hands import Hands\n"
        "hands, done = Hands(), threading.Event()\n"
        "def end():\n"
        "    hands.do(lambda: (print('saved', flush=True), done.set()))\n"
        "    done.wait(30)\n"
        "atexit.register(end)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "saved\n"
