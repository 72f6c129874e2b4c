"""replicas: ranks that do not hold the same are refused before training, and told why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jitmpi import replicas, session
from jitmpi.config import Settings
from jitmpi.errors import AttachError
from jitmpi.torch_state import TrainingState
from slurm_plugin.contract import Options


def rows(model: nn.Module) -> dict[str, str]:
    return replicas.rows(TrainingState(model, torch.optim.AdamW(model.parameters())).tensors())


def seeded(seed: int, *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), *(nn.Linear(4, size) for size in sizes))


def test_replicas_are_alike_and_their_buffers_may_differ() -> None:
    """Statistics are each rank's own; the parameters' bytes count, whatever their strides."""
    one, other = seeded(1, 2), seeded(1, 2)
    other[1].running_mean += 1
    other[0].weight = nn.Parameter(other[0].weight.detach().t().contiguous().t())
    assert replicas.digest(rows(one)) == replicas.digest(rows(other))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (seeded(2, 2), "no replicas (model/0.weight differs on ranks 0 and 2)"),
        (seeded(1, 3), "model/2.weight is float32[2, 4] on rank 0 and float32[3, 4] on rank 2"),
        (seeded(1, 2, 2), "model/3.weight is not there on rank 0"),
    ],
)
def test_ranks_that_hold_something_else_are_told_where_they_differ(other: nn.Module, said: str) -> None:
    """Tensor parallel, pipeline parallel, or ranks that were not seeded alike: one rank's state is not the others'."""
    tables = [rows(seeded(1, 2)), rows(seeded(1, 2)), rows(other)]
    assert len({replicas.digest(table) for table in tables}) == 2
    assert said in replicas.difference(tables)


class World:
    """A world of two ranks, of which the other one says the same as this one, except for its parameters."""

    def __init__(self, *, alike: bool) -> None:
        self.alike, self.turns = alike, 0

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        self.turns += 1
        if self.turns == 1 or self.alike:
            return [value, value]
        return [value, value[::-1] if self.turns == 2 else value.replace(b"float32", b"float16", 1)]


@pytest.mark.parametrize("alike", [True, False])
def test_attach_compares_the_ranks(tmp_path: Path, alike: bool) -> None:
    """Before anything is restored; all ranks come to the same verdict."""
    settings = Settings(Options(str(tmp_path)), "7", 0, 2, "n1", 0, "")
    state = TrainingState(seeded(1))
    if alike:
        session._preflight(World(alike=True), settings, state)  # type: ignore[arg-type]
    else:
        with pytest.raises(AttachError, match="different tensors"):
            session._preflight(World(alike=False), settings, state)  # type: ignore[arg-type]


class Sharpness(torch.optim.Optimizer):
    """An optimizer that works through another one, as SAM and Lookahead do."""

    def __init__(self, params: Any, shares: bool = False) -> None:
        super().__init__(params, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups)
        if shares:
            self.state = self.base_optimizer.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.base_optimizer.step(closure)


class ZeroRedundancyOptimizer(torch.optim.AdamW):
    """Named as torch's own, which needs a process group to be made."""


class FullyShardedDataParallel(nn.Linear):
    """The same of a model."""


def test_state_that_is_divided_is_refused() -> None:
    """Each rank holds a part; at the start the parts may look alike."""
    model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match="ZeroRedundancyOptimizer keeps another part"):
        replicas.refuse_divided(model, [ZeroRedundancyOptimizer(model.parameters())])
    with pytest.raises(AttachError, match="FullyShardedDataParallel keeps another part"):
        replicas.refuse_divided(nn.Sequential(FullyShardedDataParallel(2, 2)), [])


def test_an_optimizer_inside_another_one_is_asked_for() -> None:
    """Its moments would be missing in every checkpoint; given as well, or where both share one state, all is there."""
    model = nn.Linear(2, 2)
    outer = Sharpness(model.parameters())
    with pytest.raises(AttachError, match=r"optimizer=\[optimizer, optimizer\.base_optimizer\]"):
        replicas.refuse_divided(model, [outer])
    replicas.refuse_divided(model, [outer, outer.base_optimizer])
    replicas.refuse_divided(model, [Sharpness(model.parameters(), shares=True)])


def test_attach_refuses_before_anything_is_started() -> None:
    """No world is opened, no notice sent."""
    model = nn.Linear(2, 2)
    state = TrainingState(model, ZeroRedundancyOptimizer(model.parameters()))
    settings = replace(Settings(Options("/nowhere"), "7", 0, 1, "n1", 0, ""), launcher="127.0.0.1:1:ab")
    with pytest.raises(AttachError, match="DDP"):
        session._begin_once(settings, state)
    assert not session._begun


def test_parameters_that_nobody_updates_are_said() -> None:
    """A forgotten optimizer would change them unseen; frozen ones and averages are nobody's business."""
    net, average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    net[1].bias.requires_grad_(False)
    one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net)
    said = replicas.unseen(net, [], [one])
    assert said.startswith("1 parameters want a gradient")
    assert "such as 1.weight" in said
    assert replicas.unseen(nn.ModuleList([net, average]), [average], [one, other]) == ""
    assert replicas.unseen(net, [], []) == ""
