"""Turn claims into visible checkpoints, and old checkpoints into free space. Anybody may do it, at any time, twice.

Rule 1: a claim is the commit. `finish` only carries out what a claim has decided; without one nothing becomes visible.
Rule 2: only what belongs to the owner of the job's directory counts: whoever else can write there plants nothing.
    What is removed is such a folder by its name, straight inside the job's directory; links are not followed.
Rule 3: a claim is never taken away, or a process left over from its attempt could commit again; a pruned checkpoint
    leaves a claim that says so.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass

from jitmpi import files, manifests
from jitmpi.errors import DamagedError
from jitmpi.events import Manifest
from slurm_plugin import contract

log = logging.getLogger("jitmpi")

ASIDE_MANIFEST = f".{contract.MANIFEST}"  # in a folder that is being written; becomes manifest.json after the claim
CLAIM_NAME = re.compile(r"claim-r(\d{1,9})\.json")
ASIDE_NAME = re.compile(r"\.m(\d{1,15})-r(\d{1,9})-e\d+-c\d+")
VISIBLE_NAME = re.compile(r"m(\d{1,15})-r(\d{1,9})")
GONE = ".gone-"  # prefix of a pruned folder while its files go
PRUNED = b'{"pruned": true}\n'


@dataclass(frozen=True)
class Committed:
    """A visible checkpoint by its folder's name; sorts oldest first."""

    attempt: int
    minibatch: int
    path: str

    @property
    def age(self) -> tuple[int, int]:
        """Order among the checkpoints of a job: a later attempt is newer."""
        return self.attempt, self.minibatch


def visible_path(job_directory: str, minibatch: int, attempt: int) -> str:
    """Where a checkpoint lies once it is committed."""
    return os.path.join(job_directory, contract.CHECKPOINT_DIR.format(minibatch=minibatch, attempt=attempt))


def committed(job_directory: str) -> list[Committed]:
    """List the visible checkpoints of a job, newest first. They may be damaged; nothing is opened."""
    found = []
    for name in _folders(job_directory):
        match = VISIBLE_NAME.fullmatch(name)
        if match:
            found.append(Committed(int(match[2]), int(match[1]), os.path.join(job_directory, name)))
    return sorted(found, key=lambda c: c.age, reverse=True)


def next_attempt(job_directory: str) -> int:
    """Return the first number that no launch of the job has used for a checkpoint, whole or half-written."""
    matches = (kind.fullmatch(name) for name in _entries(job_directory) for kind in (CLAIM_NAME, ASIDE_NAME))
    return max((int(match[match.lastindex or 1]) for match in matches if match), default=-1) + 1


def finish(job_directory: str) -> None:
    """Make every claimed checkpoint visible, and remove what older attempts than the newest claim left half-written.

    The running attempt has no claim while it can still write, so its folders are never touched. Several processes may
    do this at once. Problems are logged; there is nothing a caller could do about them.
    """
    newest, unfinished = -1, set()
    for name in _entries(job_directory):
        match = CLAIM_NAME.fullmatch(name)
        if not match:
            continue
        attempt = int(match[1])
        newest = max(newest, attempt)
        try:
            _complete(job_directory, name, attempt)
        except (OSError, DamagedError) as error:
            unfinished.add(attempt)
            log.warning("jit-ckpt: %s cannot be finished: %s", os.path.join(job_directory, name), error)
    for name in _folders(job_directory):
        match = ASIDE_NAME.fullmatch(name)
        if name.startswith(GONE) or (match and int(match[2]) < newest and int(match[2]) not in unfinished):
            remove(job_directory, name)


def prune(job_directory: str, keep: int) -> None:
    """Remove every checkpoint older than the `keep`-th whole one. Damaged ones do not count: a good one stays."""
    whole = 0
    for found in committed(job_directory):
        if whole >= max(keep, 1):
            _retire(job_directory, found)
        elif _is_whole(found.path):
            whole += 1


def remove(job_directory: str, name: str) -> None:
    """Remove a folder straight inside the job's directory, by name; not the target of a link."""
    path = os.path.join(job_directory, os.path.basename(name))
    if files.is_folder(job_directory) and files.is_folder(path, files.owner_of(job_directory)):
        shutil.rmtree(path, ignore_errors=True)  # walks by file descriptors, follows no link


def read_claim(path: str) -> Manifest | None:
    """Read a claim: the manifest of the checkpoint that it committed, None when that was pruned.

    Raises:
        DamagedError: it is neither.
    """
    text = files.read(path, manifests.MOST_TEXT, files.owner_of(os.path.dirname(path)))
    with suppress(ValueError):
        if json.loads(text) == json.loads(PRUNED):
            return None
    return manifests.from_text(text, path)


def _complete(job_directory: str, claim: str, attempt: int) -> None:
    path = os.path.join(job_directory, claim)
    shown = [found.path for found in committed(job_directory) if found.attempt == attempt]
    if any(files.size_of(os.path.join(folder, contract.MANIFEST)) for folder in shown):
        return
    manifest = read_claim(path)
    if manifest is None:
        return
    if manifest.attempt != attempt:
        raise DamagedError(f"{path}: is the manifest of attempt {manifest.attempt}")
    text = files.read(path, manifests.MOST_TEXT, files.owner_of(job_directory))
    for name in _folders(job_directory):
        match = ASIDE_NAME.fullmatch(name)
        folder = os.path.join(job_directory, name)
        if match and int(match[2]) == attempt and _holds(folder, text):
            with suppress(FileNotFoundError):  # another process finishes it at the same time
                _show(folder, visible_path(job_directory, manifest.minibatch, attempt))
                files.sync_folder(job_directory)


def _holds(folder: str, text: bytes) -> bool:
    for name in (ASIDE_MANIFEST, contract.MANIFEST):
        path = os.path.join(folder, name)
        if files.size_of(path) == len(text):
            with suppress(DamagedError):
                return files.read(path, len(text)) == text
    return False


def _show(folder: str, visible: str) -> None:
    with suppress(FileNotFoundError):  # already in place
        os.replace(os.path.join(folder, ASIDE_MANIFEST), os.path.join(folder, contract.MANIFEST))
    files.sync_folder(folder)
    os.rename(folder, visible)


def _retire(job_directory: str, found: Committed) -> None:
    gone = GONE + os.path.basename(found.path)
    try:
        os.rename(found.path, os.path.join(job_directory, gone))
        files.write_durably(os.path.join(job_directory, contract.CLAIM.format(attempt=found.attempt)), PRUNED)
    except OSError as error:
        log.warning("jit-ckpt: %s cannot be removed: %s", found.path, error)
        return
    remove(job_directory, gone)


def _is_whole(folder: str) -> bool:
    try:
        return not any(manifests.misfits(manifests.read(folder), folder))
    except DamagedError:
        return False


def _entries(job_directory: str) -> list[str]:
    if not files.is_folder(job_directory):
        return []
    try:
        return sorted(os.listdir(job_directory))
    except OSError as error:
        log.warning("jit-ckpt: %s cannot be listed: %s", job_directory, error)
        return []


def _folders(job_directory: str) -> list[str]:
    owner = files.owner_of(job_directory)
    return [name for name in _entries(job_directory) if files.is_folder(os.path.join(job_directory, name), owner)]
