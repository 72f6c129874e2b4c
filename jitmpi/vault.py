"""Give the writers what they need of a training state at rest: names, bytes, scalars.

Rule: used after the gate is closed and the training thread rests, from the threads that save. On a GPU the training's
own stream may be stuck; nothing here uses it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from jitmpi import device
from jitmpi.errors import AttachError, SaveError
from jitmpi.events import Context, TensorInfo
from jitmpi.settle import Rest

if TYPE_CHECKING:
    import torch

    from jitmpi.buffers import BufferShadow
    from jitmpi.torch_state import TrainingState


class Vault:
    """One training state, listed once and read by rows.

    Attributes:
        updates: that a minibatch has, as far as the number of optimizers tells.
        clock: tells whether the device has done the last update; the training thread sets it.
    """

    def __init__(self, state: TrainingState, shadow: BufferShadow) -> None:
        self._state, self._shadow = state, shadow
        self.updates = state.fewest_updates
        self._reader = device.HostReader()
        tensors = [tensor for _, tensor in state.tensors()]
        device.prepare(tensors, self._reader)
        device.prepare(tensors)
        self.clock = device.StreamClock(next((t.device for t in tensors if t.is_cuda), device.CPU))
        self._listed: list[tuple[TensorInfo, torch.Tensor]] | None = None
        self._scalars: bytes | None = None
        self._lock = threading.Lock()

    def still(self) -> bool:
        """Whether the device has done all updates that Python has queued."""
        return self.clock.done()

    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._state.training

    def note(self, rest: Rest) -> str:
        """Finish a minibatch whose tail was cut off and hold on to its scalars, for the script may still be running.

        Returns what could not be finished, "" for nothing.
        """
        note = self._state.complete_tail() if rest.cut else self._state.doubts(rest.minibatch)
        if rest.cut and self._state.copies:
            note = "; ".join(filter(None, [note, "the averaged model may lack the last minibatch"]))
        with suppress(AttachError, RuntimeError):  # the writers will say why
            self._scalars = self._state.scalars_of(rest.minibatch)
        return note

    def contexts(self, rest: Rest) -> tuple[tuple[Context, ...], bool]:
        """Return this rank's own contexts, GPU buffers included, and whether its device still answers."""
        here, ahead = rest.place.context, rest.place.forecast
        known = [(noted.context(), noted is ahead) for noted in (here, ahead) if noted is not None]
        try:
            return tuple(self._whole(context, live=live) for context, live in known), True
        except SaveError:
            return tuple(context for context, _ in known), False

    def tensors(self) -> list[TensorInfo]:
        """List the state's tensors in canonical order."""
        return [info for info, _ in self._list()]

    def read(self, index: int, start: int, stop: int) -> memoryview:
        """Return rows [start, stop) of tensor `index` as contiguous raw bytes."""
        return self._reader.read(self._list()[index][1], start, stop)

    def scalars(self) -> bytes:
        """Return what is not a tensor: hyper-parameters, scheduler, scaler."""
        return self._state.scalars() if self._scalars is None else self._scalars

    def _whole(self, context: Context, *, live: bool) -> Context:
        pieces = {**self._shadow.device_pieces(live=live), **self._state.buffer_source()}
        return Context(context.rank, context.minibatch, context.exact, {**context.pieces, **pieces})

    def _list(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        with self._lock:
            if self._listed is None:
                self._listed = self._state.tensors()
            return self._listed
