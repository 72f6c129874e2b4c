"""Hold a name of a job on this machine for as long as this process lives: two jit-srun of one script meet here.

Rule: nothing is left behind, neither by an orderly end nor by SIGKILL: the name is an address in the kernel's memory
(unix(7), abstract), not a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

PAUSE: Final = 0.02  # seconds between two tries for a name that is held for moments


class Hold:
    """A name that is ours; given back by `release`, or by the end of the process."""

    def __init__(self, listener: socket.socket | None) -> None:
        self._listener = listener

    def release(self) -> None:
        """Let the next one have it."""
        if self._listener is not None:
            self._listener.close()


def take(job: str, name: str) -> Hold | None:
    """Take a name of this job and this user; None when a living process of theirs has it."""
    address = _address(job, name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(1)
        return Hold(listener)
    except OSError:
        listener.close()
        # Anybody may sit on any name. Whoever is not of this user does not count.
        return None if _holder(address) == os.geteuid() else Hold(None)


def is_held(job: str, name: str) -> bool:
    """Say whether a living process of this user has the name."""
    return _holder(_address(job, name)) == os.geteuid()


@contextlib.contextmanager
def holding(job: str, name: str, patience: float) -> Iterator[None]:
    """Hold a name inside the block, after at most `patience` seconds also without having got it."""
    deadline = time.monotonic() + patience
    while (hold := take(job, name)) is None and time.monotonic() < deadline:
        time.sleep(PAUSE)
    try:
        yield
    finally:
        if hold is not None:
            hold.release()


def _address(job: str, name: str) -> str:
    return f"\0jit-ckpt {os.geteuid()} {job} {name}"


def _holder(address: str) -> int:
    """Return the user id of whoever has this address; -1 when that cannot be seen."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        with contextlib.suppress(BlockingIOError):  # a full backlog: it is there, and the kernel does not say whose
            probe.connect(address)
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
        return os.geteuid()
    return -1
