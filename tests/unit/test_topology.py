"""Every rank is linked to those who decide and to those who keep its context, and to few others."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import topology
from jitmpi.events import Member

worlds = st.lists(st.integers(0, 5), min_size=1, max_size=14).map(
    lambda nodes: [Member(rank, f"n{node}", "127.0.0.1", 1) for rank, node in enumerate(nodes)]
)


def world(*sizes: int) -> list[Member]:
    """Return members: as many on each node as its size says."""
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    return [Member(rank, node, "127.0.0.1", 1) for rank, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [((1, 1, 1, 1, 1), (0, 1, 2, 3)), ((2, 2, 2, 2, 2), (0, 2, 4, 6)), ((3, 3), (0, 1, 3, 4)), ((6,), (0, 1, 2, 3))],
)
def test_candidates_are_on_different_nodes(sizes: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    """The coordinators lie on four nodes where there are four, and are four ranks wherever they can be."""
    assert topology.candidates(world(*sizes)) == chosen


@pytest.mark.parametrize(
    ("sizes", "rank", "chosen"),
    [
        ((1, 1, 1, 1), 2, (3, 0)),
        ((2, 2, 2), 0, (2, 4)),
        ((2, 2, 2), 5, (0, 2)),
        ((2, 2), 1, (2, 3)),
        ((3,), 1, (2, 0)),
        ((2,), 0, (1,)),
        ((1,), 0, ()),
        ((3, 1), 0, (3,)),
    ],
)
def test_buddies_are_on_other_nodes(sizes: tuple[int, ...], rank: int, chosen: tuple[int, ...]) -> None:
    """A context outlives its node where another exists, and two nodes where two others exist."""
    assert topology.buddies(world(*sizes), rank) == chosen


@given(worlds, st.randoms())
def test_edges_follow_from_the_members_alone(members: list[Member], random: Random) -> None:
    """Any order of the members gives the same edges; they join all ranks to all candidates, buddies and wards."""
    pairs = topology.edges(members)
    shuffled = list(members)
    random.shuffle(shuffled)
    assert topology.edges(shuffled) == pairs
    for member in members:
        rank = member.rank
        friends = {*topology.candidates(members), *topology.buddies(members, rank), *topology.wards(members, rank)}
        assert {b if a == rank else a for a, b in pairs if rank in (a, b)} >= friends - {rank}
    assert all(a < b for a, b in pairs)
    assert len(pairs) <= 6 * len(members)
