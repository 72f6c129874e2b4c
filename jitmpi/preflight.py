"""Turn a directory and a number of bytes into the certainty that a checkpoint can be written there, or one clear error.

Rule 1: said before training begins, with path and numbers; the day of the failure is too late to learn of a full disk.
Rule 2: nothing is left behind but the job's own folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress

from jitmpi import files
from jitmpi.errors import ConfigError

FALLOCATE = ctypes.CDLL(None, use_errno=True).fallocate  # posix_fallocate would write every block where this is refused
FALLOCATE.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
ROOM = {errno.ENOSPC: "no space left", errno.EDQUOT: "disk quota exceeded", errno.EFBIG: "file too large"}


def check(directory: str, need_bytes: int) -> None:
    """Create the job's folder (mode 0700) and make sure that a checkpoint of `need_bytes` fits into it.

    Args:
        directory: absolute path of the job's own folder, `<dir>/<job id>`; missing folders are created.

    Raises:
        ConfigError: it cannot be created or written, has no hard links, or has too little space or quota.
    """
    _create(directory)
    probe = os.path.join(directory, f".probe-{os.getpid()}")
    try:
        _probe(directory, probe, need_bytes)
    finally:
        for path in (probe, f"{probe}.link"):
            with suppress(OSError):
                os.unlink(path)


def _create(directory: str) -> None:
    if not os.path.isabs(directory):
        raise ConfigError(f"dir={directory}: give an absolute path that every node sees")
    try:
        for folder in (os.path.dirname(directory), directory):
            os.makedirs(folder, files.FOLDER_MODE, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be created: {error.strerror}; choose another dir=") from error
    if not files.is_folder(directory):
        raise ConfigError(f"{directory}: is a link or not a folder; remove it or choose another dir=")
    status = os.lstat(directory)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{directory}: belongs to user id {status.st_uid}; choose another dir=")
    if status.st_mode & 0o022:  # whoever can write there can take checkpoints away or stand in the way of a commit
        os.chmod(directory, stat.S_IMODE(status.st_mode) & ~0o022)


def _probe(directory: str, probe: str, need_bytes: int) -> None:
    try:
        file = files.create(probe)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error.strerror}; choose another dir=") from error
    with file:
        try:
            os.link(probe, f"{probe}.link")
        except OSError as error:
            raise ConfigError(f"{directory}: has no hard links ({error.strerror}); choose another dir=") from error
        free = files.free_bytes(directory)
        if 0 <= free < need_bytes:
            raise ConfigError(f"{directory}: a checkpoint needs {need_bytes} bytes, {free} are free there")
        for name in (probe, f"{probe}.link"):
            os.unlink(name)  # whatever happens now, the space comes back when the file is closed
        if need_bytes > 0 and FALLOCATE(file.fileno(), 0, 0, need_bytes) != 0:
            reason = ROOM.get(ctypes.get_errno())  # any other answer: this file system cannot be asked
            if reason:
                room = f"{free} bytes are free on the file system"
                raise ConfigError(f"{directory}: a checkpoint needs {need_bytes} bytes: {reason}; {room}; check quotas")
