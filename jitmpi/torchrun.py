"""Keep torchrun from ending the ranks of its node while they save.

torchrun notices a dead rank after 0.1 s, sends SIGTERM to the others of its node and SIGKILL 30 s later, which is too
soon for a large state; it does the same when it loses sight of the other nodes. So from the fault until its ranks
leave it is stopped (SIGSTOP), which it can neither catch nor mind.

Rule: whoever stopped it lets it go on when it leaves; jit-srun ends a step whose ranks could not do that any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

MARK: Final = b"TORCHELASTIC_RUN_ID="  # in the environment of everything below torchrun, and not in its own
_stopped: list[int] = []


def stop() -> None:
    """Stop the torchrun that started this process."""
    found = find(os.getpid())
    if found:
        with contextlib.suppress(OSError):
            os.kill(found, signal.SIGSTOP)
            _stopped.append(found)


def go_on() -> None:
    """Let it go on, if this process has stopped it."""
    while _stopped:
        with contextlib.suppress(OSError):
            os.kill(_stopped.pop(), signal.SIGCONT)


def find(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the process id of the torchrun above this process, the first one without its mark; 0 for none."""
    try:
        while pid > 1 and _marked(proc / str(pid) / "environ"):
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        return pid if pid > 1 and not _marked(proc / str(pid) / "environ") else 0
    except (OSError, ValueError, IndexError):
        return 0


def _marked(environ: Path) -> bool:
    return any(variable.startswith(MARK) for variable in environ.read_bytes().split(b"\0"))
