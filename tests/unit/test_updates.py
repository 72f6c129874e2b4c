"""An update is bracketed from its first change to its last, and a tail is completed only where that is certain."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from jitmpi.settle import Gate, Place
from jitmpi.updates import CLEAR, Tail, Updates


def watch(optimizers: list[Any], scaler: Any = None) -> tuple[Updates, list[str]]:
    log: list[str] = []
    updates = Updates(optimizers, scaler)
    updates.install(lambda: log.append("before"), lambda: log.append("after"))
    return updates, log


def parameter(gradient: float = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), gradient)
    return p


def test_each_step_is_an_update() -> None:
    """Before the first change, after the last; each optimizer for itself."""
    optimizers = [torch.optim.SGD([parameter()], lr=0.1) for _ in range(2)]
    updates, log = watch(optimizers)
    for optimizer in optimizers:
        optimizer.step()
    updates.remove()
    optimizers[0].step()
    assert log == ["before", "after"] * 2


def test_closures_lie_inside_the_update() -> None:
    """LBFGS calls forward and backward many times between before and after."""
    p = parameter()
    optimizer = torch.optim.LBFGS([p], max_iter=4)
    _, log = watch([optimizer])

    def closure() -> torch.Tensor:
        log.append("closure")
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (log[0], log[-1]) == ("before", "after")
    assert log.count("before") == log.count("after") == 1
    assert "closure" in log


def test_with_a_scaler_the_update_ends_with_its_update() -> None:
    """The scale belongs to the state: between step and scaler.update() nothing is complete."""
    p = parameter()
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    updates, log = watch([optimizer], scaler)
    scaler.step(optimizer)
    assert log == ["before"]
    scaler.update()
    assert log == ["before", "after"]
    updates.remove()
    assert "update" not in vars(scaler)


def test_a_skipped_step_is_an_update() -> None:
    """The scaler skips the optimizer; the minibatch is over all the same."""
    p = parameter(math.inf)
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    _, log = watch([optimizer], scaler)
    scaler.step(optimizer)
    assert log == []
    scaler.update()
    assert log == ["before", "after"]
    assert p.tolist() == [1.0, 1.0]


def test_an_optimizer_without_hooks_is_wrapped() -> None:
    """Anything with a step() is noticed, and left as it was at the end."""

    class Own:
        def step(self) -> str:
            return "done"

    own = Own()
    updates, log = watch([own])
    assert own.step() == "done"
    assert log == ["before", "after"]
    updates.remove()
    assert vars(own) == {}


def scheduled() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)


def run(tail: Tail, optimizer: Any, scheduler: Any, steps: list[int]) -> None:
    for count in steps:
        tail.mark()
        optimizer.step()
        for _ in range(count):
            scheduler.step()
    tail.mark()


def test_a_cut_tail_is_completed_as_every_minibatch_was() -> None:
    """A thread that was stopped before its scheduler's step gets it, once."""
    optimizer, scheduler = scheduled()
    tail = Tail([scheduler])
    run(tail, optimizer, scheduler, [2] * CLEAR)
    scheduler.step()
    assert tail.complete() == ""
    assert tail.complete() == ""
    assert scheduler.last_epoch == 2 * CLEAR + 2


def test_a_scheduler_that_steps_per_epoch_is_left_alone() -> None:
    """Where minibatches do not step, none is made up."""
    optimizer, scheduler = scheduled()
    tail = Tail([scheduler])
    run(tail, optimizer, scheduler, [0] * CLEAR)
    assert tail.complete() == ""
    assert scheduler.last_epoch == 0


def test_an_unclear_pattern_is_reported() -> None:
    """After too few minibatches, or uneven ones, nothing is done and the note says so."""
    optimizer, scheduler = scheduled()
    tail = Tail([scheduler])
    run(tail, optimizer, scheduler, [1])
    assert "equally often" in tail.complete()
    run(tail, optimizer, scheduler, [1, 0, 1])
    assert "equally often" in tail.complete()
    assert scheduler.last_epoch == 3


def test_a_scheduler_that_needs_a_metric_is_reported() -> None:
    """ReduceLROnPlateau cannot be stepped for somebody else."""
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    tail = Tail([scheduler])
    for _ in range(CLEAR):
        tail.mark()
        scheduler.step(1.0)
    tail.mark()
    assert "metric" in tail.complete()


def test_without_schedulers_there_is_nothing_to_do() -> None:
    """No scheduler, no note."""
    tail = Tail([])
    tail.mark()
    assert tail.complete() == ""


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_update_is_bracketed_too() -> None:
    """The compiler must not move what is noted behind the kernels: the state would look whole while it changes."""
    log: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            log.append("kernels")
            return graph(*args)

        return run

    optimizer = torch.optim.AdamW([parameter()], lr=0.1, foreach=False)
    gate = Gate(lambda: None)
    Updates([optimizer], None).install(
        lambda: (gate.begin_update(), log.append(gate.place.phase)),  # type: ignore[arg-type,return-value]
        lambda: (gate.end_update(), log.append(gate.place.phase)),  # type: ignore[arg-type,return-value]
    )
    step = torch.compile(lambda: optimizer.step(), backend=backend)
    for _ in range(2):
        gate.at(Place("between", 0))
        step()
    assert log == ["updating", "kernels", "tail"] * 2
