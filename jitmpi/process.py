"""The process-wide hooks of a protected run: signals, uncaught exceptions, the orderly end.

Rule 1: a signal handler does nothing; the signal's number reaches the agent through the wakeup descriptor.
Rule 2: a training thread that ends with an exception parks; the agent decides when the process ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from jitmpi.agent import Agent

PLANNED = (signal.SIGUSR1, signal.SIGTERM)  # Slurm's warning before the time limit (by --signal) and at preemption
UNFINISHED_WAIT = 5.0  # seconds for the others to end too when the script ended in the middle of its loop


def take_signals(wakeup_fd: int, ignored: bool = False) -> set[int]:
    """Let the planned-end signals reach the agent; a signal that the script handles itself is left alone.

    Args:
        ignored: take also those that are ignored: below torchrun, which they would end, they have to be.

    Returns the signals taken. Call from the main thread.
    """
    taken = set()
    free = (signal.SIG_DFL, signal.SIG_IGN) if ignored else (signal.SIG_DFL,)
    for number in PLANNED:
        if signal.getsignal(number) in free:
            signal.signal(number, _nothing)
            taken.add(int(number))
    if signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, _nothing)  # it goes on all the same; the agent hears that it had been stopped
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_in_child)
    return taken


def install(agent: Agent) -> None:
    """Catch what ends the training thread."""
    catch_exceptions(agent)
    agent.on_training = lambda: catch_exceptions(agent)
    atexit.register(_at_exit, agent, os.getpid())


def catch_exceptions(agent: Agent) -> None:
    """Be the first to see an uncaught exception; again once training runs, for libraries put hooks of their own."""
    previous, process = sys.excepthook, os.getpid()
    if getattr(previous, "jit_ckpt", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        if issubclass(kind, Exception) and os.getpid() == process:
            agent.gate.raised("".join(traceback.format_exception(kind, value, trace)))
        return previous(kind, value, trace)

    hook.jit_ckpt = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _at_exit(agent: Agent, process: int) -> None:
    """Say goodbye, and wait until every rank has: one that dies now is a failure like any other."""
    if os.getpid() != process:
        return  # a child that the script forked: it has no agent, and the end is not its parent's
    orderly = agent.gate.place.phase == "idle"
    if agent.settings.rank == 0 and orderly:
        agent.tell({"event": "finished"})
    agent.finish(None if orderly else UNFINISHED_WAIT)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Keep the default action from ending the process."""


def _in_child() -> None:
    """DataLoader workers: Slurm signals every process of the step, and the planned end is not theirs."""
    signal.set_wakeup_fd(-1)
    for number, action in ((signal.SIGUSR1, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _nothing:
            signal.signal(number, action)
