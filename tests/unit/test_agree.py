"""agree: same reports, same decision; the newest minibatch that is covered and known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi.agree import decide
from jitmpi.errors import NotCoveredError
from jitmpi.events import Context, Report
from jitmpi.position import Position


def context(rank: int, minibatch: int, *, exact: bool = True, tag: bytes = b"") -> Context:
    return Context(rank, minibatch, exact, {"tag": tag})


def report(
    rank: int, minibatch: int, *contexts: Context, intact: bool = True, shard: int = 0, note: str = ""
) -> Report:
    return Report(rank, minibatch, intact, shard, (), contexts, "", "between", note)


def test_the_newest_intact_minibatch_is_saved_by_all_who_hold_it() -> None:
    """Two ranks that finished the update save S(m+1); the one still at S(m) does not."""
    contexts = tuple(context(r, 8) for r in range(3))
    decision = decide([report(0, 8, *contexts), report(1, 7), report(2, 8)], world=3)
    assert (decision.minibatch, decision.savers, decision.exact) == (8, {0: (0, 2)}, True)


def test_a_rank_whose_update_failed_holds_nothing() -> None:
    """A report that is not intact neither saves nor counts."""
    with pytest.raises(NotCoveredError, match="none"):
        decide([report(0, 3, intact=False)], world=1)


def test_every_shard_needs_a_holder() -> None:
    """With two shards the newest minibatch that both hold is taken."""
    contexts = tuple(context(r, 4) for r in range(3))
    reports = [report(0, 5), report(1, 4, *contexts, shard=1), report(2, 4, shard=0)]
    decision = decide(reports, world=3, shards=2)
    assert (decision.minibatch, decision.savers) == (4, {0: (2,), 1: (1,)})


def test_a_buddys_copy_stands_in_for_the_dead_and_exact_beats_forecast() -> None:
    """The dead rank's context comes from a buddy, the exact one before the forecast."""
    reports = [
        report(0, 6, context(0, 6), context(1, 6, exact=False, tag=b"forecast")),
        report(2, 6, context(2, 6), context(1, 6, tag=b"exact")),
    ]
    decision = decide(reports, world=3)
    assert decision.contexts[1].pieces["tag"] == b"exact"
    assert decision.exact


def test_a_minibatch_with_all_contexts_goes_before_a_newer_one_without() -> None:
    """Exactness outranks one minibatch of work."""
    old = tuple(context(r, 6) for r in range(3))
    decision = decide([report(0, 7, context(0, 7), *old), report(1, 6, *old)], world=3)
    assert (decision.minibatch, decision.savers, decision.exact) == (6, {0: (1,)}, True)


def test_a_lost_context_is_said() -> None:
    """Parameters are saved even when a rank's random state is gone; the decision is not called exact."""
    decision = decide([report(0, 2, context(0, 2))], world=2)
    assert decision.unknown == (1,)
    assert not decision.exact
    assert "rank 1" in decision.notes[0]


def lives(rank: int, *, seeded_alike: bool) -> Report:
    pieces = {"position": b'{"epoch":3,"feed":0,"index":7,"done":false}', "user": b"{}", "buffer/own": bytes([rank])}
    for name in ("random/torch", "start/random/torch", "start/loader/own"):
        pieces[name] = b"alike" if seeded_alike else bytes([rank])
    pieces["start/random/python"] = b"alike"
    return report(rank, 2, Context(rank, 2, True, pieces))


@pytest.mark.parametrize("seeded_alike", [True, False])
def test_a_rank_whose_context_is_lost_goes_on_where_the_others_do(seeded_alike: bool) -> None:
    """Not in the first epoch. It gets random states too where all others agree in them; its own buffers it does not."""
    decision = decide([lives(rank, seeded_alike=seeded_alike) for rank in (0, 2)], world=3)
    borrowed = decision.contexts[1]
    same = {"random/torch", "start/random/torch", "start/random/python", "start/loader/own"} if seeded_alike else set()
    assert set(borrowed.pieces) == {"position", "user"} | same
    assert (borrowed.rank, borrowed.minibatch, decision.unknown, decision.exact) == (1, 2, (1,), False)


def test_a_rank_that_cannot_write_does_not_save() -> None:
    """An unfit rank's contexts count, its disk does not."""
    contexts = (context(0, 2), context(1, 2))
    decision = decide([report(0, 2, *contexts), report(1, 2)], world=2, unfit={0})
    assert decision.savers == {0: (1,)}
    assert decision.exact


reports_of_a_round = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 1), st.lists(st.integers(0, 4), max_size=5)),
    min_size=1,
    max_size=5,
)


