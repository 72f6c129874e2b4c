"""Bring the training thread to rest after a fault and say what its tensors are: Fault -> Report.

Rule 1: the training thread is stopped only where its tensors are some S(m): at a boundary or before an update.
Rule 2: the agent closes the gate, then looks at the place; the training thread writes its place, then looks at the
        gate. So one of the two always sees the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from jitmpi.events import Context

TAIL_WAIT = (
    10.0  # seconds a survivor may take from the end of its update to the next boundary: logging, a scheduler's step
)


class Noted(Protocol):
    """A replay context that is put together when somebody asks for it."""

    def context(self) -> Context:
        """Return it."""


class Place(NamedTuple):
    """Where the training thread is; published as a whole, so that the agent never sees half of a change.

    Attributes:
        phase: "starting", "between" (S(m) until the update), "updating", "tail" (after the update of m), "idle" (S(m),
            outside the loop).
        context: replay context of this minibatch as captured at its boundary; None before the first.
        forecast: replay context of the next minibatch as forecast at the end of the forward pass; None before that.
    """

    phase: str
    minibatch: int
    context: Noted | None = None
    forecast: Noted | None = None


place = partial(
    tuple.__new__, Place
)  # what Place(...) does without the call of a Python function: 2 us in a cold cache


@dataclass(frozen=True)
class Rest:
    """The place at which the training thread came to rest, as far as the tensors go.

    Attributes:
        minibatch: the m for which the tensors are S(m).
        intact: False while the tensors are nobody's S(m).
        cut: the tail of the minibatch before did not run to its end.
    """

    minibatch: int
    intact: bool
    cut: bool
    place: Place


class Gate:
    """The door between the training thread, which passes it, and the agent thread, which closes it.

    Args:
        updates: that a minibatch is thought to have before the first one is done: one for each optimizer.
    """

    def __init__(self, wake: Callable[[], None], updates: int = 1) -> None:
        self.place = Place("starting", -1)
        self.closed = False
        self.error = ""  # the text of the exception that ended the training thread
        self.previous: Noted | None = None  # of the minibatch before: a dead rank's forecast is compared with it
        self._updates = 0  # of this minibatch
        self._expected, self._usual = updates, 0  # the latter: most that a minibatch had so far, 0 while unknown
        self._wake = wake
        self._never = threading.Event()

    def at(self, place: Place) -> None:
        """Training thread: a boundary is passed; does not return once the gate is closed."""
        if self._updates > self._usual:
            self._usual = self._updates
        self._updates = 0
        before = self.place
        if place.minibatch != before.minibatch:
            self.previous = before.context
        elif before.context is not None:  # S(m) is at the first of its boundaries, before the lines of an epoch's end
            place = Place(place.phase, place.minibatch, before.context)
        self.place = place
        if self.closed:
            self.park()

    def foresee(self, forecast: Noted) -> None:
        """Training thread: the forward pass is done."""
        phase, minibatch, context, _ = self.place
        self.place = place((phase, minibatch, context, forecast))

    def begin_update(self) -> None:
        """Training thread: about to change the tensors; does not return once the gate is closed."""
        before = self.place
        _, minibatch, context, forecast = before
        self.place = place(("updating", minibatch, context, forecast))
        if self.closed and before.phase != "tail":  # between two updates of one minibatch there is no rest
            self.place = before
            self.park()

    def end_update(self) -> None:
        """Training thread: the tensors are S(m+1)."""
        self._updates += 1
        _, minibatch, context, forecast = self.place
        self.place = place(("tail", minibatch, context, forecast))
        if self.closed:
            self._wake()

    def raised(self, error: str) -> None:
        """Training thread: it ends with an exception; does not return."""
        self.error = error
        self.park()

    def park(self) -> None:
        """Training thread: wait for the end of the process."""
        self._wake()
        while True:
            self._never.wait(3600)

    def close(self) -> None:
        """Agent: let the training thread pass no further place of rest."""
        self.closed = True

    def rest(self, now: float, closed_at: float, patience: float) -> Rest | None:
        """Agent: return where the tensors are at rest, None while that still has to be waited for.

        Args:
            patience: seconds that a running update may take.
        """
        place = self.place
        waited = now - closed_at
        if place.phase in ("between", "idle"):
            return Rest(place.minibatch, True, False, place)
        if place.phase == "updating":
            if self.error or waited >= patience:
                return Rest(place.minibatch, False, False, place)
            return None
        if place.phase == "tail":
            if self.error or waited >= self._tail_wait(patience):
                return Rest(place.minibatch + 1, self._whole(), True, place)
            return None
        return Rest(place.minibatch, False, False, place)

    def wait_until(self, closed_at: float, patience: float) -> float:
        """Agent: return when `rest` must be asked again at the latest, monotonic seconds."""
        return closed_at + (self._tail_wait(patience) if self.place.phase == "tail" else patience)

    def _whole(self) -> bool:
        """Whether all updates of the minibatch are done; with several optimizers there is no state before that."""
        return self._updates >= (self._usual or self._expected)

    def _tail_wait(self, patience: float) -> float:
        return min(TAIL_WAIT, patience) if self._whole() else patience
