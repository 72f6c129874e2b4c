"""Make sure that what attach was given is all, and the same on all ranks: what one saves is put into all of them.

Rule 1: what is known to be divided among the ranks is refused by its name, for its parts may look alike at the start.
Rule 2: all else is compared: the tensors' names and shapes, and some bytes of every parameter. Buffers may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from jitmpi import device
from jitmpi.errors import AttachError
from jitmpi.events import TensorInfo

LOOKED = 64  # bytes at either end of a parameter
SHARDED = frozenset(["FullyShardedDataParallel", "DeepSpeedEngine", "DeepSpeedZeroOptimizer", "ZeroRedundancyOptimizer",
                     "DeepSpeedZeroOptimizer_Stage3", "PostLocalSGDOptimizer"])  # fmt: skip
DIVIDED = "only plain data parallel (DDP) can be protected, where all ranks hold the same; run without --jit-ckpt"


def refuse_divided(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Refuse objects whose state is known to be another one on each rank, or not to be all there.

    Raises:
        AttachError: names the object.
    """
    for one in (*model.modules(), *optimizers):
        name = next((kind.__name__ for kind in type(one).__mro__ if kind.__name__ in SHARDED), "")
        if name:
            raise AttachError(f"{name} keeps another part of the state on each rank: {DIVIDED}")
    for number, optimizer in enumerate(optimizers):
        for attribute, inner in _inner(optimizer):
            if inner.state is not optimizer.state and not any(inner is one for one in optimizers):
                raise AttachError(
                    f"optimizer {number} ({type(optimizer).__name__}) works through another one, its {attribute}, "
                    f"whose state would be lost: give attach both, optimizer=[optimizer, optimizer.{attribute}]"
                )


def unseen(model: nn.Module, copies: Sequence[nn.Module], optimizers: Sequence[Any]) -> str:
    """Say which parameters want a gradient and are in no optimizer, "" for none: their updates would not be seen."""
    known = {id(p) for copy in copies for p in copy.parameters()}
    known |= {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if not names or not optimizers:
        return ""
    return (
        f"{len(names)} parameters want a gradient and are in no optimizer that attach was given, such as {names[0]}: "
        "if another one updates them, give it too, or a failure may find them half updated"
    )


def rows(tensors: Sequence[tuple[TensorInfo, torch.Tensor]]) -> dict[str, str]:
    """Describe every tensor: name -> dtype, shape and, for a parameter, some of its bytes."""
    return {info.name: f"{info.dtype}{list(info.shape)}\t{_looked_at(tensor)}" for info, tensor in tensors}


def digest(described: dict[str, str]) -> bytes:
    """Hash what `rows` gave, in its order."""
    return blake2b(json.dumps(list(described.items())).encode(), digest_size=16).digest()


def difference(tables: Sequence[dict[str, str]]) -> str:
    """Say where the ranks' `rows` differ first."""
    first = tables[0]
    rank, other = next((r, table) for r, table in enumerate(tables) if list(table.items()) != list(first.items()))
    for name in dict.fromkeys([*first, *other]):
        mine, theirs = (table.get(name, "not there").partition("\t")[0] for table in (first, other))
        if mine != theirs:
            what = f"{name} is {mine} on rank 0 and {theirs} on rank {rank}"
            return f"the ranks hold different tensors ({what}): {DIVIDED}"
    name = next((n for n in first if first[n] != other[n]), "the order of the tensors")
    return (
        f"the ranks are no replicas ({name} differs on ranks 0 and {rank}): {DIVIDED}. If they are meant to be, wrap "
        "the model in DistributedDataParallel, or give all ranks the same values, before attach"
    )


def _inner(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that another one holds, as (how to get it, it)."""
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if isinstance(value, (list, tuple)):
            yield from (
                (f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.optim.Optimizer)
            )
        elif isinstance(value, torch.optim.Optimizer):
            yield name, value


def _looked_at(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, nn.Parameter) or not tensor.numel():
        return ""
    flat = device.flat_bytes(tensor)
    return bytes(torch.cat([flat[:LOOKED], flat[-LOOKED:]]).tolist()).hex()
