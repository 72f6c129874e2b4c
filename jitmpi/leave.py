"""End a rank's process after a fault: say why, tell jit-srun (or requeue in its place), take the children along.

Rule: nothing here may block for long or raise; the end is os._exit because an orderly one would call a broken world.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence

from jitmpi.config import Settings
from jitmpi.events import Fault, Member
from jitmpi.round import Leave
from slurm_plugin import notice, requeue, slurm
from slurm_plugin.contract import EXIT_COMMITTED, EXIT_LOST

NOTICE_DEADLINE = 2.0  # seconds for jit-srun to answer; a live one answers in milliseconds


def say(settings: Settings, text: str) -> None:
    """Write one line for the user to standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"jit-ckpt: rank {settings.rank} on {settings.node}: {text}\n")
        sys.stderr.flush()


def notify(settings: Settings, event: Mapping[str, object]) -> bool:
    """Send a notice to jit-srun; False when there is none or it cannot be reached."""
    if not settings.launcher:
        return False
    return notice.send(settings.launcher, dict(event), NOTICE_DEADLINE)


def leave(settings: Settings, action: Leave, *, fault: Fault, own_error: str, members: Sequence[Member]) -> None:
    """Say why, let the coordinator report the outcome, and end."""
    if own_error:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(own_error)
    if action.coordinator:
        _report(settings, action, fault, members)
    elif not own_error:
        saved = "the state is saved" if action.code == EXIT_COMMITTED else f"nothing could be saved: {action.reason}"
        say(settings, f"leaves because {fault.detail}; {saved}")
    end(action.code)


def die(settings: Settings, text: str) -> None:
    """End at once with the reason."""
    say(settings, text)
    end(EXIT_LOST)


def end(code: int) -> None:
    """End this process and its children; never returns."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():  # they would hold the step open for seconds
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _report(settings: Settings, action: Leave, fault: Fault, members: Sequence[Member]) -> None:
    if action.code == EXIT_COMMITTED:
        say(settings, f"{fault.detail}; the state is saved in {action.reason}")
        event: dict[str, object] = {"event": "committed", "directory": action.reason, "minibatch": fault.minibatch}
    else:
        say(settings, f"{fault.detail}; nothing could be saved: {action.reason}")
        event = {"event": "lost", "reason": action.reason, "error": fault.detail}
    if settings.launcher and not notify(settings, event) and action.code == EXIT_COMMITTED:
        say(settings, "jit-srun does not answer; asking Slurm to requeue the job in its place")
        away = sorted({members[r].node for r in fault.unreachable})
        with contextlib.suppress(Exception):
            requeue.requeue_job(slurm.open_slurm(), settings.job_id, away, lambda line: say(settings, line))
