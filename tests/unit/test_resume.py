"""resume: the newest good checkpoint, or a clear stop; never a damaged one, never another model's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from jitmpi import commit, save
from jitmpi.buffers import BufferShadow
from jitmpi.config import Settings
from jitmpi.errors import DamagedError, MismatchError
from jitmpi.events import Context, Fault, SavePlan
from jitmpi.resume import resume
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

    def abandon(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


class ByFiles(Alone):
    """The same without a broadcast: every rank reads for itself."""

    can_broadcast = False

    def bcast(self, data: Any, root: int, deadline: float | None = None) -> None:
        raise AssertionError


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
    vault = Vault(state, BufferShadow(model))
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
    return manifest.directory, model.weight.detach().clone()  # type: ignore[union-attr,operator]


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
