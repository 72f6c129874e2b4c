"""settle: the training thread stops only where its tensors are some S(m)."""

from __future__ import annotations

import threading
import time

from jitmpi.events import Context
from jitmpi.settle import TAIL_WAIT, Gate, Place, Rest


class Trainee:
    """A training thread that runs what it is given and says whether it is parked."""

    def __init__(self, work: object) -> None:
        self.thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
        self.thread.start()

    def parked(self) -> bool:
        self.thread.join(0.2)
        return self.thread.is_alive()


def context(minibatch: int) -> Context:
    return Context(0, minibatch, True, {})


def gate() -> Gate:
    return Gate(lambda: None)


def at_rest(door: Gate) -> Rest:
    """What the gate says as soon as a trainee has come to it: a thread may start late."""
    deadline = time.monotonic() + 60
    while (rest := door.rest(1.0, 0.0, 30.0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return rest


def test_between_boundary_and_update_the_tensors_are_at_rest() -> None:
    """A rank that waits in a collective is intact at once."""
    door = gate()
    door.at(Place("between", 7, context(7)))
    door.close()
    rest = door.rest(0.0, 0.0, 30.0)
    assert rest is not None
    assert (rest.minibatch, rest.intact, rest.cut) == (7, True, False)


def test_no_update_begins_behind_a_closed_gate() -> None:
    """The training thread parks before the update and its place stays S(m)."""
    door = gate()
    door.at(Place("between", 7, context(7)))
    door.close()
    trainee = Trainee(door.begin_update)
    assert trainee.parked()
    rest = at_rest(door)
    assert (rest.minibatch, rest.intact) == (7, True)


def test_a_running_update_is_waited_for() -> None:
    """Inside the update nothing is said; after it the thread goes on to the boundary and rests at S(m+1)."""
    door = gate()
    door.at(Place("between", 7, context(7)))
    door.begin_update()
    door.close()
    assert door.rest(1.0, 0.0, 30.0) is None
    door.end_update()
    assert door.rest(1.0, 0.0, 30.0) is None
    trainee = Trainee(lambda: door.at(Place("between", 8, context(8))))
    rest = at_rest(door)
    assert trainee.parked()
    assert (rest.minibatch, rest.intact, rest.cut) == (8, True, False)


def test_an_update_that_raised_or_never_ends_is_not_intact() -> None:
    """Half an update is nobody's state."""
    door = gate()
    door.at(Place("between", 7, context(7)))
    door.begin_update()
    door.close()
    overdue = door.rest(30.0, 0.0, 30.0)
    assert overdue is not None
    assert not overdue.intact
    trainee = Trainee(lambda: door.raised("ValueError"))
    raised = at_rest(door)
    assert trainee.parked()
    assert not raised.intact


def test_a_tail_that_hangs_is_cut_off_after_its_deadline() -> None:
    """A collective after the update (logging) must not hold the save up; the tensors are S(m+1)."""
    door = gate()
    door.at(Place("between", 7, context(7)))
    door.foresee(context(8))
    door.begin_update()
    door.end_update()
    door.close()
    assert door.rest(TAIL_WAIT / 2, 0.0, 30.0) is None
    rest = door.rest(TAIL_WAIT, 0.0, 30.0)
    assert rest is not None
    assert (rest.minibatch, rest.intact, rest.cut) == (8, True, True)
    assert rest.place.forecast == context(8)


def test_between_two_updates_of_one_minibatch_nothing_is_intact() -> None:
    """With two optimizers the state is S(m+1) only after both."""
    door = gate()
    for _ in range(2):
        door.begin_update()
        door.end_update()
    door.at(Place("between", 1, context(1)))
    door.begin_update()
    door.end_update()
    door.close()
    rest = door.rest(30.0, 0.0, 30.0)
    assert rest is not None
    assert not rest.intact


def test_the_context_of_the_minibatch_before_is_kept() -> None:
    """A lone survivor at the next boundary still knows what its state was when the dead ranks made their forecasts."""
    door = gate()
    assert door.previous is None
    door.at(Place("between", 7, context(7)))
    door.at(Place("between", 8, context(8)))
    door.at(Place("idle", 8, context(8)))  # the end of an epoch is a boundary of the same minibatch
    assert door.previous == context(7)


def test_a_minibatch_is_at_its_first_boundary() -> None:
    """At an epoch's end and the next one's begin the same minibatch begins; the first of the contexts stands."""
    door = gate()
    end, begin = Context(0, 8, True, {"position": b"end"}), Context(0, 8, True, {"position": b"begin"})
    door.at(Place("idle", 8, end))
    door.at(Place("between", 8, begin))
    assert (door.place.phase, door.place.context) == ("between", end)


def test_the_first_minibatch_of_two_optimizers_is_not_whole_after_one() -> None:
    """Half of the first minibatch after a start is nobody's state either; the other update gets its time."""
    door = Gate(lambda: None, updates=2)
    door.at(Place("between", 0, context(0)))
    door.begin_update()
    door.end_update()
    door.close()
    assert door.rest(TAIL_WAIT, 0.0, 30.0) is None
    assert door.wait_until(0.0, 30.0) == 30.0
    rest = door.rest(30.0, 0.0, 30.0)
    assert rest is not None
    assert not rest.intact
