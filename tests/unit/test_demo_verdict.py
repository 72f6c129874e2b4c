"""demo.verdict: equality is judged bit by bit, and the cost of the failure is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from demo.record import Loss, Record
from demo.verdict import again, compare
from jitmpi.events import Fault, Manifest

MINIBATCHES = 6


def manifest(minibatch: int, seen: int | None = None, exact: bool = True) -> Manifest:
    fault = Fault("death", (2,), (2,), minibatch if seen is None else seen, "", 10.0)
    return Manifest(
        "7", 0, minibatch, 2, "/c/7/m3-r0", fault, ("n1", "n2"), (), (), 0, 0, exact, ("rank 1 made up",), {}, {}
    )


def losses(*order: int) -> Mapping[int, tuple[Loss, ...]]:
    return {
        rank: tuple(Loss(m, (1.0 / (m + rank + 1)).hex(), float(i)) for i, m in enumerate(order)) for rank in (0, 1)
    }


CALM = Record((), losses(*range(MINIBATCHES)), "aa", None, {})
ROUGH = Record((), losses(0, 1, 2, 3, 3, 4, 5), "aa", manifest(3), {})


def test_one_minibatch_done_again_is_the_promise() -> None:
    """Same bits, the interrupted minibatch run twice: no problem, one replayed, none lost."""
    verdict = compare(CALM, ROUGH, MINIBATCHES)
    assert verdict.bitwise_equal
    assert (verdict.replayed, verdict.lost, verdict.problems) == (1, 0, ())


def test_a_failure_before_any_loss_still_replays_one() -> None:
    """A minibatch interrupted before its loss was logged is begun again all the same."""
    verdict = compare(CALM, replace(ROUGH, losses=losses(0, 1, 2, 3, 4, 5)), MINIBATCHES)
    assert (verdict.replayed, verdict.lost, verdict.problems) == (1, 0, ())


def test_the_observer_may_be_one_minibatch_behind_the_checkpoint() -> None:
    """A survivor that saw the fault in minibatch 2 while the state became that of 3 lost nothing."""
    assert compare(CALM, replace(ROUGH, manifest=manifest(3, seen=2)), MINIBATCHES).replayed == 1


def test_finished_work_done_again_is_a_problem() -> None:
    """Two minibatches run twice mean that one finished update was thrown away."""
    rough = replace(ROUGH, losses=losses(0, 1, 2, 3, 2, 3, 4, 5), manifest=manifest(2, seen=3))
    verdict = compare(CALM, rough, MINIBATCHES)
    assert (verdict.replayed, verdict.lost) == (2, 1)
    assert verdict.problems


def test_one_bit_of_one_loss_is_a_difference() -> None:
    """Equality is that of the bits, and also of the interrupted minibatch's first try."""
    bad = list(ROUGH.losses[1])
    bad[3] = Loss(3, (1.0 / 5 + 2**-55).hex(), 3.0)
    verdict = compare(CALM, replace(ROUGH, losses={0: ROUGH.losses[0], 1: tuple(bad)}), MINIBATCHES)
    assert not verdict.bitwise_equal
    assert "rank 1, minibatch 3" in verdict.problems[0]


def test_a_missing_minibatch_rank_or_end_is_a_difference() -> None:
    """Nothing that is absent counts as equal."""
    for rough in (
        replace(ROUGH, losses=losses(0, 1, 2, 4, 5)),
        replace(ROUGH, losses={0: ROUGH.losses[0]}),
        replace(ROUGH, sha256=""),
        replace(ROUGH, sha256="bb"),
    ):
        assert not compare(CALM, rough, MINIBATCHES).bitwise_equal
    assert not compare(replace(CALM, losses=losses(0, 1)), ROUGH, MINIBATCHES).bitwise_equal


def test_no_checkpoint_or_an_inexact_one_is_a_problem() -> None:
    """Equal bits without the product's doing are not what the demo shows."""
    assert "no checkpoint" in compare(CALM, replace(ROUGH, manifest=None), MINIBATCHES).problems[0]
    assert "made up" in compare(CALM, replace(ROUGH, manifest=manifest(3, exact=False)), MINIBATCHES).problems[0]


def test_again_finds_what_was_run_twice() -> None:
    """Only minibatches that appear more than once, in order."""
    assert again([Loss(m, "0x0p+0", 0.0) for m in (0, 1, 5, 4, 5, 1)]) == (1, 5)
