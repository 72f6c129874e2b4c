"""End a rank's process after a fault: say why, tell jit-srun (or requeue in its place), take the children along.

Rule: nothing here may block for long or raise; the end is os._exit because an orderly one would call a broken world.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jitmpi import torchrun
from jitmpi.config import Settings
from jitmpi.events import Fault, Member
from jitmpi.round import Conclude, Leave
from slurm_plugin import notice, requeue, slurm
from slurm_plugin.contract import EXIT_LOST

NOTICE_DEADLINE = 2.0  # seconds for jit-srun to answer; a live one answers in milliseconds
# Seconds where it counts: it writes each notice to its journal, on the file system that the survivors have just filled.
REPLY_DEADLINE = 20.0
WORDS = 1.0  # seconds that words may take to get out


def say(settings: Settings, text: str) -> None:
    """Write one line for the user to standard error."""
    _say(f"jit-ckpt: rank {settings.rank} on {settings.node}: {text}\n")


def notify(settings: Settings, event: Mapping[str, object], reply: float = 0.0) -> bool:
    """Send a notice to jit-srun; False when there is none, it is out of reach, or silent for `reply` seconds."""
    if not settings.launcher:
        return False
    return notice.send(settings.launcher, dict(event), NOTICE_DEADLINE, reply)


def conclude(settings: Settings, action: Conclude, *, fault: Fault, members: Sequence[Member]) -> None:
    """Coordinator: tell jit-srun the outcome; when it is dead, see to the job in its place."""
    if action.saved:
        say(settings, f"{fault.detail}; the state is saved: {action.reason}")
        minibatch = action.minibatch if action.minibatch >= 0 else fault.minibatch
        event: dict[str, object] = {"event": "committed", "directory": action.reason, "minibatch": minibatch}
    else:
        say(settings, f"{fault.detail}; nothing could be saved: {action.reason}")
        event = {"event": "lost", "reason": action.reason, "error": fault.detail, "majority": action.alone}
    if not settings.launcher and action.saved:
        say(
            settings,
            f"jit-srun in place of srun goes on from here by itself; by hand: sbatch --jit-ckpt=resume={action.reason}",
        )
    if settings.launcher and not notify(settings, event, REPLY_DEADLINE) and action.alone:
        take_over(settings, sorted({members[r].node for r in fault.unreachable}))


def take_over(settings: Settings, away: Sequence[str], open_door: Callable[[], slurm.Slurm] = slurm.open_slurm) -> None:
    """Put the job back into the queue because jit-srun is dead with its node.

    Where Slurm cannot be reached, as in many containers, the plugin outside does it once this rank has left.
    """
    say(settings, "jit-srun does not answer; asking Slurm to requeue the job in its place")
    try:
        requeue.bring_back(
            open_door(),
            settings.job_id,
            away,
            lambda line: say(settings, line),
            restarts=settings.restarts,
            requeues=settings.options.requeues,
        )
    except Exception as error:  # nothing may keep this process from ending
        say(settings, f"not from here ({error}); leaving it to the plugin on this node")


def leave(settings: Settings, action: Leave, *, fault: Fault, own_error: str) -> None:
    """Say why, once per rank, and end."""
    if own_error:
        _say(own_error)
    if not action.told:
        saved = "the state is saved" if action.saved else f"nothing could be saved: {action.reason}"
        say(settings, f"leaves because {fault.detail}; {saved}")
    end(action.code)


def give_up(settings: Settings, text: str) -> NoReturn:
    """End a start that failed; jit-srun is told, since the code that srun gives may be another rank's."""
    if settings.rank in (0, settings.size - 1):
        notify(settings, {"event": "lost", "reason": text, "error": ""})
    die(settings, text)


def die(settings: Settings, text: str) -> NoReturn:
    """End at once with the reason."""
    say(settings, text)
    end(EXIT_LOST)


def end(code: int) -> NoReturn:
    """End this process and its children; never returns."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():  # they would hold the step open for seconds
            child.kill()
    torchrun.go_on()
    _within(WORDS, sys.stdout.flush)
    _within(WORDS, sys.stderr.flush)
    os._exit(code)


def _say(text: str) -> None:
    def write() -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    _within(WORDS, write)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Call, but wait no longer: a pipe that nobody reads (a full disk, srun stopped) must keep no rank from leaving."""

    def quiet() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=quiet, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started, as at the end of a script under Python 3.12
        quiet()
    else:
        thread.join(seconds)
