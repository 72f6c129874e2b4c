from __future__ import annotations

import json
from typing import Any

import pytest

from bench.moments import Update, detected_after, first_update, read_updates, recovered
from bench.rows import BenchError


def updates(attempt: int, minibatches: range, since: float) -> list[Update]:
    return [Update(attempt, m, since + 0.1 * n, 7) for n, m in enumerate(minibatches)]


def manifest(attempt: int, **times: float) -> dict[str, Any]:
    return {"attempt": attempt, "times": {"detected": 20.5, "committed": 21.0, **times}}


def test_a_torn_line_is_left_out() -> None:
    """A killed rank's last line may be half written."""
    whole = json.dumps({"attempt": 0, "minibatch": 3, "time": 1.5, "pid": 7})
    assert read_updates(f"{whole}\n{whole[:30]}") == (Update(0, 3, 1.5, 7),)


def test_a_recovery_is_put_together_from_its_own_launch() -> None:
    """Failure of launch 1: its manifest, the first update of launch 2, and one update done again."""
    done = updates(0, range(5), 1.0) + updates(1, range(4, 12), 10.0) + updates(2, range(11, 14), 30.0)
    found = recovered(20.0, 1, [manifest(0, detected=1.0), manifest(1)], done)
    assert (found.failed, found.detected, found.committed, found.updated) == (20.0, 20.5, 21.0, 30.0)
    assert found.lost == 1


def test_what_is_missing_is_named() -> None:
    """No manifest, a time missing in it, no update after it: an error, never a guess."""
    with pytest.raises(BenchError, match="launch 0 committed no checkpoint"):
        recovered(1.0, 0, [manifest(1)], [])
    with pytest.raises(BenchError, match="does not say when it was committed"):
        recovered(1.0, 0, [{"attempt": 0, "times": {"detected": 2.0}}], [])
    with pytest.raises(BenchError, match="launch 1 did no update"):
        recovered(1.0, 0, [manifest(0)], updates(0, range(3), 0.0))
    with pytest.raises(BenchError, match="launch 3 did no update"):
        first_update([], 3)


def test_a_failure_known_before_it_was_made_is_another_failure() -> None:
    """The benchmark measures its own failures and no others."""
    assert detected_after(20.0, 0, [manifest(0)]) == 0.5
    with pytest.raises(BenchError, match="another failure"):
        detected_after(20.6, 0, [manifest(0)])
