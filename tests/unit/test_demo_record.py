"""demo.record: what a run left behind is read as it is."""

from __future__ import annotations

import json
from pathlib import Path

from demo.record import Loss, read_journal, read_losses, read_record


def test_a_line_cut_off_by_the_failure_is_left_out() -> None:
    """A rank that dies in mid-write leaves half a line; the whole ones are still read."""
    whole = json.dumps({"minibatch": 3, "epoch": 0, "loss": "0x1.8p+1", "time": 5.5})
    assert read_losses(whole + "\n" + whole[:20]) == (Loss(3, "0x1.8p+1", 5.5),)


def test_the_journal_keeps_every_field() -> None:
    """Kinds and times are named, everything else stays reachable."""
    (entry,) = read_journal('{"time": 2.0, "entry": "launch", "nodes": ["n1", "n2"]}\n{"time": 3.0, "en')
    assert (entry.time, entry.kind, entry.data["nodes"]) == (2.0, "launch", ["n1", "n2"])


def test_a_run_that_left_nothing_is_an_empty_record(tmp_path: Path) -> None:
    """Missing files are missing in the record; reading does not fail."""
    record = read_record(tmp_path / "out", tmp_path / "7")
    assert (record.journal, dict(record.losses), record.sha256, record.manifest) == ((), {}, "", None)


def test_losses_are_sorted_by_rank(tmp_path: Path) -> None:
    """Rank 10 comes after rank 2, whatever the file names sort like."""
    for rank in (10, 2):
        line = {"minibatch": 0, "epoch": 0, "loss": "0x1.0p+0", "time": 1.0}
        (tmp_path / f"loss-rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "final.json").write_text('{"sha256": "ab", "minibatches": 1, "world": 2}')
    record = read_record(tmp_path, tmp_path)
    assert list(record.losses) == [2, 10]
    assert record.sha256 == "ab"
