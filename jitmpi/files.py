"""Turn names into open files and bytes into durable ones: the door to the file system that checkpoints lie on.

Rule 1: nothing here follows a symbolic link in the last part of a path, or waits for what is not a regular file.
Rule 2: files are born 0600 and folders 0700; nothing is widened later.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from jitmpi.errors import DamagedError

FILE_MODE = 0o600
FOLDER_MODE = 0o700

# What link(2) answers on file systems without hard links, or without them between two folders (BeeGFS).
NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def create(path: str) -> IO[bytes]:
    """Create a new file for raw writing, mode 0600.

    Raises:
        OSError: it exists, or cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb", buffering=0)


def open_regular(path: str, owner: int | None = None) -> IO[bytes]:
    """Open an existing regular file for reading, without following a link or blocking on a pipe.

    Args:
        owner: the user id that must own it; anybody may by default.

    Raises:
        DamagedError: it is missing, a link, no regular file, or somebody else's.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise DamagedError(f"{path}: is not a regular file")
    if owner not in (None, status.st_uid):
        os.close(fd)
        raise DamagedError(f"{path}: belongs to user id {status.st_uid}, not to {owner}; not believed")
    return os.fdopen(fd, "rb")


def read(path: str, most: int, owner: int | None = None) -> bytes:
    """Read a whole regular file of at most `most` bytes; `owner` as for `open_regular`.

    Raises:
        DamagedError: it cannot be read, is larger than that, or somebody else's.
    """
    with open_regular(path, owner) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DamagedError(f"{path}: {size} bytes; more than {most} cannot be right")
        try:
            return file.read()
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read: {error.strerror}") from error


def size_of(path: str) -> int | None:
    """Size of a regular file in bytes; None for a missing file and for anything else, links included."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def is_folder(path: str, owner: int | None = None) -> bool:
    """Say whether this is a folder itself, not a link to one, and, if asked, whether this user id owns it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and owner in (None, status.st_uid)


def owner_of(path: str) -> int:
    """Return the user id that owns a file, a folder or a link itself; -1, which is nobody's, for a missing one."""
    try:
        return os.lstat(path).st_uid
    except OSError:
        return -1


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Write all of a contiguous byte view at an offset; a short write is carried on, not taken for success."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def write_durably(path: str, data: bytes) -> None:
    """Write a file aside, fsync it, put it in place of `path`. The folder is left for the caller to fsync.

    Raises:
        OSError: as the system said it; nothing is left behind.
    """
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.part")
    try:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        with create(aside) as file:
            pwrite(file.fileno(), memoryview(data), 0)
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(aside)
        raise


def sync_folder(path: str) -> None:
    """Make the names in a folder durable; a file system that cannot (EINVAL) is taken to need no such call."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def link_exclusively(source: str, target: str) -> bool:
    """Give a small file the second name `target`; False when another file has that name already.

    Where a link may not lead from one folder to another, a copy beside the target is linked: as exclusive, as whole.

    Raises:
        OSError: the file system cannot link, or failed.
    """
    try:
        return _link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    folder, name = os.path.split(target)
    near = os.path.join(folder, f".{name}{os.path.basename(os.path.dirname(source))}")
    try:
        with open_regular(source) as file:
            write_durably(near, file.read())
        return _link(near, target)
    finally:
        with suppress(OSError):
            os.unlink(near)


def _link(source: str, target: str, link: Callable[..., None] = os.link) -> bool:
    try:
        link(source, target, follow_symlinks=False)
    except FileExistsError:
        # NFS may carry a link out and still answer EEXIST to the repeated request, so the file itself is asked.
        return os.path.samestat(os.lstat(source), os.lstat(target))
    except OSError:
        with suppress(OSError):  # nor is an error, such as that of a server that was lost meanwhile, proof of no link
            if os.path.samestat(os.lstat(source), os.lstat(target)):
                return True
        raise
    return True


def free_bytes(path: str) -> int:
    """Bytes that an unprivileged user may still write on the file system of `path`; -1 when it does not say."""
    try:
        status = os.statvfs(path)
    except OSError:
        return -1
    return status.f_bavail * status.f_frsize


def explain(path: str, error: OSError, needed: int) -> str:
    """Say in one line what was to be written where, what the system answered, and what to do."""
    free = free_bytes(os.path.dirname(path))
    room = f"{free} bytes free" if free >= 0 else "free space unknown"
    advice = {
        errno.ENOSPC: "free space there or choose another dir=",
        errno.EDQUOT: "raise the quota or remove files of this user there",
        errno.EIO: "the storage failed; ask its administrator",
    }.get(error.errno or 0, "check the file system")
    return f"cannot write {path}: {error.strerror or error}: {needed} bytes needed, {room}; {advice}"
