"""Read what one run left behind (journal, losses, final.json, manifest) into one Record.

Rule: files are read as they are and nothing is guessed; what is missing is missing in the Record too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitmpi import manifests
from jitmpi.errors import DamagedError
from jitmpi.events import Manifest
from slurm_plugin import contract


class DemoError(Exception):
    """The demo cannot go on or did not show what it promises; the message says what."""


@dataclass(frozen=True)
class Loss:
    """One line of a rank's loss file; `loss` is the hexadecimal text of the float, so equal text is equal bits."""

    minibatch: int
    loss: str
    time: float


@dataclass(frozen=True)
class Entry:
    """One line of jit-srun's journal: `kind` is "launch", "notice", "outcome" or "decision", `data` the whole line."""

    time: float
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What one run left behind.

    Attributes:
        losses: rank -> its lines in the order written; a minibatch that was run again is there again.
        sha256: of the final parameters, "" when the run did not end.
        manifest: of the newest committed checkpoint, None without one.
        checkpoint: the sizes in bytes of that checkpoint's HDF5 files by name.
    """

    journal: tuple[Entry, ...]
    losses: Mapping[int, tuple[Loss, ...]]
    sha256: str
    manifest: Manifest | None
    checkpoint: Mapping[str, int]


def read_record(out: Path, job_directory: Path) -> Record:
    """Read a run from its `--out` folder and its job's checkpoint folder.

    Raises:
        DemoError: the newest checkpoint's manifest is damaged.
    """
    final = out / "final.json"
    sha256 = str(json.loads(final.read_text())["sha256"]) if final.exists() else ""
    files = {int(p.stem.removeprefix("loss-rank")): p for p in out.glob("loss-rank*.jsonl")}
    losses = {rank: read_losses(files[rank].read_text()) for rank in sorted(files)}
    journal = job_directory / contract.JOURNAL
    entries = read_journal(journal.read_text()) if journal.exists() else ()
    folders = sorted(job_directory.glob(f"m*-r*/{contract.MANIFEST}"), key=lambda p: p.stat().st_mtime)
    if not folders:
        return Record(entries, losses, sha256, None, {})
    newest = folders[-1].parent
    try:
        manifest = manifests.read(str(newest))
    except DamagedError as error:
        raise DemoError(str(error)) from error
    sizes = {p.name: p.stat().st_size for p in sorted(newest.glob("*.h5"))}
    return Record(entries, losses, sha256, manifest, sizes)


def read_losses(text: str) -> tuple[Loss, ...]:
    """Read a loss file; a line cut off by the failure is left out (a minibatch that misses shows later)."""
    found = []
    for raw in _lines(text):
        if {"minibatch", "loss", "time"} <= raw.keys():
            found.append(Loss(int(raw["minibatch"]), str(raw["loss"]), float(raw["time"])))
    return tuple(found)


def read_journal(text: str) -> tuple[Entry, ...]:
    """Read jit-srun's journal; a last line that is still being written is left out."""
    return tuple(
        Entry(float(raw["time"]), str(raw["entry"]), raw) for raw in _lines(text) if {"time", "entry"} <= raw.keys()
    )


def _lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        try:
            raw = json.loads(line)
        except ValueError:
            continue
        if isinstance(raw, dict):
            found.append(raw)
    return found
