"""The agent of one rank: a thread that watches the others, and the wiring of the fault path.

Rule 1: the thread blocks in `ControlPlane.poll` and nowhere else for longer than a notice takes.
Rule 2: no MPI call, no collective, no wait without a deadline. One place catches: `_main`.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable

from jitmpi import control, leave, messages, topology
from jitmpi.carry import Carrier, hear
from jitmpi.config import Settings
from jitmpi.detect import Progress
from jitmpi.errors import WireError
from jitmpi.events import Context, Fault, Member, Report
from jitmpi.messages import Kind
from jitmpi.round import Round
from jitmpi.settle import Gate
from jitmpi.sheet import Sheet
from jitmpi.vault import Vault
from jitmpi.wards import Wards
from jitmpi.watch import Watch

DEVICE_LOOK = 0.005  # seconds between looks at a device that still works on the last update
IDLE_POLL = 3600.0  # seconds; with nothing to wait for the thread sleeps until a peer or the training thread wakes it


class Agent:
    """Watches the other ranks, and saves the state when something fails.

    Args:
        staging: template of the folder that a plan is written into.
        versions: of what the state was computed with, for the manifest.
    """

    def __init__(
        self,
        settings: Settings,
        members: list[Member],
        plane: control.ControlPlane,
        vault: Vault,
        *,
        staging: str,
        versions: dict[str, str],
    ) -> None:
        self.settings, self.members = settings, members
        self._plane, self._vault = plane, vault
        self.gate = Gate(plane.wake, vault.updates)
        options = settings.options
        self.progress = Progress(options.hang, options.hang_floor)
        self._watch = Watch(self.progress, self.gate, vault.training)
        self._carrier = Carrier(settings, members, plane, vault, self.gate, versions)
        self._wards = Wards(topology.wards(members, settings.rank), plane.contexts)
        self._buddies = topology.buddies(members, settings.rank)
        candidates = topology.candidates(members)
        self._round = Round(settings.rank, settings.size, candidates, options.settle, options.save, staging)
        self.on_training: Callable[[], None] = lambda: None  # called in the training thread after the first update
        self.on_trouble: Callable[[], None] = lambda: None  # called by the agent when a fault is known
        self._signals: set[int] = set()
        self._goodbyes: set[int] = set()
        self._all_done = threading.Event()
        self._finished = False
        self._first_update: int | None = None
        self._closed_at: float | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._main, name="jit-ckpt", daemon=True)

    def start(self, signals: set[int]) -> None:
        """Begin to watch; `signals` ask for a planned end."""
        self._signals = signals
        self._thread.start()

    def hand_over_start(self, start: Context) -> None:
        """Training thread: give the buddies what a feed began with."""
        for buddy in self._buddies:
            self._plane.send(buddy, Kind.START, messages.encode_context(start))

    def hand_over(self, sheet: Sheet) -> bool:
        """Training thread: give the buddies this rank's replay context, never waiting; True when all have it."""
        return not self._buddies or self._plane.offer(self._buddies, Kind.CONTEXT, sheet.parts)

    def began(self, minibatch: int) -> None:
        """Training thread: every rank has S(minibatch); until the first update there is nothing new to save."""
        self._round.base = minibatch

    def first_update(self) -> None:
        """Training thread: the first update after the start is done."""
        self._first_update = self.gate.place.minibatch
        self.on_training()
        self._plane.wake()

    def finish(self, patience: float | None) -> bool:
        """Training thread: an orderly end; return whether all linked ranks came to theirs within `patience` seconds."""
        self._finished = True
        self._plane.broadcast(Kind.GOODBYE, messages.encode_dict({}))
        self._plane.wake()
        return self._all_done.wait(patience)

    def tell(self, event: dict[str, object]) -> bool:
        """Send a notice to jit-srun; False when it cannot be reached."""
        return leave.notify(self.settings, event)

    def _main(self) -> None:
        try:
            while True:
                for event in self._plane.poll(self._timeout()):
                    self._on_event(event)
                self._step()
        except BaseException:
            text = traceback.format_exc()
            leave.die(self.settings, f"the agent failed and saved nothing\n{text}{self.gate.error}")

    def _timeout(self) -> float:
        times = [self._round.wait_until()]
        if self._closed_at is None:
            times.append(self._watch.wait_until(time.monotonic()))
        elif not self._reported:
            times.append(self.gate.wait_until(self._closed_at, self.settings.options.settle))
            if not self._vault.still():
                times.append(time.monotonic() + DEVICE_LOOK)
        ahead = [at for at in times if at is not None]
        return max(0.0, min(ahead) - time.monotonic()) if ahead else IDLE_POLL

    def _on_event(self, event: control.Event) -> None:
        match event:
            case control.Gone():
                self._on_gone(event)
            case control.Received():
                try:
                    self._on_frame(event.rank, event.kind, event.payload)
                except (WireError, KeyError, TypeError, ValueError) as error:
                    leave.say(self.settings, f"a {event.kind.name} of rank {event.rank} was dropped: {error}")
            case control.Signalled() if event.signum in self._signals and not self._round.active:
                self._planned(event.signum)
            case control.Signalled(signal.SIGCONT):
                self._watch.explained(time.monotonic())  # the job was suspended: that was no hang
            case _:
                pass

    def _on_gone(self, event: control.Gone) -> None:
        if event.said_goodbye and not self._round.active:
            self._round.lost.add(event.rank)
            self._watch.deserted(time.monotonic())
            return
        self._end_if_done()
        node = self.members[event.rank].node
        how = "does not answer any more" if event.unreachable else "closed its connection"
        away = (event.rank,) if event.unreachable else ()
        detail = f"rank {event.rank} on {node} {how}"
        fault = Fault("death", (event.rank,), away, self.gate.place.minibatch, detail, time.time())
        if self.gate.place.phase == "starting":
            self._carrier.lost_at_start(fault, self._round)
        self._round.on_gone(fault, time.monotonic())

    def _on_frame(self, rank: int, kind: Kind, payload: bytes) -> None:
        now = time.monotonic()
        match kind:
            case Kind.START:
                self._wards.began(rank, payload)
            case Kind.FAULT:
                self._on_fault(rank, messages.decode_fault(payload), now)
            case Kind.GOODBYE:
                self._goodbyes.add(rank)
            case Kind.ASK if self._watch.busy():
                self._plane.send(rank, Kind.BUSY, messages.encode_dict({}))
            case Kind.BUSY:
                self._watch.explained(now)
            case _:
                hear(self._round, rank, kind, payload)

    def _end_if_done(self) -> None:
        """A rank at its end still holds the final state, and others may need it; one that left its loop does not."""
        if self._finished and self.gate.place.phase != "idle":
            leave.end(0)  # the collective end of MPI would never come

    def _on_fault(self, rank: int, fault: Fault, now: float) -> None:
        self._end_if_done()
        if self.gate.place.phase == "starting":
            self._carrier.lost_at_start(fault, self._round)
        self._round.on_fault(rank, fault, now)

    def _step(self) -> None:
        """Look at the training thread and at the clock, then act."""
        if self._first_update is not None and self.settings.rank == 0:
            minibatch, self._first_update = self._first_update, None
            self.tell({"event": "update", "minibatch": minibatch})
        if not self._round.active:
            if self._finished and self._plane.peers <= self._goodbyes | self._round.lost:
                self._all_done.set()
            self._look(time.monotonic())
        self._carry()
        if self._closed_at is not None and not self._reported:
            self._settle(time.monotonic())
        self._carrier.bring_back()
        self._round.tick(time.monotonic())
        self._carry()

    def _carry(self) -> None:
        if self._round.active and self._closed_at is None:
            self._closed_at = time.monotonic()
            self.on_trouble()
        for action in self._round.take():
            self._carrier.carry(action, self._round)

    def _look(self, now: float) -> None:
        rank = self.settings.rank
        if self.gate.error:
            last = self.gate.error.strip().splitlines()[-1]
            self._fault("exception", (rank,), f"rank {rank} raised {last}")
            return
        match self._watch.look(now):
            case "ask":
                self._plane.broadcast(Kind.ASK, messages.encode_dict({}))
            case "hang":
                waited = now - (self.progress.last or now)
                self._fault("hang", (), f"rank {rank} passed no boundary for {waited:.0f} s")

    def _planned(self, signum: int) -> None:
        if self.gate.place.phase == "starting":
            leave.die(self.settings, f"signal {signum} came before training began")
        self._fault("signal", (self.settings.rank,), f"signal {signum} asks for a planned end")

    def _fault(self, kind: str, ranks: tuple[int, ...], detail: str) -> None:
        self._round.fault(Fault(kind, ranks, (), self.gate.place.minibatch, detail, time.time()), time.monotonic())

    def _settle(self, now: float) -> None:
        rest = self.gate.rest(now, self._closed_at or now, self.settings.options.settle)
        if rest is None or not (self._vault.still() or self._patience_is_over(now)):
            return
        for event in self._plane.gather():  # a ward's newest feed may lie there
            self._on_event(event)
        self._reported = True
        before = (self.gate.previous.context(),) if self.gate.previous is not None else ()
        own, readable = self._vault.contexts(rest)
        contexts = own + before + self._wards.contexts(rest.minibatch)
        note, error, phase = self._vault.note(rest), self.gate.error, rest.place.phase
        intact = rest.intact and readable and self._vault.still()
        report = Report(self.settings.rank, rest.minibatch, intact, 0, (), contexts, error, phase, note)
        self._round.settled(report, now, time.time())

    def _patience_is_over(self, now: float) -> bool:
        return now >= (self._closed_at or now) + self.settings.options.settle