@given(reports_of_a_round, st.integers(1, 2))
def test_the_order_of_reports_does_not_matter(rows: list[tuple[int, bool, int, list[int]]], shards: int) -> None:
    """Every permutation of the same reports gives the same decision or the same refusal; it is always covered."""
    reports = [
        report(rank, m, *(context(r, m) for r in known), intact=intact, shard=shard % shards)
        for rank, (m, intact, shard, known) in enumerate(rows)
    ]
    outcomes = set()
    for order in itertools.islice(itertools.permutations(reports), 24):
        try:
            decision = decide(order, world=5, shards=shards)
        except NotCoveredError as error:
            outcomes.add(str(error))
            continue
        outcomes.add(repr(decision))
        assert set(decision.savers) == set(range(shards))
        for shard, ranks in decision.savers.items():
            assert all(
                reports[r].intact and reports[r].minibatch == decision.minibatch and reports[r].shard == shard
                for r in ranks
            )
    assert len(outcomes) == 1


def user(rank: int, minibatch: int, value: bytes, *, exact: bool = True) -> Context:
    return Context(rank, minibatch, exact, {"user": value})


def test_a_replicated_user_state_is_taken_from_a_survivor() -> None:
    """The dead rank's lines behind the update never ran; a state equal on all ranks before is equal after."""
    before = (user(0, 6, b"48"), user(1, 6, b"48"))
    decision = decide([report(0, 7, user(0, 7, b"56"), user(1, 7, b"48", exact=False), *before)], world=2)
    assert decision.contexts[1].pieces["user"] == b"56"
    assert decision.exact


def test_a_state_of_its_own_is_said_to_be_old() -> None:
    """What only the dead rank knew cannot be made up."""
    before = (user(0, 6, b"0"), user(1, 6, b"1"))
    decision = decide([report(0, 7, user(0, 7, b"2"), user(1, 7, b"1", exact=False), *before)], world=2)
    assert decision.contexts[1].pieces["user"] == b"1"
    assert not decision.exact
    assert "run.state" in decision.notes[0]


def at(rank: int, minibatch: int, place: Position, *, exact: bool = True) -> Context:
    return Context(rank, minibatch, exact, {"position": place.encode()})


def test_all_ranks_go_on_from_the_same_end_of_an_epoch() -> None:
    """The last minibatch of an epoch ends where the next epoch's first begins: nobody skips the lines in between."""
    end, begin = Position(0, 0, 4), Position(1, 0, 0)
    for order in ((end, begin), (begin, end)):
        reports = [report(0, 4, at(0, 4, end), *(at(1, 4, place) for place in order)), report(2, 4, at(2, 4, end))]
        chosen = decide(reports, world=3).contexts
        assert [Position.decode(chosen[r].pieces["position"]) for r in range(3)] == [end] * 3


def test_of_the_micro_batches_forecasts_the_last_one_counts() -> None:
    """Every forward pass makes a forecast; only the last one has drawn all the minibatch's data and random numbers."""
    early, late = at(1, 5, Position(0, 0, 17), exact=False), at(1, 5, Position(0, 0, 20), exact=False)
    own = at(0, 5, Position(0, 0, 20))
    for order in ((early, late), (late, early)):
        decision = decide([report(0, 5, own, *order)], world=2)
        assert Position.decode(decision.contexts[1].pieces["position"]).index == 20


def test_the_end_of_an_epoch_may_be_known_as_a_forecast_only() -> None:
    """A forecast that came true was not told again; the exact context of the next epoch's begin does not outdo it."""
    end, begin = Position(0, 0, 4), Position(1, 0, 0)
    contexts = (at(0, 4, end), at(1, 4, end, exact=False), at(1, 4, begin))
    chosen = decide([report(0, 4, *contexts)], world=2).contexts[1]
    assert Position.decode(chosen.pieces["position"]) == end


def test_a_break_behind_the_update_counts_for_the_dead_rank_too() -> None:
    """The survivors left the loop early; the rank that died in that update must not take the feed up again."""
    left, ahead = Position(0, 0, 3, True), Position(0, 0, 3)
    chosen = decide([report(0, 4, at(0, 4, left), at(1, 4, ahead, exact=False))], world=2).contexts
    assert [Position.decode(chosen[r].pieces["position"]) for r in range(2)] == [left, left]


def test_a_dead_ranks_lost_buffers_are_said() -> None:
    """Buffers that were not handed over make the result inexact, unless the next forward pass replaces them anyway."""

    def own(rank: int, *, buffers: bool, source: bytes | None) -> Context:
        pieces = {"buffer/bn.running_mean": b"x"} if buffers else {}
        return Context(rank, 6, True, pieces | ({"buffers-by": source} if buffers and source else {}))

    def notes(dead: int, source: bytes | None) -> tuple[str, ...]:
        contexts = [own(rank, buffers=rank != dead, source=source) for rank in range(3)]
        alive = [rank for rank in range(3) if rank != dead]
        return decide([report(alive[0], 6, *contexts), report(alive[1], 6)], world=3).notes

    assert notes(dead=1, source=b"0") == ()
    assert "rank 0: its buffers" in notes(dead=0, source=b"0")[0]
    assert "rank 1: its buffers" in notes(dead=1, source=None)[0]
    assert decide([report(0, 6, context(0, 6), context(1, 6))], world=2).exact
