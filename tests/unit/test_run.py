"""run: the user's loop is a plain loop, counted; and after a resume it goes on where it has to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from jitmpi.buffers import BufferShadow
from jitmpi.events import Context, Cursor
from jitmpi.position import Position, Where
from jitmpi.run import UNSEEN, Run
from jitmpi.torch_state import TrainingState


class Log:
    """Stands in for the recorder: keeps what it is told."""

    def __init__(self) -> None:
        self.boundaries: list[tuple[int, Position, bool]] = []
        self.contexts: list[Context] = []
        self.start: dict[str, bytes] = {}
        self.events: list[str] = []

    def opened(self, start: dict[str, bytes]) -> None:
        self.start = start

    def boundary(self, minibatch: int, where: Where, user: Any, own: Any, *, idle: bool = False) -> None:
        from jitmpi import codec, random_state

        position = Position(*where)
        self.boundaries.append((minibatch, position, idle))
        pieces = {**random_state.capture(), "position": position.encode(), "user": codec.dumps(user), **self.start}
        self.contexts.append(Context(0, minibatch, True, {**pieces, **own}))

    def pause(self) -> None:
        self.events.append("pause")

    def forecast(self, where: Where, user: Any, own: Any) -> None:
        self.events.append("forecast")

    def begin_update(self) -> None:
        self.events.append("begin")

    def end_update(self) -> None:
        self.events.append("end")


def objects(*, optimizer: bool = True) -> tuple[torch.nn.Module, Any, TrainingState]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    chosen = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    return model, chosen, TrainingState(model, chosen)


def loader(count: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2.0 * count).reshape(count, 2)), 2, shuffle=True)


def hooked(state: TrainingState, log: Log | None, cursor: Cursor | None = None) -> Run:
    run = Run(state, log, BufferShadow(state.model), cursor)  # type: ignore[arg-type]
    state.on_update(run.before_update, run.after_update)
    state.on_forward(run.after_forward)
    return run


def train(run: Run, model: Any, optimizer: Any, epochs: int, *, every: int = 1, stop: int = -1) -> list[Any]:
    seen = []
    batches = loader()
    for epoch in run.epochs(epochs):
        for i, (x,) in enumerate(run.minibatches(batches)):
            model(x).sum().backward()
            seen.append((epoch, run.minibatch, x.tolist(), float(torch.rand(1))))
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.state["seen"] = len(seen)
            if run.minibatch == stop:
                return seen
    return seen


def test_without_slurm_it_is_a_plain_loop_that_counts() -> None:
    """No recorder: every batch of every epoch, and the minibatch's number."""
    model, optimizer, state = objects()
    seen = train(hooked(state, None), model, optimizer, 2)
    assert [row[1] for row in seen] == [0, 1, 2, 3, 4, 5]


def test_every_boundary_is_passed_once() -> None:
    """A boundary per minibatch, one at the end of each epoch, update hooks and a forecast in between."""
    model, optimizer, state = objects()
    log = Log()
    train(hooked(state, log), model, optimizer, 2)
    rows = [(m, p.epoch, p.index, idle) for m, p, idle in log.boundaries]
    first = [(0, 0, 0, False), (1, 0, 1, False), (2, 0, 2, False), (3, 0, 3, False), (3, 0, 3, True)]
    second = [(3, 1, 0, False), (4, 1, 1, False), (5, 1, 2, False), (6, 1, 3, False), (6, 1, 3, True)]
    assert rows == first + second
    assert log.events[:4] == ["forecast", "begin", "end", "forecast"]


def test_a_model_that_is_trained_in_evaluation_mode_has_forecasts_too() -> None:
    """As with frozen BatchNorm: the forward pass does not show, the update does; and it is no evaluation that hangs."""
    model, optimizer, state = objects()
    log = Log()
    run = hooked(state, log)
    model.eval()
    assert not state.training
    for (x,) in run.minibatches(loader()):
        model(x).sum().backward()
        optimizer.step()
    assert log.events == ["forecast", "begin", "end"] * 3
    assert state.training


