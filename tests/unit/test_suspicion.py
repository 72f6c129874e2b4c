"""Suspicions: counted, and forgotten with time."""

from __future__ import annotations

import pytest

from slurm_plugin.suspicion import MOST, Suspicion, add, parse, score, write

DAY = 86400.0


def test_they_lose_half_their_weight_with_every_half_life() -> None:
    """Fresh ones weigh one each; a clock that was set back makes none heavier."""
    entries = [Suspicion(0, "uid-1", "x"), Suspicion(DAY, "uid-2", "x"), Suspicion(5 * DAY, "uid-3", "x")]
    assert score(entries[:2], DAY, DAY) == pytest.approx(1.5)
    assert score(entries, 0, DAY) == 3.0


def test_whoever_comes_again_counts_once() -> None:
    """A thousand crashes of one user weigh as much as one: alone nobody reaches a threshold of two."""
    entries: tuple[Suspicion, ...] = ()
    for n in range(1000):
        entries = add(entries, Suspicion(n, "uid-1000", f"crash {n}"), DAY)
    assert entries == (Suspicion(999, "uid-1000", "crash 999"),)
    assert score(add(entries, Suspicion(999, "kernel", "disk"), DAY), 999, DAY) == 2.0


def test_the_forgotten_and_the_too_many_go() -> None:
    """The file stays small."""
    old = Suspicion(0, "uid-1", "x")
    assert add([old], Suspicion(11 * DAY, "uid-2", "x"), DAY) == (Suspicion(11 * DAY, "uid-2", "x"),)
    entries: tuple[Suspicion, ...] = ()
    for n in range(3 * MOST):
        entries = add(entries, Suspicion(n, f"uid-{n}", "x"), DAY)
    assert [e.when for e in entries] == list(range(3 * MOST - 1, 2 * MOST - 1, -1))


def test_what_is_written_is_read() -> None:
    """Every field comes back."""
    entries = (Suspicion(1764444444.0, "uid-1000", "rank 3 of step 0 died of SIGBUS"), Suspicion(5.0, "kernel", ""))
    assert parse(write(entries)) == entries


@pytest.mark.parametrize("text", [b"", b"\xff\x00\n", b"x uid-1 y\n", b"1 UID y\n", b"99999999999999 u y\n", b"1\n"])
def test_damage_weighs_nothing(text: bytes) -> None:
    """Lines that are none are left out; the others count."""
    assert parse(text) == ()
    assert len(parse(text + b"\n5 uid-1 y\n")) == 1
