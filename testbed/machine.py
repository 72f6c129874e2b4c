"""What the test bed needs to know of the machine it runs on, and how it keeps its own verbs apart."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from testbed.commands import TestbedError, run, wait_for
from testbed.namespaces import RUN
from testbed.plugin import REPO

PROGRAMS: Final = (
    *("slurmctld", "slurmd", "sbatch", "munged"),
    *("ip", "nsenter", "unshare", "taskset", "setpriv", "setsid", "awk"),
)
SYSTEM_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
LOCK_TIMEOUT: Final = 180.0  # seconds to wait for another verb on the same cluster
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def missing() -> str:
    """Why no cluster can run on this machine, in one line; "" if one can."""
    if os.geteuid() != 0:
        return "the test bed needs root: it makes network and mount namespaces"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    users = {entry.pw_name for entry in pwd.getpwall()}
    lacking += [f"user {name}" for name in ("slurm", "munge") if name not in users]
    lacking += [] if Path("/etc/slurm").is_dir() else ["/etc/slurm"]
    return f"missing: {', '.join(lacking)}; `make deps` installs them" if lacking else ""


def check() -> None:
    """Raise TestbedError if no cluster can run on this machine."""
    reason = missing()
    if reason:
        raise TestbedError(reason)


@functools.cache
def slurm_version() -> str:
    """Return the version of the installed Slurm, for example "22.05.8"."""
    shown = run(["/usr/sbin/slurmctld", "-V"]).stdout
    found = re.search(r"\d+\.\d+\.\d+", shown)
    if not found:
        raise TestbedError(f"slurmctld -V shows no version: {shown!r}")
    return found.group()


def mpi() -> str:
    """Return what srun can offer the ranks: "pmix", or "none" where Slurm was built without it (Debian's 26.05.5)."""
    return "pmix" if any(Path("/usr/lib").glob("*/slurm*/mpi_pmix.so")) else "none"


def memory_mib() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def kept_folders() -> tuple[Path, ...]:
    """The folders that jobs must see even below /tmp or /root: this checkout, and the Pythons that run it."""
    found = {REPO, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    with contextlib.suppress(OSError):
        for line in (REPO / ".venv" / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                found.add(Path(value.strip()).resolve().parent)
    return tuple(sorted(p for p in found if p != Path("/usr") and not any(q in found for q in p.parents)))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and its like back until the end, from the commands run meanwhile too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Wait for the end of another verb on the cluster `name`, then keep others out.

    Raises:
        TestbedError: the other one did not end within `LOCK_TIMEOUT` seconds.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    path = RUN / f".{name}.lock"  # not in the cluster's folder, which `down` removes
    held: list[int] = []

    def taken() -> bool:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(lock).st_ino:  # else a `down` has just removed the one opened here
                held.append(lock)
                return True
        os.close(lock)
        return False

    wait_for(f"end of another verb on cluster {name!r}", taken, LOCK_TIMEOUT)
    try:
        yield
    finally:
        if not (RUN / name).exists():
            path.unlink(missing_ok=True)
        os.close(held[0])  # and with it the lock, as when the process dies
