"""The state whose writing is measured: a transformer of 25 million parameters, two moments each: 300 MB. Data only."""

from __future__ import annotations

import math

from jitmpi import commit
from jitmpi.events import SavePlan, TensorInfo

WIDTH = 512
LAYERS = 8
# A transformer's layer; the optimizer keeps two tensors of the same shape for each.
LAYER: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("norm1.weight", (WIDTH,)),
    ("norm1.bias", (WIDTH,)),
    ("qkv.weight", (3 * WIDTH, WIDTH)),
    ("qkv.bias", (3 * WIDTH,)),
    ("out.weight", (WIDTH, WIDTH)),
    ("out.bias", (WIDTH,)),
    ("norm2.weight", (WIDTH,)),
    ("norm2.bias", (WIDTH,)),
    ("up.weight", (4 * WIDTH, WIDTH)),
    ("up.bias", (4 * WIDTH,)),
    ("down.weight", (WIDTH, 4 * WIDTH)),
    ("down.bias", (WIDTH,)),
)


def infos(layers: int = LAYERS) -> list[TensorInfo]:
    """List the state's tensors in canonical order."""
    parameters = [(f"layers.{i}.{name}", shape) for i in range(layers) for name, shape in LAYER]
    found = [_info(f"model/{name}", shape) for name, shape in parameters]
    for name, shape in parameters:
        found += [_info(f"optimizer/{name}/{key}", shape) for key in ("exp_avg", "exp_avg_sq")]
    return found


def plan(folder: str, savers: int, epoch: int) -> SavePlan:
    """Plan the save of the whole state by `savers` ranks in attempt `epoch`."""
    where = commit.staging(folder, epoch).format(minibatch=epoch, epoch=epoch, coordinator=0)
    return SavePlan(epoch, 0, epoch, {0: tuple(range(savers))}, where)


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, shape, "float32", 4 * math.prod(shape))
