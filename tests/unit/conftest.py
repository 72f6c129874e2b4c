"""Small real checkpoints for the tests of the data plane, written by the real savers."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jitmpi import commit, save, store
from jitmpi.events import Context, Fault, Manifest, SavePlan, TensorInfo, Written

SHAPES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("model/embed.weight", (37, 5), "float32"),
    ("model/layer.0.weight", (16, 3, 2), "bfloat16"),
    ("model/layer.0.scale", (), "float64"),
    ("model/mask", (9,), "bool"),
    ("model/empty", (0, 4), "float32"),
    ("model/no.columns", (5, 0), "int64"),
    ("model/spectrum", (6, 2), "complex64"),
    ("model/quantized", (11, 7), "float8_e4m3fn"),
    ("optimizer/embed.weight/exp_avg", (37, 5), "float32"),
    ("optimizer/embed.weight/step", (), "float32"),
)


def info(name: str, shape: tuple[int, ...], dtype: str) -> TensorInfo:
    """Make a TensorInfo with the right size."""
    one = TensorInfo(name, (1,), dtype, 0)
    return TensorInfo(name, shape, dtype, math.prod(shape) * store.row_bytes(one))


@dataclass
class State:
    """Tensors and their raw bytes, as savers and readers see them."""

    tensors: tuple[TensorInfo, ...]
    data: list[bytes] = field(default_factory=list)

    def read(self, index: int, start: int, stop: int) -> memoryview:
        """Give rows, as the runtime's reader does."""
        width = store.row_bytes(self.tensors[index])
        return memoryview(self.data[index])[start * width : stop * width]


def make_state(seed: int = 1, shapes: tuple[tuple[str, tuple[int, ...], str], ...] = SHAPES) -> State:
    """Make tensors filled with random bits."""
    source = random.Random(seed)
    tensors = tuple(info(*shape) for shape in shapes)
    data = [bytes(b & 1 for b in source.randbytes(t.nbytes)) if t.dtype == "bool" else source.randbytes(t.nbytes)
            for t in tensors]  # fmt: skip
    return State(tensors, data)


def make_contexts(minibatch: int, ranks: int) -> tuple[Context, ...]:
    """Make a context for every rank; the last one is a forecast."""
    return tuple(
        Context(r, minibatch, r < ranks - 1, {"random/torch": bytes([r]) * 50, "position": b"{}", "user": b""})
        for r in range(ranks)
    )


@dataclass
class Job:
    """One job's folder, and the steps that make checkpoints in it."""

    directory: str

    def plan(self, minibatch: int, attempt: int, savers: tuple[int, ...] = (0, 2), epoch: int = 1) -> SavePlan:
        """Plan a save as the coordinator, the first saver, does."""
        staging = commit.staging(self.directory, attempt)
        where = staging.format(minibatch=minibatch, epoch=epoch, coordinator=savers[0])
        return SavePlan(epoch, savers[0], minibatch, {0: savers}, where)

    def write(self, plan: SavePlan, state: State) -> list[Written]:
        """Let every saver of a plan write."""
        deadline = time.monotonic() + 60
        return [
            save.save(plan, rank=rank, tensors=state.tensors, read=state.read, deadline=deadline)
            for rank in plan.savers[0]
        ]

    def commit(self, plan: SavePlan, state: State, written: list[Written], attempt: int, **other: Any) -> Manifest:
        """Commit what was written."""
        fault = Fault("death", (1,), (1,), plan.minibatch, "connection closed", 1000.0)
        values: dict[str, Any] = {
            "written": written, "tensors": state.tensors, "contexts": make_contexts(plan.minibatch, 3),
            "scalars": b'{"lr": 0.1}', "fault": fault, "world": ("n1", "n2", "n3"), "attempt": attempt, "job_id": "7",
            "exact": True, "notes": (), "times": {"fault": 1000.0, "saved": 1002.5}, "versions": {"torch": "2.4"},
            "keep": 2,
        }  # fmt: skip
        return commit.commit(self.directory, plan, **(values | other))

    def checkpoint(self, minibatch: int, attempt: int, state: State | None = None, **other: Any) -> Manifest:
        """Make one whole checkpoint."""
        state = state or make_state()
        plan = self.plan(minibatch, attempt)
        return self.commit(plan, state, self.write(plan, state), attempt, **other)

    def names(self) -> set[str]:
        """List what lies in the folder."""
        return set(os.listdir(self.directory))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Give an empty job folder."""
    directory = tmp_path / "jobs" / "7"
    directory.mkdir(mode=0o700, parents=True)
    return Job(str(directory))


@pytest.fixture
def state() -> State:
    """Give a state with every kind of tensor that is easily got wrong."""
    return make_state()


@pytest.fixture
def new_state() -> Callable[..., State]:
    """Give the maker of states, for tests that need several or their own shapes."""
    return make_state
