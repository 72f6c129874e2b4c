from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.rows import BenchError, Row, differences, ratios, row, table, write


def test_p99_is_the_bad_end_whichever_end_that_is() -> None:
    """Of 200 samples two are worse; high ones where low is good, low ones where high is good."""
    samples = [float(n) for n in range(1, 201)]
    assert row("a", "s", samples).p99 == 198.0
    assert row("a", "ratio", samples, higher=True).p99 == 3.0
    assert row("a", "s", [1.0, 9.0, 2.0]).p99 == 9.0, "of few samples it is the worst"


def test_the_median_meets_the_target_from_its_good_side() -> None:
    """A target is a limit from above, or from below where high is good; without one nothing is met or missed."""
    assert row("a", "s", [1.0, 2.0, 9.0], target=2.0).met is True
    assert row("a", "s", [1.0, 2.1, 9.0], target=2.0).met is False
    assert row("a", "ratio", [0.1, 0.8, 0.9], target=0.8, higher=True).met is True
    assert row("a", "ratio", [0.1, 0.7, 0.9], target=0.8, higher=True).met is False
    assert (row("a", "s", [1.0]).target, row("a", "s", [1.0]).met) == (None, None)


def test_a_row_without_samples_is_an_error() -> None:
    """What was not measured has no number."""
    with pytest.raises(BenchError, match=r"detect_kill_s: nothing was measured"):
        row("detect_kill_s", "s", [])


def test_rounding_keeps_what_targets_are_compared_with() -> None:
    """Numbers are shown with four digits, and the comparison is made before."""
    found = row("a", "ratio", [1.02004], target=1.02)
    assert (found.median, found.met) == (1.02, False)
    assert row("a", "us", [123456.0]).median == 123456.0
    assert row("a", "s", [0.0]).median == 0.0


def test_side_by_side_samples_are_compared_pairwise() -> None:
    """A slow turn is compared with the other half of the same slow turn."""
    assert ratios([10.0, 1.0], [20.0, 2.0]) == [0.5, 0.5]
    assert differences([5.0, 9.0], [4.0, 7.0]) == [1.0, 2.0]
    with pytest.raises(ValueError, match="argument"):
        ratios([1.0], [])


def test_the_file_holds_the_rows_in_the_promised_form(tmp_path: Path) -> None:
    """{"rows": [{name, unit, median, p99, target, met}]}, null without a target."""
    write(tmp_path / "deep" / "save.json", [Row("a", "s", 1.0, 2.0, 3.0, True), row("b", "s", [4.0])], {"quick": True})
    assert json.loads((tmp_path / "deep" / "save.json").read_text()) == {
        "rows": [
            {"name": "a", "unit": "s", "median": 1.0, "p99": 2.0, "target": 3.0, "met": True},
            {"name": "b", "unit": "s", "median": 4.0, "p99": 4.0, "target": None, "met": None},
        ],
        "quick": True,
    }


def test_the_table_shows_every_row_and_shouts_what_is_missed() -> None:
    """One line a row under a head; a missed target stands out."""
    lines = table([Row("a", "s", 0.5, 2.0, 0.1, False), Row("bb", "MiB/s", 12345.6, 2.0)]).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["a", "0.5", "2", "s", "0.1", "NO"]
    assert lines[2].split() == ["bb", "12346", "2", "MiB/s"]
