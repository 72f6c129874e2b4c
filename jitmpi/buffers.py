"""Keep the buffers that change outside the update (BatchNorm statistics and such) as they were at the last boundary.

Rule 1: a buffer is copied only when it changed since the boundary before; else it costs a look at its version.
Rule 2: they belong to one rank (in DDP each rank has its own until rank 0's are broadcast at the next forward), so they
travel in the rank's replay context and not with the shard.

A version says only that some in-place operation ran, and native batch norm does not even say that about the statistics
it writes. So the buffers of one module count as changed together (`num_batches_tracked` tells on the others), and those
of a normalization in training always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from jitmpi import device
from jitmpi.errors import MismatchError

LIMIT = 1 << 20  # bytes that a buddy is handed with every minibatch at most: 1 ms on a 10 Gbit/s link
QUIET = 3  # boundaries without a change after which a buffer is taken for a constant


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    while _wraps(model):
        model = getattr(model, "_orig_mod", None) or model.module  # type: ignore[assignment]
    return model


def names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes the wrappers' "module." and "_orig_mod." out of a parameter's or buffer's name."""
    dropped = {
        f"{path}.{child}".removeprefix(".")
        for path, module in model.named_modules()
        if _wraps(module)
        for child in ("module", "_orig_mod")
    }

    def clean(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in dropped)

    return clean


class BufferShadow:
    """Copies of a model's changing buffers, taken at each boundary."""

    def __init__(self, model: nn.Module, *, limit: int = LIMIT) -> None:
        self._limit = limit
        self._groups = list(_groups(model))
        self._known = {entry.name: entry for group in self._groups for entry in group.entries}

    @property
    def travels(self) -> bool:
        """Whether the pieces are small enough to be handed to buddies with every minibatch."""
        return sum(group.nbytes for group in self._volatile()) <= self._limit

    def capture(self) -> None:
        """Copy what changed since the last call; nothing else is touched."""
        copies: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for group in self._groups:
            if not group.changed():
                group.rest()
                continue
            for entry in group.entries:
                if entry.shadow is None or entry.shadow.shape != entry.tensor.shape:
                    entry.shadow = torch.empty_like(entry.tensor)
                copies.append(entry.shadow)
                sources.append(entry.tensor)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, sources)

    def pieces(self) -> dict[str, bytes]:
        """Return "buffer/<name>" -> raw bytes of the changing buffers as of the last `capture`.

        On a GPU this waits until the work queued before that boundary is done.
        """
        return self._bytes(lambda entry: entry.tensor if entry.shadow is None else entry.shadow)

    def live_pieces(self) -> dict[str, bytes]:
        """Return the changing buffers as they are now."""
        return self._bytes(lambda entry: entry.tensor)

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Put pieces back into the model in place; names that are not buffers' are left alone.

        Raises:
            MismatchError: a buffer that this model lacks, or of another size.
        """
        for key, raw in pieces.items():
            if not key.startswith("buffer/"):
                continue
            entry = self._known.get(key.removeprefix("buffer/"))
            if entry is None or entry.tensor.nbytes != len(raw):
                raise MismatchError(f"{key}: the checkpoint has {len(raw)} bytes, this model has no such buffer")
            device.fill(entry.tensor, raw)

    def _volatile(self) -> list[_Group]:
        """Return what to hand over: all that has a copy, or, if that is much, what has been seen to change."""
        kept = [group for group in self._groups if group.entries[0].shadow is not None]
        if sum(group.nbytes for group in kept) <= self._limit:
            return kept
        return [group for group in kept if group.statistics or group.changes > 1]

    def _bytes(self, of: Callable[[_Entry], torch.Tensor]) -> dict[str, bytes]:
        found = {}
        for group in self._volatile():
            for entry in group.entries:
                flat = device.flat_bytes(of(entry)).cpu()
                found[f"buffer/{entry.name}"] = bytes(device.view(flat)) if flat.numel() else b""
        return found


@dataclass
class _Entry:
    name: str
    owner: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    version: int = -1
    shadow: torch.Tensor | None = None


@dataclass
class _Group:
    """The buffers of one module."""

    module: nn.Module
    statistics: bool
    entries: list[_Entry] = field(default_factory=list)
    changes: int = 0  # the first look counts as one
    quiet: int = 0

    @property
    def nbytes(self) -> int:
        return sum(entry.tensor.nbytes for entry in self.entries)

    def changed(self) -> bool:
        """Say whether any of them may have changed since the last call, and note their versions."""
        found = self.statistics and self.module.training
        for entry in self.entries:
            live = entry.owner[entry.key]
            if live is not entry.tensor and live is not None:
                entry.tensor, entry.version = live, -1  # the module put another tensor in its place
            version = entry.tensor._version
            if version != entry.version:
                entry.version, found = version, True
        self.changes += found
        return found

    def rest(self) -> None:
        """Drop the copies of what has not changed since the beginning."""
        self.quiet += 1
        if self.quiet == QUIET and self.changes == 1:
            for entry in self.entries:
                entry.shadow = None


def _groups(model: nn.Module) -> Iterator[_Group]:
    clean = names(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        group = _Group(module, isinstance(module, _NormBase) and module.track_running_stats)
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                name = clean(f"{path}.{key}".removeprefix("."))
                group.entries.append(_Entry(name, module._buffers, key, tensor))
        if group.entries:
            yield group


def _wraps(module: nn.Module) -> bool:
    """Tell wrappers by their class's name: asking torch for the class of compiled modules imports its compiler."""
    kind = type(module).__name__
    if kind == "OptimizedModule":
        return True
    return isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
