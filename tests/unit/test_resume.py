"""resume: the newest good checkpoint, or a clear stop; never a damaged one, never another model's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jitmpi import commit, device, save
from jitmpi.buffers import BufferShadow
from jitmpi.config import Settings
from jitmpi.errors import DamagedError, MismatchError
from jitmpi.events import Context, Fault, SavePlan, TensorInfo
from jitmpi.resume import _reader, resume
from jitmpi.torch_state import TrainingState
from jitmpi.vault import Vault
from slurm_plugin.contract import Options


class Alone:
    """A world of one rank."""

    rank, size, name, can_broadcast = 0, 1, "alone", True

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        return [value]

    def bcast(self, data: Any, root: int, deadline: float | None = None) -> None:
        assert root == 0

    def close(self) -> None:
        raise AssertionError


class ByFiles(Alone):
    """The same without a broadcast: every rank reads for itself."""

    can_broadcast = False

    def bcast(self, data: Any, root: int, deadline: float | None = None) -> None:
        raise AssertionError


class Patient(Alone):
    """One that notes how long it may be waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def bcast(self, data: Any, root: int, deadline: float | None = None) -> None:
        assert deadline is not None
        self.waits.append(deadline - time.monotonic())


def objects(width: int = 8) -> tuple[torch.nn.Module, Any, TrainingState]:
    model = torch.nn.Linear(4, width)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, TrainingState(model, optimizer)


def settings(folder: Path) -> Settings:
    return Settings(Options(str(folder)), "7", 0, 1, "n1", 9, "")


def checkpoint(folder: Path, minibatch: int, attempt: int) -> tuple[str, torch.Tensor]:
    """Commit a checkpoint and return its folder and the weights in it."""
    model, optimizer, state = objects()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return committed(folder, minibatch, attempt, state), model.weight.detach().clone()  # type: ignore[union-attr,operator]


def committed(folder: Path, minibatch: int, attempt: int, state: TrainingState) -> str:
    """Commit a state as it is now and return its folder."""
    vault = Vault(state, BufferShadow(state.model))
    job = str(folder / "7")
    Path(job).mkdir(mode=0o700, exist_ok=True)
    where = commit.staging(job, attempt).format(minibatch=minibatch, epoch=1, coordinator=0)
    plan = SavePlan(1, 0, minibatch, {0: (0,)}, where)
    deadline = time.monotonic() + 60
    written = save.save(plan, rank=0, tensors=vault.tensors(), read=vault.read, deadline=deadline)
    manifest = commit.commit(
        job,
        plan,
        written=[written],
        tensors=vault.tensors(),
        contexts=[Context(0, minibatch, True, {"position": b"here"})],
        scalars=vault.scalars(),
        fault=Fault("death", (1,), (), minibatch, "a test", 1.0),
        world=["n1"],
        attempt=attempt,
        job_id="7",
        exact=True,
        notes=[],
        times={},
        versions={},
        keep=5,
    )
    return manifest.directory


def damage(folder: str) -> None:
    path = Path(folder) / "rank0.h5"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("world", [Alone(), ByFiles()])
def test_the_newest_checkpoint_is_loaded(tmp_path: Path, world: Any) -> None:
    """Parameters, optimizer and this rank's cursor come back."""
    checkpoint(tmp_path, 3, 0)
    path, weights = checkpoint(tmp_path, 5, 1)
    model, optimizer, state = objects()
    cursor, restored = resume(world, state, settings(tmp_path))
    assert restored == path
    assert cursor is not None
    assert (cursor.minibatch, cursor.context.pieces["position"]) == (5, b"here")
    assert torch.equal(model.weight, weights)
    assert optimizer.state[model.weight]["step"] == 1


def test_a_large_tensor_on_a_slow_file_system_is_waited_for(tmp_path: Path) -> None:
    """The others wait while rank 0 reads; a wait that knows nothing of the size would end every start."""
    checkpoint(tmp_path, 3, 0)
    world = Patient()
    resume(world, objects()[2], settings(tmp_path))
    assert min(world.waits) > 500
    world.waits.clear()
    info = TensorInfo("model/embedding", (1 << 30, 8), "float32", 1 << 35)
    with pytest.raises(DamagedError, match="no such tensor"):
        _reader(world, Nothing())(info)  # type: ignore[arg-type]
    assert world.waits[0] > 600 + (1 << 35) / 20e6


