"""One fault, from the first sign to leaving: a state machine without I/O that every rank runs.

Events go in through the `on_*` methods and `tick`; actions come out of `take`. Rules:

1. The lowest live candidate in one's own view coordinates; it alone decides, so ranks cannot disagree.
2. Every wait has a deadline. Whoever is silent beyond it counts as lost.
3. A plan is replaced by one with a higher epoch, never changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from jitmpi import agree, detect
from jitmpi.errors import NotCoveredError
from jitmpi.events import Described, Fault, Report, SavePlan, Written
from slurm_plugin.contract import EXIT_COMMITTED, EXIT_LOST

REPORT_MARGIN = 5.0  # seconds beyond `settle` that a report may take to arrive
EPOCHS = 1_000_000  # plans that one coordinator may make; a later candidate's plans all come after them
MINORITY_WAIT = 5.0  # seconds by which the smaller side of a cut network lets the larger one claim first


@dataclass(frozen=True)
class Tell:
    """Send a value to one rank, or to all linked ranks when `rank` is None."""

    rank: int | None
    kind: str  # "fault", "report", "plan", "written", "described", "failed", "committed", "abort"
    value: object


@dataclass(frozen=True)
class Settle:
    """Close the gate and bring the training thread to rest."""


@dataclass(frozen=True)
class Announce:
    """Tell the launcher what happened; phase is "training", or "starting" while no update was done."""

    fault: Fault
    phase: str


@dataclass(frozen=True)
class Write:
    """Write this rank's part of the plan."""

    plan: SavePlan


@dataclass(frozen=True)
class Commit:
    """Make the written files one checkpoint; `described` is None where this rank holds the plan's minibatch itself."""

    plan: SavePlan
    written: tuple[Written, ...]
    decision: agree.Decision
    fault: Fault
    described: Described | None = None


@dataclass(frozen=True)
class Conclude:
    """See to the job's future (jit-srun, or a requeue in its place) before anybody leaves.

    Some MPI builds let Slurm kill the whole step soon after the first rank has gone; what is left to do must be done.
    """

    saved: bool
    reason: str  # the checkpoint's folder when saved
    alone: bool  # this side may act for the job: there is no larger one beyond a cut of the network
    minibatch: int = -1  # the one that the checkpoint goes on with; -1 where another side has saved


@dataclass(frozen=True)
class Leave:
    """End this process; `told` when this rank has said the outcome already."""

    code: int
    reason: str
    told: bool

    @property
    def saved(self) -> bool:
        """Whether the state of the job is safe."""
        return self.code == EXIT_COMMITTED


Action = Tell | Settle | Announce | Write | Commit | Conclude | Leave


