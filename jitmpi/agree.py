"""Turn the survivors' reports into one Decision: which minibatch, who saves it, with which replay contexts.

Rule 1: no I/O here; the round gathers the reports and hands them in.
Rule 2: same reports in, in any order, same decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from jitmpi.errors import NotCoveredError
from jitmpi.events import BUFFERS_BY, Context, Report
from jitmpi.position import Position


@dataclass(frozen=True)
class Decision:
    """What will be saved.

    Attributes:
        savers: shard -> the ranks that hold it intact, in order.
        contexts: rank -> its replay context for `minibatch`; those of ranks in `unknown` are borrowed from the others.
        notes: what a person should know: contexts that are forecasts or missing, tails that were cut off.
    """

    minibatch: int
    savers: Mapping[int, tuple[int, ...]]
    contexts: Mapping[int, Context]
    unknown: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether the resumed run will be bit for bit the undisturbed one."""
        return not self.unknown and not self.notes


def decide(reports: Iterable[Report], *, world: int, shards: int = 1, unfit: Collection[int] = ()) -> Decision:
    """Pick the newest minibatch of which every shard has an intact holder and every rank a known context.

    When no minibatch has all contexts, the newest that is held at all is taken: the parameters matter more than bits
    of random state, and `Decision.unknown` says whose are lost. Ranks in `unfit` (their writes failed) do not save.

    Raises:
        NotCoveredError: no such minibatch; nothing may be saved.
    """
    ordered = sorted(reports, key=lambda report: report.rank)
    holders: dict[int, dict[int, list[int]]] = {}  # minibatch -> shard -> ranks
    for report in ordered:
        if report.intact and report.rank not in unfit:
            holders.setdefault(report.minibatch, {}).setdefault(report.shard, []).append(report.rank)
    covered = [m for m in sorted(holders, reverse=True) if len(holders[m]) == shards]
    if not covered:
        raise NotCoveredError(shards=shards, held={m: set(h) for m, h in holders.items()})
    best = {m: _contexts(ordered, m) for m in covered}
    minibatch = next((m for m in covered if len(best[m]) == world), covered[0])
    contexts, doubts = _with_users_state(best[minibatch], ordered)
    unknown = tuple(r for r in range(world) if r not in contexts)
    notes = [f"rank {r}: its replay context is lost; it goes on at the others' place in the data" for r in unknown]
    notes += doubts
    notes += _lost_buffers(contexts)
    contexts |= _borrowed(unknown, contexts)
    savers = {shard: tuple(ranks) for shard, ranks in sorted(holders[minibatch].items())}
    saving = {rank for ranks in savers.values() for rank in ranks}
    notes += [f"rank {r.rank}: {r.note}" for r in ordered if r.note and r.rank in saving]
    return Decision(minibatch, savers, contexts, unknown, tuple(notes))


def _with_users_state(
    contexts: Mapping[int, Context], reports: Iterable[Report]
) -> tuple[dict[int, Context], list[str]]:
    """Bring the user's own state in forecasts up to date where that can be known.

    A forecast was made before the script's lines behind the update ran. Where a rank's state was, one minibatch before,
    that of a rank whose exact context is known, both are taken to be replicas of one state. Elsewhere a note says so.
    """
    exact = [(r, c.pieces.get("user")) for r, c in contexts.items() if c.exact]
    before = {
        c.rank: c.pieces.get("user")
        for report in reports
        for c in report.contexts
        for chosen in (contexts.get(c.rank),)
        if chosen is not None and c.exact and c.minibatch == chosen.minibatch - 1
    }
    found, notes = dict(contexts), []
    for rank, context in contexts.items():
        if context.exact or not (context.pieces.get("user") or any(user for _, user in exact)):
            continue
        twins = [user for r, user in exact if rank in before and r in before and before[r] == before[rank]]
        if twins and all(user == twins[0] for user in twins):
            pieces = {k: v for k, v in context.pieces.items() if k != "user"}
            pieces |= {"user": twins[0]} if twins[0] is not None else {}
            found[rank] = Context(rank, context.minibatch, False, pieces)
        else:
            notes.append(f"rank {rank}: its run.state is that of the end of its forward pass")
    return found, notes


def _borrowed(unknown: Iterable[int], known: Mapping[int, Context]) -> dict[int, Context]:
    """Make up what ranks need whose contexts are lost: without a place they would begin with the first epoch again.

    The place in the data and the user's state are the first known rank's. Random states are what all others agree in
    (scripts that seed all ranks alike); where each has its own, the lost one goes on with those of its start.
    """
    if not known:
        return {}
    first = known[min(known)].pieces
    common = {name for name in first if all(c.pieces.get(name) == first[name] for c in known.values())}
    starts = {name for name in first if name.startswith("start/")}
    if len(known) == 1:
        common = set()
    elif not starts <= common:  # a part of them is of no use
        common -= starts
    pieces = {name: raw for name, raw in first.items() if name in common or name in ("position", "user")}
    minibatch = known[min(known)].minibatch
    return {rank: Context(rank, minibatch, False, pieces) for rank in unknown}


def _lost_buffers(contexts: Mapping[int, Context]) -> list[str]:
    """Say which dead ranks' own buffers nobody has: too many bytes to be handed over, or on a GPU.

    Where every rank gets those of one rank at the next forward pass (DDP's default), only that rank's matter.
    """
    held = {rank: any(name.startswith("buffer/") for name in c.pieces) for rank, c in contexts.items()}
    source = next((c.pieces[BUFFERS_BY] for c in contexts.values() if BUFFERS_BY in c.pieces), None)
    lost = [r for r in contexts if not held[r] and source in (None, b"%d" % r)] if any(held.values()) else []
    return [f"rank {r}: its buffers (BatchNorm statistics and such) are lost; another rank's are taken" for r in lost]


def _contexts(reports: Iterable[Report], minibatch: int) -> dict[int, Context]:
    """Choose for every rank the best context of `minibatch`: exact before forecast, the rank's own before a buddy's.

    A minibatch has several boundaries where an epoch ends: all ranks go on from the first, or some would run the
    script's lines between the epochs and others would not. That one may be known as a forecast only: one that came true
    is not told again. Of forecasts, one a micro-batch, the last is the right one.
    """
    best: dict[int, tuple[tuple[object, ...], Context]] = {}
    for report in reports:
        for context in report.contexts:
            if context.minibatch == minibatch:
                epoch, feed, index = _place(context)
                worth = (-epoch, -feed, context.exact, -index if context.exact else index, context.rank == report.rank)
                if context.rank not in best or worth > best[context.rank][0]:
                    best[context.rank] = (worth, context)
    chosen = {rank: context for rank, (_, context) in sorted(best.items())}
    return _left_together(chosen)


def _left_together(contexts: dict[int, Context]) -> dict[int, Context]:
    """A forecast knows nothing of a `break` behind it: what the script did on the other ranks, it did on this one."""
    places = [_position(context) for context in contexts.values() if context.exact]
    left = {place for place in places if place is not None and place.done}
    found = dict(contexts)
    for rank, context in contexts.items():
        here = _position(context)
        if here is not None and not context.exact:
            behind = replace(here, done=True)
            if behind in left:
                pieces = {**context.pieces, "position": behind.encode()}
                found[rank] = Context(rank, context.minibatch, False, pieces)
    return found


def _place(context: Context) -> tuple[int, int, int]:
    position = _position(context)
    return (0, 0, 0) if position is None else (position.epoch, position.feed, position.index)


def _position(context: Context) -> Position | None:
    try:
        return Position.decode(context.pieces["position"])
    except (KeyError, TypeError, ValueError):
        return None
