"""Pass on what srun says, and overhear which tasks have ended: bytes -> TaskEnds.

Before the ranks' agents are up nobody but srun knows of a dead task, and with --kill-on-bad-exit=0 srun only says so.

Rule: every byte is passed on at once and unchanged; what is overheard is a hint, for the ranks may write anything.
"""

from __future__ import annotations

import os
import re
import select
from dataclasses import dataclass
from typing import IO, Final

# The form is the same in Slurm 22.05 to 26.05 (src/api/step_launch.c and src/srun/libsrun/launch.c).
ENDED: Final = re.compile(rb"srun: error: ([\w.-]+): tasks? (\d[\d,-]*): (Exited with exit code \d+|[A-Z][\w ()-]+)\s*")
# What srun says when it gets no step; the same forms in 22.05 to 26.05.
UNLAUNCHED: Final = re.compile(rb"srun: error: Unable to (?:confirm allocation for|create step for) job \S+: (.+)")
STALLED: Final = 5.0  # seconds for a full, non-blocking standard error to take more
LONGEST: Final = 4096  # bytes of a line that may be srun's; longer ones are a rank's


@dataclass(frozen=True)
class TaskEnd:
    """Tasks of one node that ended badly: `how` is "Killed", "Exited with exit code 1", ..."""

    node: str
    tasks: str
    how: str

    @property
    def kind(self) -> str:
        """Return the kind of fault that this is."""
        return "exception" if self.how.startswith("Exited") else "death"


class Overhear:
    """One srun's standard error on its way to ours.

    Args:
        source: the pipe to read, made non-blocking.
        target: the descriptor to write to.
        stalled: seconds that it may take no more before words are dropped.
    """

    def __init__(self, source: IO[bytes], target: int = 2, stalled: float = STALLED) -> None:
        os.set_blocking(source.fileno(), False)
        self._source, self._target, self._stalled = source, target, stalled
        self._line = b""
        self.closed = False
        self.refusal = ""  # why srun got no step

    def fileno(self) -> int:
        """Return the descriptor that is readable when srun has said something."""
        return self._source.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._source.close()

    def listen(self) -> list[TaskEnd]:
        """Pass on what has come and return the task ends in it."""
        try:
            data = os.read(self._source.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.closed = True
            return []
        _write(self._target, data, self._stalled)
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest if len(rest) <= LONGEST else b""
        for match in filter(None, map(UNLAUNCHED.fullmatch, lines)):
            self.refusal = match.group(1).decode(errors="replace").strip()
        found = (ENDED.fullmatch(line) for line in lines)
        return [TaskEnd(*(group.decode() for group in match.groups())) for match in found if match]


def _write(fd: int, data: bytes, stalled: float) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            if not select.select([], [fd], [], stalled)[1]:
                return  # whoever reads our standard error has stopped; the launch must not stop with it
        except OSError:
            return  # nobody reads our standard error any more; the job goes on
