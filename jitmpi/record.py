"""The hot path: note where the training thread is and hand its replay context over.

Rule 1: no tensor of the model is copied, no file touched, no collective added; the work does not grow with the model.
Rule 2: capture first, then pass the gate, so that a rank stopped at a boundary has that boundary's context.
Rule 3: it runs in caches that the computation has emptied, where each function called costs microseconds and a large
        allocation fifty: few calls, nothing put together that only a fault needs (see `sheet`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jitmpi import codec, leave, messages, random_state
from jitmpi.errors import AttachError
from jitmpi.events import Context
from jitmpi.random_state import Taps
from jitmpi.settle import Place
from jitmpi.sheet import Base, Sheet

if TYPE_CHECKING:
    from jitmpi.agent import Agent
    from jitmpi.buffers import BufferShadow
    from jitmpi.device import StreamClock
    from jitmpi.position import Where

SHEETS = 5  # that are used in turn: two contexts, up to two forecasts and the one that is written
LARGE = 64 << 10  # bytes of run.state: to write them takes a few milliseconds, twice a minibatch
NOTHING: Mapping[str, bytes] = {}
COSTS = "it is written and sent with every minibatch: keep what grows, such as losses, in a file of your own"


STILL_COMPUTED = "it may still be computed where its bytes are copied; keep its .item() or .cpu()"


class Recorder:
    """Captures the contexts of one rank and publishes them to the gate and to the buddies."""

    def __init__(self, agent: Agent, shadow: BufferShadow, clock: StreamClock) -> None:
        self._agent, self._gate, self._shadow, self._clock = agent, agent.gate, shadow, clock
        self._rank = agent.settings.rank
        self._minibatch = -1
        self._first = True
        self._warned = False
        self._foreseen: Sheet | None = None  # the newest forecast, if every buddy has it
        self._taps = Taps()
        self._base = Base(0, {}, self._taps)  # of the current feed; part of every context of it
        self._sheets = self._set_aside()

    def opened(self, start: Mapping[str, bytes]) -> None:
        """Note a new feed and tell the buddies what it began with, once."""
        self._base = Base(self._base.number + 1, start, self._taps)
        self._agent.hand_over_start(Context(self._rank, -1, True, self._base.pieces))

    def begin_update(self) -> None:
        """Note that the tensors are about to change; does not return once something has failed."""
        if self._clock.cuda:
            self._clock.fence()
        self._gate.begin_update()

    def end_update(self) -> None:
        """Note that the tensors are those of the next minibatch."""
        if self._clock.cuda:
            self._clock.closed()
        self._gate.end_update()
        if self._first:
            self._first = False
            self._agent.first_update()

    def boundary(
        self, minibatch: int, where: Where, user: dict[str, object], own: Mapping[str, bytes], *, idle: bool = False
    ) -> None:
        """Capture S(minibatch)'s context; returns only while nothing has failed.

        Args:
            own: states of generators that the data set owns.
        """
        self._minibatch = minibatch
        shadow, foreseen = self._shadow, self._foreseen
        if shadow.watches:
            shadow.capture()
        if self._clock.cuda:
            self._clock.closed()
        if self._taps.stale():
            self._taps = Taps()
            self._base.align(self._taps)
            self._sheets = self._set_aside()
        sheet = self._capture(minibatch, where, user, own, shadow.pieces() if shadow.watches else NOTHING)
        # A forecast that came true need not be told again; a state of the user's own is checked against the exact one.
        if not sheet.confirm(foreseen) or user:
            self._agent.hand_over(sheet)
        self._foreseen = None
        if idle:
            self._agent.progress.pause()
        else:
            self._agent.progress.passed(time.monotonic())
        self._gate.at(Place("idle" if idle else "between", minibatch, sheet))

    def pause(self) -> None:
        """Note that the loop rests in the middle of a minibatch, and what follows is none."""
        place = self._gate.place
        self._agent.progress.pause()
        self._gate.at(Place("idle", place.minibatch, place.context))

    def forecast(self, where: Where, user: dict[str, object], own: Mapping[str, bytes]) -> None:
        """Capture, at the end of a forward pass, what the next minibatch's context will be."""
        shadow = self._shadow
        sheet = self._capture(
            self._minibatch + 1, where, user, own, shadow.live_pieces() if shadow.watches else NOTHING
        )
        self._foreseen = sheet if self._agent.hand_over(sheet) else None
        self._gate.foresee(sheet)

    def _capture(
        self,
        minibatch: int,
        where: Where,
        user: dict[str, object],
        own: Mapping[str, bytes],
        buffers: Mapping[str, bytes],
    ) -> Sheet:
        place = self._gate.place
        held = (place.context, place.forecast, self._gate.previous, self._foreseen)
        for sheet in self._sheets:
            if sheet not in held:
                break
        if self._gate.closed:  # the agent may read any of them
            sheet = Sheet(self._rank, self._taps)
        sheet.kept, more = NOTHING, b""
        if self._taps.asks or own or user or buffers:
            more = self._more(sheet, user, own, buffers)
        sheet.fill(minibatch, where, self._base, more)
        return sheet

    def _more(
        self, sheet: Sheet, user: dict[str, object], own: Mapping[str, bytes], buffers: Mapping[str, bytes]
    ) -> bytes:
        """Encode what not every script has."""
        pieces = self._taps.others()
        pieces.update(own)
        if user:
            if random_state.CUDA and _on_device(user):
                raise AttachError(f"run.state holds a tensor on a GPU: {STILL_COMPUTED}")
            pieces["user"] = text = codec.dumps(user, "run.state")
            if len(text) > LARGE and not self._warned:
                self._warned = True
                leave.say(self._agent.settings, f"run.state has {len(text)} bytes; {COSTS}")
        if self._shadow.travels:
            pieces.update(buffers)
        else:
            sheet.kept = buffers
        return messages.encode_pieces(pieces) if pieces else b""

    def _set_aside(self) -> list[Sheet]:
        return [Sheet(self._rank, self._taps) for _ in range(SHEETS)]


def _on_device(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_on_device, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_on_device, value))
    return bool(getattr(value, "is_cuda", False))
