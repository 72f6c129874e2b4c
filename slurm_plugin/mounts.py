"""Find file systems of the site's list that are not mounted, or do not answer.

Rule 1: the question goes out in a child: a dead file system holds it in the kernel, and nobody waits for it there.
Rule 2: one such child a file system at most: it holds a lock, and whoever comes later waits for the lock, which can be
        ended, instead of the file system.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from typing import Final

from slurm_plugin.child import Child
from slurm_plugin.evidence import BAD, Finding
from slurm_plugin.spool import Spool, SpoolError

CHECK: Final = "mounts"
TABLE: Final = "/proc/self/mountinfo"


def points(mountinfo: str) -> frozenset[str]:
    """Read the mount points of /proc/self/mountinfo."""
    fields = (line.split() for line in mountinfo.splitlines())
    return frozenset(_unescape(f[4]) for f in fields if len(f) > 4)


def begin(
    wanted: Iterable[str], deadline: float, spool: Spool | None, table: str = TABLE
) -> Callable[[], list[Finding]]:
    """Ask each file system; what is returned waits for the answers until `deadline` and gives the findings."""
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        mounted = points(file.read())
    asked = {path: _ask(path, spool) if _point(path) in mounted else None for path in wanted}

    def end() -> list[Finding]:
        found = (_judge(path, child, deadline) for path, child in asked.items())
        return [finding for finding in found if finding]

    return end


def _judge(path: str, child: Child | None, deadline: float) -> Finding | None:
    if child is None:
        return Finding(CHECK, BAD, f"{path} is not mounted")
    code = child.end(deadline).code
    if code == 0:
        return None
    if code is None:
        return Finding(CHECK, BAD, f"{path} does not answer")
    return Finding(CHECK, BAD, f"{path} cannot be used: {os.strerror(code)}")


def _ask(path: str, spool: Spool | None) -> Child:
    try:
        lock = spool.open_lock(lock_name(path)) if spool else None
    except SpoolError:
        lock = None

    def ask() -> None:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.stat(path)
        os.statvfs(path)  # NFS and Lustre answer the first one from memory, and this one from the server

    try:
        return Child.fork(ask, keep=() if lock is None else (lock,))
    finally:
        if lock is not None:
            os.close(lock)


def lock_name(path: str) -> str:
    """Name a file system's lock, another one for each path: /a-b is not /a/b."""
    return ".mount" + path.replace("%", "%25").replace("/", "%2F")


def _point(path: str) -> str:
    """Write a path as the table does: "/scratch/" is /scratch, which every node would lack otherwise."""
    return "/" + "/".join(filter(None, path.split("/")))


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
