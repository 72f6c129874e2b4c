"""Turn the members of the world into the pairs of ranks that are linked. Pure: no I/O.

Rule: the same members in, in any order, the same pairs out; their number grows with the ranks, not with their square.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from jitmpi.events import Member

CANDIDATES: Final = 4  # ranks that may coordinate; each of them is linked to every rank
BUDDIES: Final = 2  # ranks that keep a rank's replay context


def candidates(members: Sequence[Member]) -> tuple[int, ...]:
    """Return the ranks that may coordinate, in the order in which they are asked.

    The lowest rank of each of the first four nodes by rank order; with fewer nodes, their next ranks fill the four.
    """
    nodes = _nodes(members)
    turns = ((place, ranks[place]) for ranks in nodes.values() for place in range(len(ranks)))
    chosen = [rank for _, rank in sorted(turns, key=lambda turn: turn[0])]  # stable: nodes stay in rank order
    return tuple(sorted(chosen[:CANDIDATES]))


def buddies(members: Sequence[Member], rank: int) -> tuple[int, ...]:
    """Return the ranks that keep this rank's replay context: the next two, cyclically, on other nodes.

    On two other nodes if there are two; on this node only when there is no other.
    """
    ordered = sorted(members, key=lambda member: member.rank)
    place = next(i for i, member in enumerate(ordered) if member.rank == rank)
    following = ordered[place + 1 :] + ordered[:place]
    others = [member for member in following if member.node != ordered[place].node] or following
    chosen: list[Member] = []
    for member in others:
        if len(chosen) < BUDDIES and member.node not in {friend.node for friend in chosen}:
            chosen.append(member)
    chosen += [member for member in others if member not in chosen][: BUDDIES - len(chosen)]
    return tuple(member.rank for member in chosen)


def wards(members: Sequence[Member], rank: int) -> tuple[int, ...]:
    """Return the ranks whose replay contexts this rank keeps."""
    return tuple(sorted(member.rank for member in members if rank in buddies(members, member.rank)))


def edges(members: Sequence[Member]) -> set[tuple[int, int]]:
    """Return the pairs of ranks (lower, higher) that are linked: each with every candidate and with its buddies."""
    pairs = set()
    coordinators = candidates(members)
    for member in members:
        for peer in {*coordinators, *buddies(members, member.rank)} - {member.rank}:
            pairs.add((min(member.rank, peer), max(member.rank, peer)))
    return pairs


def _nodes(members: Iterable[Member]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        nodes.setdefault(member.node, []).append(member.rank)
    return nodes
