"""demo.timeline: a recovery becomes stages without gaps, and every node gets its lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from demo.record import DemoError, Entry, Loss, Record
from demo.timeline import Places, find_marks, floor, lanes, stages, times_s
from jitmpi.events import Fault, Manifest

FAILURE = 20.0
PLACES = Places(("n1", "n2", "n3", "n4"), ("n1", "n2", "n4", "n5"), "n3", ("n5",))


def entry(time: float, kind: str, **data: object) -> Entry:
    return Entry(time, kind, {"time": time, "entry": kind, **data})


def notice(time: float, event: str, **data: object) -> Entry:
    return entry(time, "notice", notice={"event": event, **data})


def losses() -> Mapping[int, tuple[Loss, ...]]:
    times = [4.5 + m for m in range(16)] + [29.8 + m for m in range(5)]
    order = [*range(16), *range(15, 20)]
    return {r: tuple(Loss(m, (3.0 - m / 10).hex(), t) for m, t in zip(order, times, strict=True)) for r in range(4)}


JOURNAL = (
    entry(1.0, "launch", attempt=0, nodes=["n1", "n2", "n3", "n4"]),
    notice(4.0, "started", rank=0, minibatch=0, restored=""),
    notice(5.0, "update", minibatch=0),
    notice(21.1, "fault"),
    entry(21.6, "decision", action="relaunch"),
    entry(22.0, "launch", attempt=1, nodes=["n1", "n2", "n4", "n5"]),
    notice(29.0, "started", rank=0, minibatch=15, restored="/c/m15-r0"),
    notice(30.0, "update", minibatch=15),
)
TIMES = {"fault": 21.0, "detected": 21.1, "settled": 21.2, "agreed": 21.21, "saved": 21.4, "committed": 21.5}
FAULT = Fault("death", (2,), (2,), 15, "n3 does not answer", 21.0)
MANIFEST = Manifest("7", 0, 15, 4, "/c", FAULT, PLACES.before, (), (), 0, 0, True, (), TIMES, {})
ROUGH = Record(JOURNAL, losses(), "aa", MANIFEST, {})


def test_the_stages_follow_each_other_without_a_gap() -> None:
    """From the failure to the first replayed update every moment belongs to one stage."""
    found = stages(find_marks(ROUGH, FAILURE))
    assert found[0].start == FAILURE
    assert found[-1].end == 30.0
    assert all(a.end == b.start and a.end >= a.start for a, b in pairwise(found))


def test_the_times_are_those_of_the_stages() -> None:
    """`first_update` is the whole way from the failure; `floor` is handed through."""
    times = times_s(find_marks(ROUGH, FAILURE), 3.25)
    assert times == {
        "detect": 1.1, "settle": 0.1, "save": 0.2, "commit": 0.1, "relaunch": 0.5, "restore": 7.0,
        "first_update": 10.0, "floor": 3.25,
    }  # fmt: skip


def test_the_floor_is_from_launch_to_first_update() -> None:
    """A start without a restore, as the undisturbed run had it."""
    assert floor(ROUGH) == 4.0


def test_what_is_not_there_is_named() -> None:
    """No relaunch in the journal, no time in the manifest: said, not drawn."""
    with pytest.raises(DemoError, match="launch after the failure"):
        find_marks(replace(ROUGH, journal=JOURNAL[:5]), FAILURE)
    with pytest.raises(DemoError, match="saved"):
        find_marks(replace(ROUGH, manifest=replace(MANIFEST, times={"detected": 1.0, "settled": 2.0})), FAILURE)
    with pytest.raises(DemoError, match="no checkpoint"):
        find_marks(replace(ROUGH, manifest=None), FAILURE)


def test_every_node_has_its_lane() -> None:
    """Survivors recover, the dead node ends, the spare one waits and takes over."""
    found = {lane.node: lane for lane in lanes(find_marks(ROUGH, FAILURE), PLACES, ROUGH.losses)}
    assert list(found) == ["n1", "n2", "n3", "n4", "n5"]
    assert [span.what for span in found["n1"].spans] == [
        "start", "training", "detect", "settle", "save", "commit", "relaunch", "restore", "replay", "training",
    ]  # fmt: skip
    assert [span.what for span in found["n3"].spans] == ["start", "training", "off"]
    assert [span.what for span in found["n5"].spans] == ["spare", "restore", "replay", "training"]
    assert (found["n4"].spans[1].label, found["n4"].spans[-1].label) == ("rank 3", "rank 2")


def test_ticks_lie_on_the_node_the_rank_was_on() -> None:
    """Rank 3 ticks on n4 before and on n5 after; n3 has no tick after its end."""
    found = {lane.node: lane.ticks for lane in lanes(find_marks(ROUGH, FAILURE), PLACES, ROUGH.losses)}
    assert len(found["n3"]) == 16
    assert len(found["n5"]) == 5
    assert len(found["n4"]) == 21
