"""Threads for work that may take long: new ones, or those set aside where Python starts none any more.

Why: a rank that has come to its end waits in atexit for the others and saves with them when one fails. Python 3.12
refuses to start a thread there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

SET_ASIDE: Final = 4  # two writes, one of which may be stuck in an old plan, and as many commits


def _begin(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()


class Hands:
    """Does calls beside the caller; make it while threads can be started.

    Args:
        begin: starts a thread; raises RuntimeError where that cannot be done.
    """

    def __init__(self, begin: Callable[[Callable[[], None]], None] = _begin) -> None:
        self._begin = begin
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(SET_ASIDE):
            threading.Thread(target=self._serve, daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Begin a call and return at once; it must not raise."""
        try:
            self._begin(call)
        except RuntimeError:
            self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()
