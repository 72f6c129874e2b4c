"""Turn the journal of a job into what happened in each of its launches: entries -> Outcomes.

Rule 1: a pure reading; the running launch and those of years ago are read by the same function.
Rule 2: notices are a user process's word: anything missing or malformed in them reads as unknown, never as an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

UNKNOWN = -1  # of a minibatch


@dataclass(frozen=True)
class Outcome:
    """How one launch of the ranks ended, as far as jit-srun saw it.

    Attributes:
        restarts: how often the job had been through the queue by then.
        nodes: where the ranks ran.
        code: exit code of srun; None when jit-srun had to end it or did not live to see it.
        step: Slurm's id of the step, "" if nobody said.
        trained: training had begun.
        began, reached: minibatch of the first and of the last word of it; -1 unknown.
        updated: it got through the first update, so it made progress.
        fault: "death", "hang", "exception", "signal", or "" for none reported.
        blamed: nodes of the ranks that the fault began with; unreachable: those of them that do not answer.
        everyone: the fault began with every rank of the world at once.
        committed: minibatch of the checkpoint that this launch left; None for none.
        lost: why nothing could be saved, "" otherwise; error: the ranks' own words (a traceback).
        interrupted: somebody at the keyboard ended it.
        unlaunched: why Slurm gave srun no step, so that no rank was started; "" otherwise.
    """

    attempt: int
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    code: int | None = None
    step: str = ""
    trained: bool = False
    began: int = UNKNOWN
    reached: int = UNKNOWN
    updated: bool = False
    fault: str = ""
    blamed: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    everyone: bool = False
    detail: str = ""
    committed: int | None = None
    lost: str = ""
    error: str = ""
    finished: bool = False
    interrupted: bool = False
    unlaunched: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended by a failure, not as planned, not well, and not unseen."""
        if self.unlaunched:
            return False
        return self.fault not in ("", "signal") or (not self.fault and self.code not in (0, None))

    @property
    def place(self) -> int:
        """Where it failed: the minibatch, or -1 before training."""
        return self.reached if self.trained else UNKNOWN


def read(entries: Iterable[Mapping[str, Any]]) -> tuple[Outcome, ...]:
    """Read all launches of a job, oldest first, from the entries of its journal."""
    outcomes: dict[int, Outcome] = {}
    for entry in entries:
        attempt = _int(entry.get("attempt"))
        kind = entry.get("entry")
        if kind == "launch":
            outcomes[attempt] = Outcome(
                attempt, restarts=max(0, _int(entry.get("restarts"))), nodes=_names(entry.get("nodes"))
            )
        elif attempt in outcomes and kind == "notice" and isinstance(entry.get("notice"), Mapping):
            outcomes[attempt] = hear(outcomes[attempt], entry["notice"])
        elif attempt in outcomes and kind == "outcome":
            code = entry.get("code")
            outcomes[attempt] = replace(
                outcomes[attempt],
                code=code if isinstance(code, int) else None,
                interrupted=entry.get("interrupted") is True,
                unlaunched=_text(entry.get("unlaunched")),
            )
    return tuple(outcomes[a] for a in sorted(outcomes))


def hear(outcome: Outcome, notice: Mapping[str, Any]) -> Outcome:
    """Add what one notice says."""
    minibatch = _int(notice.get("minibatch"))
    if notice.get("step") not in (None, ""):
        outcome = replace(outcome, step=str(notice["step"]))
    match notice.get("event"):
        case "started":
            return replace(outcome, trained=True, began=minibatch, reached=max(minibatch, outcome.reached))
        case "update":
            return replace(outcome, trained=True, updated=True, reached=max(minibatch + 1, outcome.reached))
        case "fault":
            return _hear_fault(outcome, notice)
        case "committed":
            return replace(outcome, committed=max(0, minibatch), reached=max(minibatch, outcome.reached))
        case "lost":
            reason = _text(notice.get("reason")) or "no reason given"
            return replace(outcome, lost=reason, error=_text(notice.get("error")))
        case "finished":
            return replace(outcome, finished=True)
    return outcome


def _hear_fault(outcome: Outcome, notice: Mapping[str, Any]) -> Outcome:
    """Merge a fault; after a change of coordinator there may be two views of it, and the first names its kind."""
    fault = notice.get("fault")
    if not isinstance(fault, Mapping):
        return replace(outcome, fault=outcome.fault or "death")
    nodes, ranks, away = _names(notice.get("nodes")), _ranks(fault.get("ranks")), _ranks(fault.get("unreachable"))
    minibatch = _int(fault.get("minibatch"))
    return replace(
        outcome,
        fault=outcome.fault or _text(fault.get("kind")) or "death",
        blamed=_merge(outcome.blamed, nodes, ranks),
        unreachable=_merge(outcome.unreachable, nodes, away),
        everyone=outcome.everyone or bool(nodes and ranks >= set(range(len(nodes)))),
        detail=outcome.detail or _text(fault.get("detail")),
        trained=outcome.trained or notice.get("phase") == "training",
        reached=max(minibatch, outcome.reached),
        updated=outcome.updated or 0 <= outcome.began < minibatch,
    )


def _merge(known: tuple[str, ...], nodes: tuple[str, ...], ranks: set[int]) -> tuple[str, ...]:
    named = [nodes[r] for r in sorted(ranks) if 0 <= r < len(nodes)]
    return tuple(dict.fromkeys([*known, *named]))


def _ranks(value: Any) -> set[int]:
    return {r for r in value if isinstance(r, int)} if isinstance(value, (list, tuple)) else set()


def _names(value: Any) -> tuple[str, ...]:
    return tuple(str(n) for n in value) if isinstance(value, (list, tuple)) else ()


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else UNKNOWN


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
