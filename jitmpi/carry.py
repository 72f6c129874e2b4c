"""Carry out what the round decides: tell, write, commit, announce, leave.

Rule: the agent thread never writes a file; `Write` and `Commit` run in threads of their own and hold nobody up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import NoReturn

from jitmpi import commit, control, leave, messages, save
from jitmpi import round as rounds
from jitmpi.config import Settings
from jitmpi.control import ControlPlane
from jitmpi.detect import merge
from jitmpi.errors import ClaimedError, JitError, SaveError
from jitmpi.events import Described, Fault, Member, SavePlan, Written
from jitmpi.hands import Hands
from jitmpi.messages import Kind
from jitmpi.settle import Gate
from jitmpi.vault import Vault

COORDINATOR_WAIT = 10.0  # seconds for the coordinator to see to the job before the others leave
FLUSH = 2.0  # seconds for last frames to leave before the process does


def hear(state: rounds.Round, rank: int, kind: Kind, payload: bytes) -> None:
    """Hand what another rank told to the round: the other end of `Tell`.

    Raises:
        WireError, KeyError, TypeError, ValueError: it is malformed.
    """
    now = time.monotonic()
    match kind:
        case Kind.REPORT:
            state.on_report(messages.decode_report(payload), now)
        case Kind.PLAN:
            state.on_plan(messages.decode_plan(payload), now)
        case Kind.WRITTEN:
            state.on_written(messages.decode_written(payload), now, time.time())
        case Kind.DESCRIBED:
            state.on_described(messages.decode_described(payload))
        case Kind.FAILED:
            values = messages.decode_dict(payload)
            state.on_failed(rank, int(values["epoch"]), str(values["reason"]), now)
        case Kind.COMMITTED:
            state.on_committed(str(messages.decode_dict(payload)["directory"]))
        case Kind.ABORT:
            state.on_abort(str(messages.decode_dict(payload)["reason"]))


class Carrier:
    """The hands of one rank's round.

    Args:
        versions: of what the state was computed with, for the manifest.
    """

    def __init__(
        self,
        settings: Settings,
        members: list[Member],
        plane: ControlPlane,
        vault: Vault,
        gate: Gate,
        versions: dict[str, str],
    ) -> None:
        self.settings, self.members, self.versions = settings, members, versions
        self._plane, self._vault, self._gate = plane, vault, gate
        self._hands = Hands()
        self._brought: list[Callable[[], None]] = []
        self._epoch = 0  # of the newest plan; the write of an older one gives up
        self._writing = threading.Lock()  # two writes at once would read through the same pinned buffers

    def carry(self, action: rounds.Action, state: rounds.Round) -> None:
        """Carry out one action; results of writes and commits come back through `bring_back`."""
        match action:
            case rounds.Tell():
                kind, payload = Kind[action.kind.upper()], messages.encode(action.kind, action.value)
                if action.rank is None:
                    self._plane.broadcast(kind, payload)
                else:
                    self._plane.send(action.rank, kind, payload)
            case rounds.Settle():
                self._gate.close()
            case rounds.Announce():
                state.marks.setdefault("agreed", time.time())
                self.announce(action.fault, action.phase)
            case rounds.Write():
                self._epoch = action.plan.epoch
                self._hands.do(partial(self._write, action, state))
            case rounds.Commit():
                self._hands.do(partial(self._commit, action, state))
            case rounds.Conclude():
                leave.conclude(self.settings, action, fault=_cause(state), members=self.members)
            case rounds.Leave():
                self._leave(action, state)

    def lost_at_start(self, fault: Fault, state: rounds.Round) -> NoReturn:
        """Leave: before training begins there is nothing to save, and MPI may never return. The coordinator first."""
        self._plane.broadcast(Kind.FAULT, messages.encode_fault(fault))
        self._plane.flush(time.monotonic() + FLUSH)
        state.lost.update(fault.ranks)
        if state.coordinator == self.settings.rank:
            known = self.announce(replace(fault, minibatch=-1), "starting", leave.REPLY_DEADLINE)
            if self.settings.launcher and not known:
                leave.take_over(self.settings, [self.members[r].node for r in fault.unreachable])
        else:
            deadline = time.monotonic() + COORDINATOR_WAIT
            gone: list[control.Event] = []
            while not gone and (left := deadline - time.monotonic()) > 0:
                gone = [event for event in self._plane.poll(left) if isinstance(event, control.Gone)]
        own = f"\n{self._gate.error}" if self._gate.error else ""  # the script's traceback must not be lost
        leave.die(self.settings, f"{fault.detail} before training began; earlier checkpoints stay as they are{own}")

    def bring_back(self) -> None:
        """Hand the results of the threads to the round; on the agent thread."""
        while self._brought:
            self._brought.pop(0)()

    def announce(self, fault: Fault, phase: str, reply: float = 0.0) -> bool:
        """Tell jit-srun what happened; False when it does not answer."""
        event = {"event": "fault", "fault": asdict(fault), "nodes": [m.node for m in self.members], "phase": phase}
        return leave.notify(self.settings, event, reply)

    def _write(self, action: rounds.Write, state: rounds.Round) -> None:
        plan = action.plan
        savers = [rank for ranks in plan.savers.values() for rank in ranks]
        first = plan.coordinator not in savers and self.settings.rank == savers[0]
        try:
            described = Described(plan.epoch, tuple(self._vault.tensors()), self._vault.scalars()) if first else None
            written = self._save(plan, time.monotonic() + self.settings.options.save)
        except Exception as error:
            reason = _reason(error)
            self._bring(lambda: state.failed(plan.epoch, reason, time.monotonic()))
        else:
            self._bring(lambda: state.saved(written, time.monotonic(), time.time(), described))

    def _save(self, plan: SavePlan, deadline: float) -> Written:
        def read(index: int, start: int, stop: int) -> memoryview:
            if plan.epoch != self._epoch:
                raise SaveError("a newer plan replaces it")
            return self._vault.read(index, start, stop)

        if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise SaveError("the write of an older plan did not end")
        try:
            rank, tensors = self.settings.rank, self._vault.tensors()
            return save.save(plan, rank=rank, tensors=tensors, read=read, deadline=deadline)
        finally:
            self._writing.release()

    def _commit(self, action: rounds.Commit, state: rounds.Round) -> None:
        decision, described = action.decision, action.described
        try:
            manifest = commit.commit(
                self.settings.job_directory,
                action.plan,
                written=action.written,
                tensors=described.tensors if described is not None else self._vault.tensors(),
                contexts=decision.contexts.values(),
                scalars=described.scalars if described is not None else self._vault.scalars(),
                fault=action.fault,
                world=[member.node for member in self.members],
                attempt=self.settings.attempt,
                job_id=self.settings.job_id,
                exact=decision.exact,
                notes=decision.notes,
                times=dict(state.marks),
                versions=self.versions,
                keep=self.settings.options.keep,
            )
        except Exception as error:
            claimed, reason = isinstance(error, ClaimedError), _reason(error)
            self._bring(lambda: state.commit_failed(reason, claimed))
        else:
            for note in decision.notes:
                leave.say(self.settings, f"the resumed run may differ in its bits: {note}")
            self._bring(lambda: state.committed(manifest.directory))

    def _bring(self, apply: Callable[[], None]) -> None:
        self._brought.append(apply)
        self._plane.wake()

    def _leave(self, action: rounds.Leave, state: rounds.Round) -> None:
        self._plane.flush(time.monotonic() + FLUSH)
        fault = _cause(state)
        own = self._gate.error if fault.kind == "exception" or not action.saved else ""
        leave.leave(self.settings, action, fault=fault, own_error=own)


def _reason(error: Exception) -> str:
    """Our own errors say all; others need their type."""
    return str(error) if isinstance(error, JitError) else f"{type(error).__name__}: {error}"


def _cause(state: rounds.Round) -> Fault:
    return merge(state.faults, state.reports.values(), state.lost, state.unreachable)