class Nothing:
    def tensor_bytes(self, info: TensorInfo) -> Any:
        raise DamagedError("no such tensor")


@pytest.mark.parametrize("world", [Alone(), ByFiles()])
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path, world: Any) -> None:
    """Never loaded; the previous good checkpoint is used."""
    good, weights = checkpoint(tmp_path, 3, 0)
    damage(checkpoint(tmp_path, 5, 1)[0])
    model, _, state = objects()
    cursor, restored = resume(world, state, settings(tmp_path))
    assert restored == good
    assert cursor is not None
    assert cursor.minibatch == 3
    assert torch.equal(model.weight, weights)


@pytest.mark.parametrize("world", [Alone(), ByFiles()])
def test_with_only_damaged_ones_it_stops(tmp_path: Path, world: Any) -> None:
    """A clear stop that names file and dataset, not a start from scratch."""
    damage(checkpoint(tmp_path, 5, 0)[0])
    with pytest.raises(DamagedError, match=r"rank0\.h5"):
        resume(world, objects()[2], settings(tmp_path))


@pytest.mark.parametrize("world", [Alone(), ByFiles()])
def test_another_model_is_refused(tmp_path: Path, world: Any) -> None:
    """The first differences are listed."""
    checkpoint(tmp_path, 5, 0)
    with pytest.raises(MismatchError, match=r"model/weight.*8.*6"):
        resume(world, objects(width=6)[2], settings(tmp_path))


def test_no_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    """Nothing there, nothing loaded."""
    assert resume(Alone(), objects()[2], settings(tmp_path)) == (None, "")


class Global(torch.optim.SGD):
    """An optimizer that keeps a tensor of its own beside those of the parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["global"] = {"seen": self.state.get("global", {"seen": torch.zeros(2)})["seen"] + 1}  # type: ignore[index]
        return super().step(closure)


def made(kind: str) -> tuple[TrainingState, Callable[[], None]]:
    """Make the objects of a script and what one of its minibatches does."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    outside = torch.nn.Parameter(torch.ones(()))  # of the loss, such as a temperature
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if kind == "a GradScaler" else None
    optimizers: list[Any] = {
        "two optimizers": lambda: [torch.optim.AdamW(m.parameters()) for m in (model[:2], model[2])],
        "a parameter beside the model": lambda: [torch.optim.AdamW([*model.parameters(), outside])],
        "LBFGS": lambda: [torch.optim.LBFGS(model.parameters(), max_iter=3)],
        "state of no parameter": lambda: [Global(model.parameters(), lr=0.1)],
        "a GradScaler": lambda: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    }[kind]()

    def closure() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)).square().sum() * outside).float()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def minibatch() -> None:
        if kind == "LBFGS":
            optimizers[0].step(closure)
            return
        closure()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    return TrainingState(model, optimizers, None, scaler), minibatch


def bits(state: TrainingState) -> tuple[dict[str, bytes], bytes]:
    return {info.name: device.host_bytes(tensor) for info, tensor in state.tensors()}, state.scalars()


@pytest.mark.parametrize(
    "kind",
    ["two optimizers", "a parameter beside the model", "LBFGS", "state of no parameter", "a GradScaler"],
)
def test_what_comes_into_being_with_the_first_update_is_loaded(tmp_path: Path, kind: str) -> None:
    """A new process has none of it yet; it is no other model's for that, and training goes on with the same bits."""
    state, minibatch = made(kind)
    for _ in range(3):
        minibatch()
    committed(tmp_path, 3, 0, state)
    again, minibatch_again = made(kind)
    assert resume(Alone(), again, settings(tmp_path))[0] is not None
    assert bits(again) == bits(state)
    for do in (minibatch, minibatch_again):
        torch.manual_seed(7)
        do()
        do()
    assert bits(again) == bits(state)
