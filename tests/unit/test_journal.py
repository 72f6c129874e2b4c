"""The journal on a real disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from slurm_plugin.journal import Checkpoint, Journal, JournalError, find_checkpoints, has_claim, parse
from tests.unit.full_disk import full


def quiet(text: str) -> None:
    """Expect no complaint."""
    raise AssertionError(text)


def test_entries_come_back_in_a_later_life_of_the_job(tmp_path: Path) -> None:
    """What was appended is there after a requeue, and the attempts go on counting."""
    first = Journal(str(tmp_path), "7", quiet, clock=lambda: 5.0)
    first.append("launch", 0, nodes=["n1"])
    first.append("outcome", 0, code=83)
    assert first.next_attempt() == 1
    first.close()
    second = Journal(str(tmp_path), "7", quiet)
    assert second.entries == [
        {"entry": "launch", "attempt": 0, "time": 5.0, "nodes": ["n1"]},
        {"entry": "outcome", "attempt": 0, "time": 5.0, "code": 83},
    ]
    assert second.next_attempt() == 1
    second.close()


def test_what_was_saved_without_jit_srun_is_counted_too(tmp_path: Path) -> None:
    """A launch under a number that is claimed already could save nothing."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "claim-r4.json").write_text("{}")
    journal = Journal(str(tmp_path), "7", quiet)
    journal.append("launch", 2)
    assert journal.next_attempt() == 5
    journal.close()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """The directory is 0700 and the journal 0600 from birth, whatever the umask."""
    old = os.umask(0)
    try:
        journal = Journal(str(tmp_path / "new"), "7", quiet)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(journal.directory).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(Path(journal.directory) / "journal.jsonl").st_mode) == 0o600
    journal.close()


def test_a_torn_line_harms_neither_the_past_nor_the_future(tmp_path: Path) -> None:
    """A crash in mid-write costs that line only."""
    path = tmp_path / "7" / "journal.jsonl"
    path.parent.mkdir()
    path.write_text('{"entry":"launch","attempt":0}\n{"entry":"outc')
    journal = Journal(str(tmp_path), "7", quiet)
    journal.append("launch", journal.next_attempt())
    journal.close()
    assert [e["attempt"] for e in parse(path.read_bytes())] == [0, 1]
    assert json.loads(path.read_text().splitlines()[-1])["entry"] == "launch"


def test_a_full_disk_costs_only_the_entries_that_it_had_no_room_for(tmp_path: Path) -> None:
    """It takes the first part of a line; that is said, and what comes later stands on lines of its own."""
    said: list[str] = []
    journal = Journal(str(tmp_path), "7", said.append)
    journal.append("launch", 0)
    path = Path(journal.directory) / "journal.jsonl"
    with full(path.stat().st_size + 10):
        journal.append("outcome", 0, code=83)
    journal.append("launch", 1)
    journal.close()
    assert len(said) == 1
    assert "going on without it" in said[0]
    assert [(e["entry"], e["attempt"]) for e in parse(path.read_bytes())] == [("launch", 0), ("launch", 1)]
    assert [e["entry"] for e in journal.entries] == ["launch", "outcome", "launch"]


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """No directory, no journal: said at once, with the path."""
    (tmp_path / "7").write_text("a file")
    with pytest.raises(JournalError, match="7"):
        Journal(str(tmp_path), "7", quiet)
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "journal.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError):
        Journal(str(tmp_path), "8", quiet)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_does_not_end_the_job(tmp_path: Path) -> None:
    """Entries then live in memory and the user is told."""
    told: list[str] = []
    journal = Journal(str(tmp_path), "7", told.append)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file)
    os.close(full)
    journal.append("launch", 0)
    assert journal.next_attempt() == 1
    assert "cannot write the journal" in told[0]
    journal.close()


def test_only_claimed_checkpoints_that_still_exist_count(tmp_path: Path) -> None:
    """A folder without a claim and a claim without a folder are no checkpoints; an unfinished renaming is one."""
    for name in ("m5-r0", "m9-r1", ".m12-r2-e3-c0", ".m11-r2-e1-c0", "m3-rx"):
        (tmp_path / name).mkdir()
    for attempt, minibatch in ((0, 5), (2, 12), (4, 20)):
        (tmp_path / f"claim-r{attempt}.json").write_text(json.dumps({"minibatch": minibatch}))
    assert find_checkpoints(str(tmp_path)) == (Checkpoint(0, 5), Checkpoint(2, 12))
    assert has_claim(str(tmp_path), 4)
    assert not has_claim(str(tmp_path), 1)
    assert find_checkpoints(str(tmp_path / "nowhere")) == ()