def test_updates_that_nobody_sees_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer made after attach, or a CUDA graph: nothing could be saved, and a failure is late to learn it."""
    model, _, state = objects()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hooked(state, Log())
    for (x,) in run.minibatches(loader(2 * UNSEEN + 20)):
        model(x).sum().backward()
        other.step()
    assert run.minibatch == 0
    assert capsys.readouterr().err.count("without an update") == 1


def test_micro_batches_belong_to_one_minibatch() -> None:
    """With gradient accumulation a minibatch ends with its update, and its position is that of its first batch."""
    model, optimizer, state = objects()
    log = Log()
    seen = train(hooked(state, log), model, optimizer, 1, every=3)
    assert [row[1] for row in seen] == [0, 0, 0]
    assert [(m, p.index, idle) for m, p, idle in log.boundaries] == [(0, 0, False), (1, 3, False), (1, 3, True)]


def test_without_an_optimizer_every_batch_is_a_minibatch() -> None:
    """There is no update to wait for."""
    model, _, state = objects(optimizer=False)
    log = Log()
    run = hooked(state, log)
    for (x,) in run.minibatches(loader()):
        model(x)
    assert [m for m, _, idle in log.boundaries if not idle] == [0, 1, 2, 3]


@pytest.mark.parametrize("minibatch", range(7))
def test_a_resumed_loop_goes_on_bit_for_bit(minibatch: int) -> None:
    """From each boundary's context: the batches, numbers, random numbers and user state of the undisturbed loop."""
    model, optimizer, state = objects()
    log = Log()
    undisturbed = train(hooked(state, log), model, optimizer, 2)
    context = [c for c in log.contexts if c.minibatch == minibatch][-1 if minibatch == 3 else 0]
    model, optimizer, state = objects()
    torch.manual_seed(99)
    run = hooked(state, Log(), Cursor(minibatch, context))
    assert run.minibatch == minibatch
    assert run.state.get("seen", 0) == minibatch
    rest = train(run, model, optimizer, 2)
    assert rest == undisturbed[minibatch:]


def wrapped(batches: Any) -> Any:
    """Hand items on as progress bars do."""
    try:
        yield from enumerate(batches)
    finally:
        len("bar closed")


def looped(batches: Any) -> Any:
    for item in batches:
        yield item
        len("a line behind the yield")


def leave(run: Run, optimizer: Any, how: str, wrap: Any) -> None:
    for _ in wrap(run.minibatches(loader())):
        optimizer.step()
        if how == "raise":
            raise ValueError("a collective behind the update failed")
        if how == "call":
            int("not a number")
        if how == "return":
            return
        try:
            break
        finally:
            len("cleaned up")


@pytest.mark.parametrize("wrap", [iter, enumerate, wrapped, looped, lambda batches: looped(wrapped(batches))])
@pytest.mark.parametrize(("how", "done"), [("break", True), ("return", True), ("raise", False), ("call", False)])
def test_an_exception_behind_the_update_does_not_end_the_epoch(how: str, done: bool, wrap: Any) -> None:
    """`break` means that nothing of the feed is left; a body that raised is no boundary: the rest is replayed."""
    _, optimizer, state = objects()
    log = Log()
    run = hooked(state, log)
    try:
        leave(run, optimizer, how, wrap)
    except ValueError:
        assert not done
    assert [(m, position.done) for m, position, _ in log.boundaries] == [(0, False), *([(1, True)] if done else [])]


def test_a_feed_left_by_break_is_not_taken_up_again() -> None:
    """An early stop inside an epoch stays where it was: the resumed run goes on behind it."""
    model, optimizer, state = objects()
    log = Log()
    run = hooked(state, log)
    train(run, model, optimizer, 2, stop=1)
    minibatch, position, idle = log.boundaries[-1]
    assert (minibatch, position, idle) == (2, Position(0, 0, 2, True), True)
    model, optimizer, state = objects()
    again = hooked(state, Log(), Cursor(2, log.contexts[-1]))
    assert [row[:2] for row in train(again, model, optimizer, 2)] == [(1, 2), (1, 3), (1, 4)]


