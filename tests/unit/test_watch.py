"""watch: a hang is called when nobody can explain the silence, and never for a rank that works alone for long."""

from __future__ import annotations

from jitmpi.detect import MEASURED, Progress
from jitmpi.settle import Gate, Place
from jitmpi.watch import ANSWER, DESERTED, Watch

FLOOR = 300.0


class Thread:
    """A training thread that has done some minibatches of a second."""

    def __init__(self) -> None:
        self.progress, self.gate, self.training = Progress(10.0, FLOOR), Gate(lambda: None), True
        self.watch = Watch(self.progress, self.gate, lambda: self.training)
        self.now = 0.0
        for _ in range(MEASURED + 1):
            self.boundary()
            self.now += 1.0

    def boundary(self) -> None:
        self.progress.passed(self.now)
        self.gate.at(Place("between", 1))

    def after(self, seconds: float) -> str:
        self.now += seconds
        return self.watch.look(self.now)


def test_a_hang_is_called_when_the_peers_have_been_asked_in_vain() -> None:
    """First the question, then the verdict; the agent is woken in time for both."""
    thread = Thread()
    assert thread.after(FLOOR - 2.0) == ""
    assert thread.after(2.0) == "ask"
    assert thread.watch.wait_until(thread.now) == thread.now + ANSWER
    assert [thread.after(ANSWER / 2), thread.after(ANSWER / 2)] == ["", "hang"]


def test_a_peer_that_works_alone_explains_the_silence() -> None:
    """Rank 0 evaluates for an hour at the end of an epoch while the others wait in the next all-reduce: no hang."""
    thread, first = Thread(), Thread()
    first.gate.at(Place("idle", 1))
    for _ in range(12):
        assert thread.after(FLOOR) == "ask"
        assert first.watch.busy()
        thread.watch.explained(thread.now)
        assert thread.after(ANSWER) == ""
    first.boundary()
    assert not first.watch.busy()
    assert [thread.after(FLOOR), thread.after(ANSWER)] == ["ask", "hang"]


def test_an_evaluation_inside_the_minibatch_is_no_hang() -> None:
    """The model is in evaluation mode; counting begins when it is back in training."""
    thread = Thread()
    thread.training = False
    assert thread.after(3600.0) == ""
    assert thread.watch.busy()
    thread.training = True
    assert thread.after(FLOOR - 1.0) == ""
    assert thread.after(1.0) == "ask"


def test_a_rank_that_goes_on_while_the_peers_are_asked_does_not_hang() -> None:
    """The next silence begins with a question of its own."""
    thread = Thread()
    assert thread.after(FLOOR) == "ask"
    thread.boundary()
    assert thread.after(ANSWER) == ""
    assert thread.after(FLOOR) == "ask"


def test_a_peer_that_ended_in_the_middle_shortens_the_patience() -> None:
    """With NCCL a collective with a rank that called sys.exit never ends; hang detection may even be off."""
    thread = Thread()
    thread.progress.factor = 0.0
    assert thread.watch.wait_until(thread.now) is None
    thread.watch.deserted(thread.now)
    assert thread.after(DESERTED - 1.0) == ""
    assert [thread.after(1.0), thread.after(ANSWER)] == ["ask", "hang"]


def test_outside_a_minibatch_nothing_is_a_hang() -> None:
    """Evaluation, logging and the script's own checkpoints may take for ever."""
    for phase in ("tail", "idle", "starting"):
        thread = Thread()
        thread.gate.at(Place(phase, 1))
        assert thread.after(1e6) == ""
