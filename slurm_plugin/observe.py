"""Look at this host: files, the checkpoint directory, the Python of the jobs. The doctor's readers.

Rule 1: whatever may hang (a dead file system, an import from one) happens in a child process under a deadline, and a
        child that cannot be killed is left behind, not waited for.
Rule 2: nothing that is made here is left here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from slurm_plugin.plugstack import text

ROOT: Final = Path(__file__).resolve().parent.parent  # the folder that holds slurm_plugin and jitmpi
FOLDER_PATIENCE: Final = 15.0  # seconds for a file system to answer a dozen questions
PYTHON_PATIENCE: Final = 60.0  # seconds for mpi4py and h5py to be imported from a slow file system
KILLED: Final = 1.0  # seconds for a killed child to be gone

# Prints what the jobs' Python has. MPI is asked for its version, not started: outside srun some builds end the process.
MODULES: Final = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "mpi4py", "h5py", "numpy"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import h5py
    found["hdf5"] = h5py.version.hdf5_version
except Exception as error:
    found["h5py_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found), flush=True)
try:
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI
    found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\\0 ")
except Exception as error:
    found["mpi_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class Folder:
    """What a directory for checkpoints is like.

    Attributes:
        error: why nothing can be written there; "" when all went well.
        kind: the type of its file system, "" when unknown.
        free: bytes that this user may still write; -1 when unknown.
        links, locks: what hard links and flock answer: "", or why not.
        offset: seconds that this host's clock is ahead of the file system's.
    """

    path: str
    error: str = ""
    kind: str = ""
    free: int = -1
    links: str = ""
    locks: str = ""
    offset: float = 0.0


def library(stack: str, name: str) -> bytes | None:
    """Read the plugin's library that plugstack.conf names."""
    named = re.search(rf"^\s*(?:optional|required)\s+(\S*{re.escape(name)})", stack, re.MULTILINE)
    try:
        return Path(named.group(1)).read_bytes() if named else None
    except OSError:
        return None


def folder(path: str, patience: float = FOLDER_PATIENCE) -> Folder:
    """Try a directory in a child process; missing folders are made, and removed again."""
    code = "import sys; sys.path.insert(0, sys.argv[2]); from slurm_plugin import observe; observe.answer(sys.argv[1])"
    said = child([sys.executable, "-I", "-B", "-c", code, path, str(ROOT)], patience)
    try:
        return Folder(**json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return Folder(path, error=f"the file system gave no answer within {patience:g} s")


def answer(path: str) -> None:
    """Print what `try_folder` finds; the other end of `folder`."""
    print(json.dumps(asdict(try_folder(path))), flush=True)


def try_folder(path: str) -> Folder:
    """Write, link and lock a file in a directory."""
    made = _make(path)
    name = os.path.join(path, f".doctor-{secrets.token_hex(8)}")
    try:
        if isinstance(made, str):
            return Folder(path, made, kind=file_system(path))
        with open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
            offset = time.time() - os.fstat(file.fileno()).st_mtime
            links, locks = (
                _answer(os.link, name, f"{name}.link"),
                _answer(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            )
        status = os.statvfs(path)
        return Folder(path, "", file_system(path), status.f_bavail * status.f_frsize, links, locks, offset)
    except OSError as error:
        return Folder(path, f"cannot be written: {error.strerror}", kind=file_system(path))
    finally:
        for left in (name, f"{name}.link"):
            with contextlib.suppress(OSError):
                os.unlink(left)
        for left in reversed(made if isinstance(made, list) else []):
            with contextlib.suppress(OSError):
                os.rmdir(left)


def _make(path: str) -> list[str] | str:
    """Make a folder and those above it; return the new ones, or why not."""
    made: list[str] = []
    missing = [p for p in [path, *map(str, Path(path).parents)] if not os.path.isdir(p)]
    for new in reversed(missing):
        try:
            os.mkdir(new, 0o700)
        except OSError as error:
            for left in reversed(made):
                os.rmdir(left)
            return f"{new} cannot be created: {error.strerror}"
        made.append(new)
    return made


def _answer(call: Any, *arguments: object) -> str:
    try:
        call(*arguments)
    except OSError as error:
        return error.strerror or errno.errorcode.get(error.errno or 0, "refused")
    return ""


def file_system(path: str) -> str:
    """Return the type of the file system that holds a path, from the kernel's list of mounts."""
    best = ("", "")
    for point, kind in _mounts():
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _mounts() -> Iterator[tuple[str, str]]:
    for line in (text("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        if rest:
            yield fields.split()[4].replace("\\040", " "), rest.split()[0]


def modules(python: str, patience: float = PYTHON_PATIENCE) -> dict[str, str]:
    """Ask the jobs' Python for the versions of what jitmpi needs; empty when it does not answer."""
    for line in reversed(child([python, "-c", MODULES], patience).splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return {str(key): str(value) for key, value in found.items()}
    return {}


def child(command: Sequence[str], patience: float) -> str:
    """Run a command and return what it printed, all of it or what there was at the deadline; "" if it cannot start."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError:
        return ""
    try:
        return process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired as error:
        _abandon(process)
        return error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill a child with all that it started; one that hangs in the kernel cannot be killed, and is left behind."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED)
