"""record: what a rank hands over at each minibatch, and when it need not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jitmpi.buffers import BufferShadow
from jitmpi.device import CPU, StreamClock
from jitmpi.errors import AttachError
from jitmpi.events import Context
from jitmpi.record import Recorder, _on_device
from jitmpi.settle import Gate
from jitmpi.sheet import Sheet


class Agent:
    """Stands in for the agent: keeps what is handed over."""

    def __init__(self) -> None:
        self.given: list[Context] = []
        self.delivers = True
        self.gate = Gate(lambda: None)
        self.settings = SimpleNamespace(rank=3, node="n3")
        self.progress = SimpleNamespace(passed=lambda now: None, pause=lambda: None)

    def hand_over_start(self, start: Context) -> None:
        assert start.minibatch == -1

    def hand_over(self, sheet: Sheet) -> bool:
        self.given.append(sheet.context())
        return self.delivers


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def recorder(agent: Agent) -> Recorder:
    made = Recorder(agent, BufferShadow(torch.nn.Linear(1, 1)), StreamClock(CPU))  # type: ignore[arg-type]
    made.opened({"start/x": b"began"})
    made.boundary(0, (0, 0, 0, False), {}, {})
    return made


def told(agent: Agent) -> list[tuple[int, bool]]:
    return [(c.minibatch, c.exact) for c in agent.given]


def test_a_forecast_that_came_true_is_not_told_again(agent: Agent, recorder: Recorder) -> None:
    """One frame a minibatch; the rank itself has the exact context."""
    recorder.forecast((0, 0, 1, False), {}, {})
    recorder.boundary(1, (0, 0, 1, False), {}, {})
    assert told(agent) == [(0, True), (1, False)]
    noted = agent.gate.place.context
    assert noted is not None
    context = noted.context()
    assert (context.minibatch, context.exact, context.pieces["start/x"]) == (1, True, b"began")


@pytest.mark.parametrize("change", ["random", "position", "own", "user", "undelivered"])
def test_what_the_forecast_did_not_know_is_told(agent: Agent, recorder: Recorder, change: str) -> None:
    """A random number drawn in the tail, another position, a changed state, a frame that did not get through."""
    agent.delivers = change != "undelivered"
    recorder.forecast((0, 0, 1, False), {}, {})
    if change == "random":
        torch.rand(1)
    where = (1, 0, 0, False) if change == "position" else (0, 0, 1, False)
    user: dict[str, Any] = {"best": 1.0} if change == "user" else {}
    own = {"dataset/generator": b"1"} if change == "own" else {}
    recorder.boundary(1, where, user, own)
    assert told(agent) == [(0, True), (1, False), (1, True)]


def test_a_state_that_grows_is_said_once(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that gets an entry each minibatch makes every later minibatch slower."""
    for minibatch in (1, 2):
        recorder.boundary(minibatch, (0, 0, minibatch, False), {"losses": ["0.123456789"] * 10_000}, {})
    assert capsys.readouterr().err.count("run.state has") == 1


@pytest.mark.parametrize("closed", [False, True])
def test_what_the_gate_holds_is_not_written_again(agent: Agent, recorder: Recorder, closed: bool) -> None:
    """The sheets are used in turn; the boundary's and that of the one before stand, however many forecasts are made.

    Behind a closed gate the agent may hold any that it has seen, and all of them stand.
    """
    gate = agent.gate
    for minibatch in range(1, 4):
        recorder.boundary(minibatch, (0, 0, minibatch, False), {}, {})
        held: list[Any] = [gate.place.context, gate.previous]
        said = [noted.context() for noted in held]
        gate.closed = closed
        for batch in range(8):
            torch.rand(1)
            recorder.forecast((0, 0, minibatch + batch, False), {}, {})
            if closed:
                held.append(gate.place.forecast)
                said.append(held[-1].context())
        assert [noted.context() for noted in held] == said
        gate.closed = False


def test_a_state_that_cannot_be_kept_is_named(recorder: Recorder) -> None:
    """The error says where the value is, and in the first minibatch."""
    with pytest.raises(AttachError, match=r"run\.state\.best\.path: a .*PosixPath cannot be saved"):
        recorder.boundary(1, (0, 0, 1, False), {"best": {"path": Path("/x")}}, {})


def test_a_tensor_on_a_gpu_is_seen_wherever_it_lies() -> None:
    """Its kernel may not have run when the bytes are copied, on a stream of their own."""
    on_gpu = SimpleNamespace(is_cuda=True)
    assert _on_device({"a": 1, "b": [0.5, {"c": (on_gpu,)}]})
    assert not _on_device({"a": torch.ones(1), "b": ["text", {}], "c": None})
