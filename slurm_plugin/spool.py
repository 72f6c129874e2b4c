"""The door to root's own folder on a node, /var/spool/jit-ckpt: small files, and no link is followed.

Rule 1: a folder or file counts only if it belongs to the spool's owner and nobody else may read or write it; every name
        is opened relative to the folder that was checked, and never through a link.
Rule 2: a file is replaced as a whole; a reader sees the old one or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import Final

from slurm_plugin import contract

LONGEST: Final = 1 << 20  # bytes read of one file
LOCK: Final = ".lock"
LOCK_PATIENCE: Final = 1.0  # seconds; whoever holds the lock writes a few lines

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_QUIET: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO in place of a file holds nobody up


class SpoolError(Exception):
    """The spool cannot be used; the text says what and why."""


class Spool:
    """The folder, opened; names are "file" or "job/file"."""

    def __init__(self, path: str = contract.SPOOL, owner: int = 0, *, make: bool = True) -> None:
        """Open the folder; `make` it if it is missing.

        Raises:
            FileNotFoundError: it is missing and is not to be made.
            SpoolError: it cannot be made, or others can read or write it.
        """
        self.path, self.owner = path, owner
        try:
            if make:
                os.mkdir(path, 0o700)
        except FileExistsError:  # also when another hook has made it this instant
            pass
        except OSError as error:
            raise SpoolError(f"cannot make {path}: {error.strerror}") from error
        self._folder = self._open(path, _FOLDER, None)

    def close(self) -> None:
        """Close it."""
        os.close(self._folder)

    def read(self, name: str) -> bytes:
        """Return what a file holds; nothing if there is none.

        Raises:
            SpoolError: it cannot be read, is too long, or is not ours.
        """
        *folders, last = name.split("/")
        where = self._folder
        try:
            for folder in folders:
                where = self._open(folder, _FOLDER, where)
            file = self._open(last, os.O_RDONLY | _QUIET, where)
            try:
                text = os.read(file, LONGEST + 1)
            finally:
                os.close(file)
        except FileNotFoundError:
            return b""
        finally:
            if where != self._folder:
                os.close(where)
        if len(text) > LONGEST:
            raise SpoolError(f"{self.path}/{name} is longer than {LONGEST} bytes; left alone")
        return text

    def write(self, name: str, text: bytes) -> None:
        """Replace a file; its folder is made if it is missing.

        Raises:
            SpoolError: it cannot be written.
        """
        *folders, last = name.split("/")
        where = self._folder
        aside = f".{last}.{os.getpid()}"
        try:
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=where)
                where = self._open(folder, _FOLDER, where)
            try:
                file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _QUIET, 0o600, dir_fd=where)
                try:
                    if os.write(file, text) != len(text):  # a full disk takes the first part and says nothing
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    os.close(file)
                os.replace(aside, last, src_dir_fd=where, dst_dir_fd=where)
            except OSError:
                self._forget(aside, where)
                raise
        except OSError as error:
            raise SpoolError(f"cannot write {self.path}/{name}: {error.strerror}") from error
        finally:
            if where != self._folder:
                os.close(where)

    def open_lock(self, name: str = LOCK) -> int:
        """Open a file that is there to be locked; the caller closes it.

        Raises:
            SpoolError: it cannot be made.
        """
        try:
            return self._open(name, os.O_RDWR | os.O_CREAT | _QUIET, self._folder)
        except OSError as error:
            raise SpoolError(f"cannot open {self.path}/{name}: {error.strerror}") from error

    def lock(self) -> int:
        """Keep others out while a file is read and replaced; closing what is returned lets them in again.

        Raises:
            SpoolError: somebody holds it for too long.
        """
        file, deadline = self.open_lock(), time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError as error:
                if time.monotonic() > deadline:
                    os.close(file)
                    raise SpoolError(f"cannot lock {self.path}/{LOCK}: {error.strerror}") from error
            time.sleep(0.01)

    def fileno(self) -> int:
        """Return its descriptor, which a process that goes on with it must keep."""
        return self._folder

    def names(self) -> list[str]:
        """Return what is in it, in no order."""
        return os.listdir(self._folder)

    def free(self) -> int:
        """Return the bytes that its file system has for others than root to fill."""
        found = os.fstatvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def _open(self, name: str, flags: int, where: int | None) -> int:
        try:
            file = os.open(name, flags, 0o600, dir_fd=where)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SpoolError(f"cannot open {name} in {self.path}: {error.strerror}") from error
        found = os.fstat(file)
        kind = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
        if kind(found.st_mode) and found.st_uid == self.owner and not found.st_mode & 0o077:
            return file
        os.close(file)
        raise SpoolError(
            f"{name} in {self.path} is not what only its owner {self.owner} can read and write; left alone"
        )

    @staticmethod
    def _forget(name: str, where: int) -> None:
        with contextlib.suppress(OSError):  # the disk is full or read-only: it is not there, or stays
            os.unlink(name, dir_fd=where)
