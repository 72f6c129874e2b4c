"""Run things that may hang in processes of their own, each under a deadline.

Rule 1: nobody waits for a process beyond its deadline: it is killed with its whole group and left behind. One that a
        dead file system or driver holds in the kernel does not die, and keeps only itself.
Rule 2: a child has a session of its own and none of our files, so that nothing waits for it through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LONGEST: Final = 256 << 10  # bytes kept of what a command prints
ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
MOST_FILES: Final = 1 << 16  # that a child may have from us; old systems close them one by one
_LONGEST_PAUSE: Final = 0.02  # seconds between two looks


@dataclass(frozen=True)
class Answer:
    """How it ended: exit code (128 + signal for a killed one, None for none in time) and what it printed."""

    code: int | None
    text: str


class Child:
    """A process that was started."""

    def __init__(self, pid: int, output: int | None) -> None:
        self._pid, self._output = pid, output

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str] = ENVIRONMENT) -> Child:
        """Run a program, named by its absolute path.

        Raises:
            OSError: it cannot be started.
        """
        output = os.memfd_create("output", os.MFD_CLOEXEC)
        files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        files += [(os.POSIX_SPAWN_DUP2, output, fd) for fd in (1, 2)]  # type: ignore[misc]
        try:
            return cls(os.posix_spawn(command[0], list(command), environ, file_actions=files, setsid=True), output)
        except OSError:
            os.close(output)
            raise

    @classmethod
    def fork(cls, action: Callable[[], None], keep: Sequence[int] = ()) -> Child:
        """Run a function; the exit code is 0, or the errno of the OSError that it raises. `keep`: files it needs."""
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                first = 3
                for fd in (*sorted(keep), min(os.sysconf("SC_OPEN_MAX"), MOST_FILES)):
                    os.closerange(first, fd)
                    first = fd + 1
                action()
                code = 0
            except OSError as error:
                code = error.errno or 255
            finally:
                os._exit(code & 0xFF)
        return cls(pid, None)

    def end(self, deadline: float) -> Answer:
        """Wait until `deadline` on the monotonic clock; a process that is not done then is killed and left behind."""
        code, pause = self._look(), 0.001
        while code is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            code = self._look()
        if code is None:
            with contextlib.suppress(OSError):  # it has ended this instant
                os.killpg(self._pid, signal.SIGKILL)
        return Answer(code, self._printed())

    def _look(self) -> int | None:
        done, status = os.waitpid(self._pid, os.WNOHANG)
        if not done:
            return None
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _printed(self) -> str:
        if self._output is None:
            return ""
        text = os.pread(self._output, LONGEST, 0)
        os.close(self._output)
        return text.decode("utf-8", "replace")