@dataclass
class Round:
    """The fault protocol of one rank.

    Attributes:
        base: the minibatch that this launch began with; its state is not worth saving again.
        directory: template of the folder for a plan, with {minibatch}, {epoch} and {coordinator}.
        settle, save: deadlines in seconds; `now` is monotonic seconds everywhere.
    """

    rank: int
    world: int
    candidates: Sequence[int]
    settle: float
    save: float
    directory: str
    base: int = -1
    faults: list[Fault] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    reports: dict[int, Report] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    left: bool = False
    _actions: list[Action] = field(default_factory=list)
    _mine: Report | None = None
    _reported_to: int | None = None
    _deadline: float | None = None
    _epoch: int = 0
    _plan: SavePlan | None = None
    _decision: agree.Decision | None = None
    _written: dict[int, Written] = field(default_factory=dict)
    _described: Described | None = None
    _unfit: dict[int, str] = field(default_factory=dict)
    _claim_at: float | None = None
    _committing: bool = False
    _announced: bool = False

    @property
    def active(self) -> bool:
        """Whether a fault has been seen."""
        return bool(self.faults)

    @property
    def coordinator(self) -> int | None:
        """The lowest candidate not known lost; None when all are."""
        return next((c for c in sorted(self.candidates) if c not in self.lost), None)

    def take(self) -> list[Action]:
        """Return the actions gathered since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def fault(self, fault: Fault, now: float) -> None:
        """Note a fault that this rank saw itself and tell the others."""
        self._note(fault, now)
        self._do(Tell(None, "fault", fault))
        self._advance(now)

    def on_fault(self, sender: int, fault: Fault, now: float) -> None:
        """Note a fault that `sender` saw; candidates pass it on to all."""
        if (fault.kind, fault.ranks) in {(f.kind, f.ranks) for f in self.faults}:
            return
        if self.rank in fault.ranks and fault.kind in ("death", "hang"):
            self._leave(EXIT_LOST, f"rank {sender} takes this rank for lost ({fault.detail})")
            return
        self._note(fault, now)
        if self.rank in self.candidates:
            self._do(Tell(None, "fault", fault))
        self._advance(now)

    def on_report(self, report: Report, now: float) -> None:
        """Keep a survivor's report (also one that came because the sender takes this rank for coordinator)."""
        self.reports[report.rank] = report
        self._lose(set(report.lost) - {self.rank})
        self._advance(now)

    def settled(self, report: Report, now: float, wall: float) -> None:
        """Take this rank's own report once its training thread rests."""
        self._mine = replace(report, lost=tuple(sorted(self.lost)))
        self.reports[self.rank] = self._mine
        self.marks.setdefault("settled", wall)
        self._advance(now)

    def on_plan(self, plan: SavePlan, now: float) -> None:
        """Obey a plan newer than the one at hand."""
        if plan.epoch <= self._epoch or plan.coordinator in self.lost:
            return
        self._epoch, self._plan, self._decision = plan.epoch, plan, None
        self._deadline = now + self.save
        if any(self.rank in ranks for ranks in plan.savers.values()):
            self._do(Write(plan))

    def saved(self, written: Written, now: float, wall: float, described: Described | None = None) -> None:
        """Take the end of this rank's own write; `described` is for a coordinator that holds another minibatch."""
        plan = self._plan
        if plan is None or written.epoch != plan.epoch:
            return
        if plan.coordinator == self.rank:
            self.on_written(written, now, wall)
        else:
            if described is not None:
                self._do(Tell(plan.coordinator, "described", described))
            self._do(Tell(plan.coordinator, "written", written))

    def failed(self, epoch: int, reason: str, now: float) -> None:
        """Take the failure of this rank's own write."""
        plan = self._plan
        if plan is None or epoch != plan.epoch:
            return
        if plan.coordinator == self.rank:
            self.on_failed(self.rank, epoch, reason, now)
        else:
            self._do(Tell(plan.coordinator, "failed", {"epoch": epoch, "reason": reason}))

    def on_described(self, described: Described) -> None:
        """Coordinator: keep what the savers' state consists of; it comes before the file that is counted."""
        if self._plan is not None and described.epoch == self._plan.epoch:
            self._described = described

    def on_written(self, written: Written, now: float, wall: float) -> None:
        """Coordinator: count a saver's file; when all are there, commit (a minority waits first)."""
        plan = self._plan
        if plan is None or plan.coordinator != self.rank or written.epoch != plan.epoch or self._committing:
            return
        self._written[written.rank] = written
        if self._savers() <= set(self._written):
            self.marks["saved"] = wall
            self._claim_at = now + (0.0 if self._majority() else MINORITY_WAIT)
            self._deadline = now + self.save
            self.tick(now)

    def on_failed(self, rank: int, epoch: int, reason: str, now: float) -> None:
        """Coordinator: plan again without a saver whose write failed."""
        if self._plan is None or self._plan.coordinator != self.rank or epoch != self._plan.epoch:
            return
        self._unfit[rank] = reason
        self._plan = None
        self._advance(now)

    def committed(self, directory: str) -> None:
        """Coordinator: the checkpoint is durable."""
        saved = self._decision.minibatch if self._decision is not None else -1
        self._do(Conclude(True, directory, alone=True, minibatch=saved))
        self._do(Tell(None, "committed", {"directory": directory}))
        self._leave(EXIT_COMMITTED, directory, told=True)

    def commit_failed(self, reason: str, claimed: bool) -> None:
        """Coordinator: the commit did not happen; `claimed` when another side of a cut network was first."""
        if claimed:
            self._do(Conclude(True, reason, alone=self._majority()))
            self._do(Tell(None, "committed", {"directory": ""}))
            self._leave(EXIT_COMMITTED, reason, told=True)
        else:
            self._abort(reason)

    def on_committed(self, directory: str) -> None:
        """Leave: the state of the job is safe."""
        self._leave(EXIT_COMMITTED, directory)

    def on_abort(self, reason: str) -> None:
        """Leave: nothing can be saved."""
        self._leave(EXIT_LOST, reason)

    def on_gone(self, fault: Fault, now: float) -> None:
        """Note the death of a linked rank."""
        if not set(fault.ranks) <= self.lost:
            self.fault(fault, now)

    def tick(self, now: float) -> None:
        """Act on deadlines."""
        if self._claim_at is not None and now >= self._claim_at and self._plan and self._decision:
            self._claim_at, self._committing = None, True
            fault = detect.merge(self.faults, self.reports.values(), self.lost, self.unreachable)
            written = tuple(self._written[r] for r in sorted(self._written))
            described = None if self.rank in self._savers() else self._described
            self._do(Commit(self._plan, written, self._decision, fault, described))
        if self._deadline is not None and now >= self._deadline and not self.left:
            self._deadline = None
            self._overdue(now)

    def wait_until(self) -> float | None:
        """Return the next monotonic time at which `tick` has something to do."""
        times = [t for t in (self._deadline, self._claim_at) if t is not None]
        return min(times) if times else None

    def _note(self, fault: Fault, now: float) -> None:
        if not self.active:
            self._do(Settle())
            self._deadline = now + self.settle + REPORT_MARGIN
            self.marks["detected"] = fault.when
        self.faults.append(fault)
        self.unreachable |= set(fault.unreachable)
        if fault.kind == "death":
            self._lose(set(fault.ranks))

    def _lose(self, ranks: Collection[int]) -> None:
        new = set(ranks) - self.lost
        self.lost |= new
        if self._plan is not None and self._plan.coordinator == self.rank and not self._committing:
            if new & (self._savers() - set(self._written)):
                self._plan = None  # a saver died before its file was whole: plan again
        elif self._plan is not None and self._plan.coordinator in new:
            self._plan = None

    def _advance(self, now: float) -> None:
        """Report to the coordinator, or decide when this rank is it."""
        if self._mine is None or self._plan is not None or self._committing or self.left:
            return
        coordinator = self.coordinator
        if coordinator is None:
            self._leave(EXIT_LOST, "no coordinator candidate is left")
        elif coordinator != self.rank:
            if self._reported_to != coordinator:
                self._reported_to = coordinator
                self._do(Tell(coordinator, "report", replace(self._mine, lost=tuple(sorted(self.lost)))))
                self._deadline = now + self.settle + 2 * REPORT_MARGIN
        elif set(self.reports) | self.lost >= set(range(self.world)):
            self._decide(now)

    def _decide(self, now: float) -> None:
        alive = [r for r in self.reports.values() if r.rank not in self.lost]
        try:
            decision = agree.decide(alive, world=self.world, unfit=self._unfit)
        except NotCoveredError as error:
            self._announce("training")
            failures = "; ".join(f"rank {r}: {why}" for r, why in sorted(self._unfit.items()))
            self._abort(f"no survivor could write the state: {failures}" if failures else str(error))
            return
        self._announce("training" if decision.minibatch > self.base else "starting")
        if decision.minibatch <= self.base:
            self._abort(f"no update was done since the start from minibatch {self.base}; there is nothing new")
            return
        self._epoch = max(self._epoch, sorted(self.candidates).index(self.rank) * EPOCHS) + 1
        where = self.directory.format(minibatch=decision.minibatch, epoch=self._epoch, coordinator=self.rank)
        self._decision, self._written, self._described = decision, {}, None
        self._plan = SavePlan(self._epoch, self.rank, decision.minibatch, decision.savers, where)
        self._deadline = now + self.save
        self._claim_at = None
        self._do(Tell(None, "plan", self._plan))
        if self.rank in self._savers():
            self._do(Write(self._plan))

    def _announce(self, phase: str) -> None:
        if not self._announced:
            self._announced = True
            fault = detect.merge(self.faults, self.reports.values(), self.lost, self.unreachable)
            self._do(Announce(fault, phase))

    def _overdue(self, now: float) -> None:
        coordinator = self.coordinator
        if self._mine is None and coordinator != self.rank:
            self._deadline = now + REPORT_MARGIN  # the gate has its own deadline; its report will come
        elif coordinator == self.rank and self._plan is None:
            silent = set(range(self.world)) - set(self.reports) - self.lost
            if silent:
                self._silent(silent, now)
            else:
                self._deadline = now + REPORT_MARGIN
        elif coordinator == self.rank:
            missing = self._savers() - set(self._written)
            self._silent(missing, now) if missing else self._abort("the commit did not end in time")
        elif coordinator is not None:
            self._plan = None
            self._silent({coordinator}, now)

    def _silent(self, ranks: set[int], now: float) -> None:
        """Count ranks as lost that answer nothing; their processes may still be there."""
        minibatch = self._mine.minibatch if self._mine else -1
        detail = f"no answer from rank(s) {', '.join(map(str, sorted(ranks)))}"
        fault = Fault("hang", tuple(sorted(ranks)), (), minibatch, detail, self.faults[0].when)
        self._lose(ranks - {self.rank})
        self._deadline = now + self.settle + 2 * REPORT_MARGIN
        self.fault(fault, now)

    def _savers(self) -> set[int]:
        return {r for ranks in self._plan.savers.values() for r in ranks} if self._plan else set()

    def _majority(self) -> bool:
        """Whether this side holds more than half of the world, or half of it with the lowest rank."""
        alive = set(range(self.world)) - self.lost
        return 2 * len(alive) > self.world or (2 * len(alive) == self.world and 0 in alive)

    def _abort(self, reason: str) -> None:
        self._do(Conclude(False, reason, alone=self._majority()))
        self._do(Tell(None, "abort", {"reason": reason}))
        self._leave(EXIT_LOST, reason, told=True)

    def _leave(self, code: int, reason: str, *, told: bool = False) -> None:
        if not self.left:
            self.left = True
            self._do(Leave(code, reason, told))

    def _do(self, action: Action) -> None:
        self._actions.append(action)