def test_a_batch_that_was_only_looked_at_is_no_minibatch() -> None:
    """`break` at the head of the loop: a boundary is passed, and the next epoch begins with one of its own."""
    model, optimizer, state = objects()
    log = Log()
    run = hooked(state, log)
    for _ in run.epochs(2):
        for i, (x,) in enumerate(run.minibatches(loader())):
            if i == 1:
                break
            model(x).sum().backward()
            optimizer.step()
    rows = [(m, p.epoch, p.index, p.done, idle) for m, p, idle in log.boundaries]
    assert rows[:3] == [(0, 0, 0, False, False), (1, 0, 1, False, False), (1, 0, 2, True, True)]
    assert rows[3:] == [(1, 1, 0, False, False), (2, 1, 1, False, False), (2, 1, 2, True, True)]


def test_micro_batches_left_over_at_the_end_of_an_epoch_go_on_in_the_next() -> None:
    """No boundary lies inside a minibatch, but evaluation between the epochs is no part of it either."""
    model, optimizer, state = objects()
    log = Log()
    train(hooked(state, log), model, optimizer, 1, every=2)
    assert [(m, p.index, idle) for m, p, idle in log.boundaries] == [(0, 0, False), (1, 2, False)]
    assert log.events[-1] == "pause"


def test_schedulers_that_step_between_epochs_step_once() -> None:
    """A fault behind an epoch's end saves the scheduler as it was there, for the script's lines run again."""
    model, optimizer, _ = objects()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainingState(model, optimizer, scheduler)
    run = hooked(state, Log())
    seen = {}
    for _ in run.epochs(2):
        for (x,) in run.minibatches(loader(2)):
            model(x).sum().backward()
            optimizer.step()
        seen[run.minibatch] = state.scalars()
        scheduler.step()
        assert state.scalars_of(run.minibatch) == seen[run.minibatch] != state.scalars()


def test_a_loader_inside_another_ones_loop_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Boundaries and positions are those of the outer loader, before its update and behind it (evaluation)."""
    model, optimizer, state = objects()
    log = Log()
    places: list[tuple[int, int]] = []
    log.forecast = lambda where, user, own: places.append(where[1:3])  # type: ignore[method-assign]
    run = hooked(state, log)
    for (x,) in run.minibatches(loader(6)):
        assert len(list(run.minibatches(loader(2)))) == 1
        model(x).sum().backward()
        optimizer.step()
        assert len(list(run.minibatches(loader(2)))) == 1
    assert places == [(0, 1), (0, 2), (0, 3)]
    rows = [(m, p.feed, p.index) for m, p, _ in log.boundaries]
    assert rows == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3), (3, 0, 3)]
    assert capsys.readouterr().err.count("two loaders") == 1


def in_pieces(run: Run) -> list[tuple[str, int, int, float]]:
    """Train on a loader before any epoch, then in two loops of epochs, each on its own data."""
    seen = []

    def minibatch(part: str, epoch: int, batch: torch.Tensor) -> None:
        seen.append((part, epoch, run.minibatch, float(batch)))
        run.after_update()

    for batch in run.minibatches(DataLoader([10.0, 11.0, 12.0])):
        minibatch("warm-up", -1, batch)
    for part in ("first", "second"):
        data = DataLoader([1.0, 2.0, 3.0] if part == "first" else [5.0, 6.0])
        for epoch in run.epochs(2):
            for batch in run.minibatches(data):
                minibatch(part, epoch, batch)
    return seen


@pytest.mark.parametrize("minibatch", range(13))
def test_a_script_may_train_in_several_loops(minibatch: int) -> None:
    """The place to go on is in one of them; those before it are passed over, those behind it run whole."""
    log = Log()
    whole = in_pieces(Run(objects()[2], log))  # type: ignore[arg-type]
    context = next(context for context in log.contexts if context.minibatch == minibatch)
    again = in_pieces(Run(objects()[2], Log(), None, Cursor(minibatch, context)))  # type: ignore[arg-type]
    assert again == [row for row in whole if row[2] >= minibatch]
