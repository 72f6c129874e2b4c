"""The journal of a job: what jit-srun did and saw, one JSON line an entry, kept over relaunches and requeues.

    {"entry": "launch", "attempt", "time", "restarts", "nodes", "spares"} and, in the first of a jit-srun, what it is
        known by (slurm_plugin/trainings.py): "command", "folder", "environ", "cluster"
    {"entry": "notice", "attempt", "time", "notice": what the rank sent}
    {"entry": "outcome", "attempt", "time", "code", "interrupted", "unlaunched"}
    {"entry": "decision", "attempt", "time", "action", "nodes", "exclude", "reason"}

Rule 1: an entry is durable before the thing that it announces is done.
Rule 2: a journal that cannot be written does not end a job that runs: entries then live in memory and it is told.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slurm_plugin import contract

Entry = dict[str, Any]


class JournalError(Exception):
    """The job's directory or its journal cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: the launch that left it and the minibatch it goes on with."""

    attempt: int
    minibatch: int


class Journal:
    """Append entries to `<directory>/<job>/journal.jsonl` and remember them.

    Attributes:
        directory: the job's own directory, made with mode 0700.
        entries: everything read at the start and added since.
    """

    def __init__(self, root: str, job: str, complain: Callable[[str], None], clock: Callable[[], float] = time.time):
        """Open or make the journal.

        Raises:
            JournalError: the directory cannot be made, is not ours, or cannot be written.
        """
        self.directory = os.path.join(root, job)
        self._complain = complain
        self._clock = clock
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            if not os.path.isdir(self.directory):
                os.mkdir(self.directory, 0o700)
            if os.stat(self.directory).st_uid != os.geteuid():
                raise JournalError(f"{self.directory} belongs to somebody else; give --jit-ckpt=dir= another directory")
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(os.path.join(self.directory, contract.JOURNAL), flags, 0o600)
        except OSError as error:
            raise JournalError(f"cannot write into {self.directory}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise JournalError(f"{contract.JOURNAL} in {self.directory} is not a file")
        text = _read_all(self._file)
        self.entries = parse(text)
        self._torn = bool(text) and not text.endswith(b"\n")

    def append(self, entry: str, attempt: int, **fields: Any) -> Entry:
        """Add one entry and make it durable."""
        made: Entry = {"entry": entry, "attempt": attempt, "time": round(self._clock(), 6), **fields}
        self.entries.append(made)
        self._write(json.dumps(made, separators=(",", ":")).encode() + b"\n")
        return made

    def next_attempt(self) -> int:
        """Return the number of the next launch: the numbers go on over requeues."""
        return next_attempt(self.entries, self.directory)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Write a line; one torn by a crash, or by a disk that was full before, is ended first."""
        rest = b"\n" + line if self._torn else line
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
            self._torn = False
        except OSError as error:
            self._torn = True
            self._complain(f"cannot write the journal in {self.directory} ({error.strerror}); going on without it")


def next_attempt(entries: Iterable[Entry], directory: str) -> int:
    """Return the number of the launch that comes after these entries, and after what was saved without jit-srun."""
    attempts = [e["attempt"] for e in entries if e.get("entry") == "launch" and isinstance(e.get("attempt"), int)]
    return max([*attempts, *_claims(_names(directory))], default=-1) + 1


def read(path: str) -> list[Entry]:
    """Read a journal without opening it for more; no entries where there is none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        return parse(_read_all(file)) if stat.S_ISREG(os.fstat(file).st_mode) else []
    except OSError:
        return []
    finally:
        os.close(file)


def parse(text: bytes) -> list[Entry]:
    """Read the lines of a journal; torn or damaged ones are left out."""
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def find_checkpoints(directory: str) -> tuple[Checkpoint, ...]:
    """Find the checkpoints that are committed (their claim exists) and whose files have not been removed since.

    A claim without a visible folder counts while its hidden folder is there: the next restore finishes the renaming.
    """
    names = _names(directory)
    claimed = _claims(names)
    visible = [m for n in names if (m := re.fullmatch(r"m(\d+)-r(\d+)", n))]
    found = {Checkpoint(int(m.group(2)), int(m.group(1))) for m in visible if int(m.group(2)) in claimed}
    hidden = {int(m.group(1)) for n in names if (m := re.fullmatch(r"\.m\d+-r(\d+)-e\d+-c\d+", n))}
    for attempt in hidden & claimed - {c.attempt for c in found}:
        found.add(Checkpoint(attempt, _claimed_minibatch(directory, attempt)))
    return tuple(sorted(found, key=lambda c: (c.attempt, c.minibatch)))


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _claims(names: Iterable[str]) -> set[int]:
    return {int(m.group(1)) for n in names if (m := re.fullmatch(r"claim-r(\d+)\.json", n))}


def _claimed_minibatch(directory: str, attempt: int) -> int:
    try:
        with open(os.path.join(directory, contract.CLAIM.format(attempt=attempt)), encoding="utf-8") as file:
            return int(json.load(file)["minibatch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def has_claim(directory: str, attempt: int) -> bool:
    """Say whether this launch has committed its checkpoint."""
    return os.path.exists(os.path.join(directory, contract.CLAIM.format(attempt=attempt)))


def _read_all(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    pieces = []
    while piece := os.read(file, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)
