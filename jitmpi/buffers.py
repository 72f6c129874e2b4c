"""Keep the buffers that change outside the update (BatchNorm statistics and such) as they were at the last boundary.

Rule 1: a buffer is copied only when it changed since the boundary before; else it costs a look at its version.
Rule 2: they belong to one rank (in DDP each rank has its own until rank 0's are broadcast at the next forward), so they
travel in the rank's replay context and not with the shard.

A version says only that some in-place operation ran, and native batch norm does not even say that about the statistics
it writes. So the buffers of one module count as changed together (`num_batches_tracked` tells on the others), and those
of a normalization in training always do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    """Copies of a model's changing buffers, taken at each boundary.

    Buffers on the CPU become bytes at once and are what `pieces` gives. Those on a GPU are copied on the GPU, so that
    no minibatch waits for it; `device_pieces` reads the copies when a fault needs them.
    """

    def __init__(self, model: nn.Module, copies: Iterable[nn.Module] = (), *, limit: int = LIMIT) -> None:
        """Look at a model's buffers; those of `copies` in it change behind the update, where no forecast looks."""
        self._limit = limit
        self._groups = list(_groups(model, {id(module) for copy in copies for module in copy.modules()}))
        self.watches = bool(self._groups)  # whether there is anything to copy
        self._known = {entry.piece: entry for group in self._groups for entry in group.entries}
        self._handed: list[_Entry] = []  # what `pieces` gives
        self._nbytes = 0

    @property
    def travels(self) -> bool:
        """Whether the pieces are small enough to be handed to buddies with every minibatch."""
        return self._nbytes <= self._limit

    def capture(self) -> None:
        """Copy what changed since the last call; nothing else is touched, nothing is waited for."""
        copies: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        news = False
        for group in self._groups:
            if not group.changed():
                news |= group.rest()
                continue
            news |= group.changes < 3
            for entry in group.entries:
                if entry.size >= 0:
                    entry.raw = ctypes.string_at(entry.tensor.data_ptr(), entry.size)
                    continue
                if entry.shadow is None or entry.shadow.shape != entry.tensor.shape:
                    entry.shadow = torch.empty_like(entry.tensor)
                copies.append(entry.shadow)
                sources.append(entry.tensor)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, sources)
        if news:
            self._choose()

    def pieces(self) -> dict[str, bytes]:
        """Return "buffer/<name>" -> raw bytes of the changing CPU buffers as of the last `capture`."""
        return {entry.piece: entry.raw for entry in self._handed if entry.raw is not None}

    def live_pieces(self) -> dict[str, bytes]:
        """Return the changing CPU buffers as they are now, but for those that change once more before the boundary."""
        found = {}
        for entry in self._handed:
            if entry.late:
                continue
            tensor = entry.owner[entry.key]
            if tensor is not entry.tensor:  # replaced since the boundary
                tensor = entry.tensor if tensor is None else tensor.detach().cpu().contiguous()
            found[entry.piece] = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        return found

    def device_pieces(self, *, live: bool) -> dict[str, bytes]:
        """Return the changing GPU buffers, now (`live`) or as of the last `capture`, without the training's stream.

        Raises:
            SaveError: the device does not answer.
        """
        found = {}
        for group in self._groups:
            for entry in group.entries:
                if entry.shadow is not None:
                    found[entry.piece] = device.host_bytes(entry.tensor if live else entry.shadow)
        return found

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Put pieces back into the model in place; names that are not buffers' are left alone.

        Raises:
            MismatchError: a buffer that this model lacks, or of another size.
        """
        for key, raw in pieces.items():
            if not key.startswith("buffer/"):
                continue
            entry = self._known.get(key)
            if entry is None or entry.tensor.nbytes != len(raw):
                raise MismatchError(f"{key}: the checkpoint has {len(raw)} bytes, this model has no such buffer")
            device.fill(entry.tensor, raw)

    def _choose(self) -> None:
        """Choose what to hand over: all that has a copy, or, if that is much, what has been seen to change."""
        kept = [group for group in self._groups if group.kept]
        if sum(entry.size for group in kept for entry in group.entries) > self._limit:
            kept = [group for group in kept if group.statistics or group.changes > 1]
        self._handed = [entry for group in kept for entry in group.entries if entry.size >= 0]
        self._nbytes = sum(entry.size for entry in self._handed)


@dataclass(slots=True)
class _Entry:
    piece: str  # "buffer/<name>"
    owner: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    size: int  # bytes, of one that is plain memory of this process; -1 for others
    late: bool = False  # it changes behind the update
    version: int = -1
    raw: bytes | None = None  # the values at the last boundary
    shadow: torch.Tensor | None = None  # the same where the values are not plain memory


@dataclass(slots=True)
class _Group:
    """The buffers of one module."""

    module: nn.Module
    statistics: bool
    entries: list[_Entry] = field(default_factory=list)
    changes: int = 0  # the first look counts as one
    quiet: int = 0
    kept: bool = False  # whether there are copies

    def changed(self) -> bool:
        """Say whether any of them may have changed since the last call, and note their versions."""
        found = self.statistics and self.module.training
        for entry in self.entries:
            live = entry.owner[entry.key]
            if live is not entry.tensor and live is not None:  # the module put another tensor in its place
                entry.tensor, entry.size, entry.version = live, _plain_size(live), -1
            version = entry.tensor._version
            if version != entry.version:
                entry.version, found = version, True
        if found:
            self.changes += 1
            self.kept = True
        return found

    def rest(self) -> bool:
        """Drop the copies of what has not changed since the beginning; returns whether it did."""
        self.quiet += 1
        if self.quiet != QUIET or self.changes > 1:
            return False
        self.kept = False
        for entry in self.entries:
            entry.raw = entry.shadow = None
        return True


def _groups(model: nn.Module, late: Collection[int]) -> Iterator[_Group]:
    clean = names(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        group = _Group(module, isinstance(module, _NormBase) and module.track_running_stats)
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                piece = f"buffer/{clean(f'{path}.{key}'.removeprefix('.'))}"
                entry = _Entry(piece, module._buffers, key, tensor, _plain_size(tensor), id(module) in late)
                group.entries.append(entry)
        if group.entries:
            yield group


def _plain_size(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.device.type == "cpu" and tensor.is_contiguous() else -1


def _wraps(module: nn.Module) -> bool:
    """Tell wrappers by their class's name: asking torch for the class of compiled modules imports its compiler."""
    kind = type(module).__name__
    if kind == "OptimizedModule":
        return True
    return isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
