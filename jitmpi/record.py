"""The hot path: note where the training thread is and hand its replay context over.

Rule 1: no tensor of the model is copied, no file touched, no collective added; the work does not grow with the model.
Rule 2: capture first, then pass the gate, so that a rank stopped at a boundary has that boundary's context.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jitmpi import codec, leave, random_state
from jitmpi.events import Context
from jitmpi.settle import Place

if TYPE_CHECKING:
    from jitmpi.agent import Agent
    from jitmpi.buffers import BufferShadow
    from jitmpi.device import StreamClock
    from jitmpi.position import Position

LARGE = 64 << 10  # bytes of run.state: to write them takes a few milliseconds, twice a minibatch
COSTS = "it is written and sent with every minibatch: keep what grows, such as losses, in a file of your own"


class Recorder:
    """Captures the contexts of one rank and publishes them to the gate and to the buddies."""

    def __init__(self, agent: Agent, shadow: BufferShadow, clock: StreamClock) -> None:
        self._agent, self._gate, self._shadow, self._clock = agent, agent.gate, shadow, clock
        self._rank = agent.settings.rank
        self._start: dict[str, bytes] = {}  # what the current feed began with; part of every context of it
        self._minibatch = -1
        self._first = True
        self._warned = False
        self._foreseen: tuple[int, dict[str, bytes]] | None = None  # the forecast that every buddy has

    def opened(self, position: Position, start: dict[str, bytes]) -> None:
        """Note a new feed and tell the buddies what it began with, once."""
        self._start = start
        self._agent.hand_over_start(Context(self._rank, -1, True, {"feed": position.feed_key, **start}))

    def begin_update(self) -> None:
        """Note that the tensors are about to change; does not return once something has failed."""
        self._clock.fence()
        self._gate.begin_update()

    def end_update(self) -> None:
        """Note that the tensors are those of the next minibatch."""
        self._clock.closed()
        self._gate.end_update()
        if self._first:
            self._first = False
            self._agent.first_update()

    def boundary(
        self, minibatch: int, position: Position, user: dict[str, object], own: dict[str, bytes], *, idle: bool = False
    ) -> None:
        """Capture S(minibatch)'s context; returns only while nothing has failed."""
        self._minibatch = minibatch
        self._shadow.capture()
        self._clock.closed()
        context = self._capture(minibatch, True, position, user, own, self._shadow.pieces())
        if idle:
            self._agent.progress.pause()
        else:
            self._agent.progress.passed(time.monotonic())
        self._gate.at(Place("idle" if idle else "between", minibatch, context))

    def pause(self) -> None:
        """Note that the loop rests in the middle of a minibatch, and what follows is none."""
        place = self._gate.place
        self._agent.progress.pause()
        self._gate.at(Place("idle", place.minibatch, place.context))

    def forecast(self, position: Position, user: dict[str, object], own: dict[str, bytes]) -> None:
        """Capture, at the end of a forward pass, what the next minibatch's context will be."""
        minibatch = self._minibatch + 1
        self._gate.foresee(self._capture(minibatch, False, position, user, own, self._shadow.live_pieces()))

    def _capture(
        self,
        minibatch: int,
        exact: bool,
        position: Position,
        user: dict[str, object],
        own: dict[str, bytes],
        buffers: dict[str, bytes],
    ) -> Context:
        """Capture a context, hand it over, and return it with all that this rank itself can save.

        `own`: states of generators that the data set owns.
        """
        pieces = random_state.capture()
        pieces["position"] = position.encode()
        pieces["feed"] = position.feed_key
        pieces.update(own)
        if user:
            pieces["user"] = codec.dumps(user)
            if len(pieces["user"]) > LARGE and not self._warned:
                self._warned = True
                leave.say(self._agent.settings, f"run.state has {len(pieces['user'])} bytes; {COSTS}")
        if buffers and self._shadow.travels:
            pieces.update(buffers)
        # A forecast that came true need not be told again; a state of the user's own is checked against the exact one.
        if not exact or user or self._foreseen != (minibatch, pieces):
            delivered = self._agent.hand_over(Context(self._rank, minibatch, exact, pieces))
            self._foreseen = (minibatch, pieces) if delivered and not exact else None
        return Context(self._rank, minibatch, exact, {**pieces, **buffers, **self._start})
