"""Turn the survivors' reports into one Decision: which minibatch, who saves it, with which replay contexts.

Rule 1: no I/O here; the round gathers the reports and hands them in.
Rule 2: same reports in, in any order, same decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jitmpi.errors import NotCoveredError
from jitmpi.events import Context, Report


@dataclass(frozen=True)
class Decision:
    """What will be saved.

    Attributes:
        savers: shard -> the ranks that hold it intact, in order.
        contexts: rank -> its replay context for `minibatch`; ranks in `unknown` have none.
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
    contexts = best[minibatch]
    unknown = tuple(r for r in range(world) if r not in contexts)
    notes = [f"rank {r}: its replay context is lost" for r in unknown]
    savers = {shard: tuple(ranks) for shard, ranks in sorted(holders[minibatch].items())}
    saving = {rank for ranks in savers.values() for rank in ranks}
    notes += [f"rank {r.rank}: {r.note}" for r in ordered if r.note and r.rank in saving]
    return Decision(minibatch, savers, contexts, unknown, tuple(notes))


def _contexts(reports: Iterable[Report], minibatch: int) -> dict[int, Context]:
    """Choose for every rank the best context of `minibatch`: exact before forecast, the rank's own before a buddy's."""
    best: dict[int, tuple[tuple[bool, bool], Context]] = {}
    for report in reports:
        for context in report.contexts:
            if context.minibatch == minibatch:
                worth = (context.exact, context.rank == report.rank)
                if context.rank not in best or worth > best[context.rank][0]:
                    best[context.rank] = (worth, context)
    return {rank: context for rank, (_, context) in sorted(best.items())}
