"""Tell a hang from a wait that another rank explains: progress and place in, a question to the peers or a verdict out.

Rule 1: training is synchronous, so a rank that does something alone (it evaluates, or writes a checkpoint of its own)
    makes all others wait in a collective. Before a hang is called the peers are asked, and one that is outside its
    minibatch explains the silence. A rank that is stopped answers nothing.
Rule 2: no I/O and no clock here; the agent sends the question and hands in the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from jitmpi.detect import Progress
from jitmpi.settle import Gate

WATCHED = ("between", "updating")  # phases inside a minibatch, where silence can be a hang
ANSWER = 5.0  # seconds for an answer: an agent answers in milliseconds, unless Python is kept busy by one long call
DESERTED = 60.0  # seconds without a boundary after a peer has left in good order: no collective with it will ever end


class Watch:
    """Watches one training thread.

    Args:
        training: whether the model is in training mode.
    """

    def __init__(self, progress: Progress, gate: Gate, training: Callable[[], bool]) -> None:
        self._progress, self._gate, self._training = progress, gate, training
        self._asked: tuple[float, float | None] | None = None  # when the peers were asked, and the last boundary then
        self._deserted: float | None = None

    def busy(self) -> bool:
        """Whether this rank is outside its minibatch, which explains that others wait for it."""
        return self._gate.place.phase not in WATCHED or not self._training()

    def explained(self, now: float) -> None:
        """A peer is busy: begin to count anew."""
        self._asked = None
        self._progress.postpone(now)

    def deserted(self, now: float) -> None:
        """A peer has ended its script while this one has not."""
        self._deserted = now

    def look(self, now: float) -> str:
        """Return "ask" when the peers are to be asked, "hang" when they have been and none was busy, else ""."""
        if self.busy():
            if self._gate.place.phase in WATCHED:
                self._progress.postpone(now)  # an evaluation inside the minibatch
            self._asked = None
        elif self._asked is not None and self._asked[1] != self._progress.last:
            self._asked = None  # it went on
        due = self.due()
        if due is None or now < due:
            return ""
        if self._asked is None:
            self._asked = (now, self._progress.last)
            return "ask"
        return "hang"

    def due(self) -> float | None:
        """Return when (monotonic seconds) `look` has something to say; None while that cannot be known."""
        if self._gate.place.phase not in WATCHED:
            return None
        if self._asked is not None:
            return self._asked[0] + ANSWER
        times = [self._progress.overdue_at()]
        if self._deserted is not None:
            times.append(max(self._deserted, self._progress.last or 0.0) + DESERTED)
        return min((at for at in times if at is not None), default=None)

    def wait_until(self, now: float) -> float | None:
        """Return when to look at the latest: the training thread wakes nobody when a minibatch begins."""
        due = self.due()
        times = [now + self._progress.floor] if self._progress.factor or self._deserted is not None else []
        return min(times if due is None else [due, *times], default=None)
