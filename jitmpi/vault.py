"""Give the writers what they need of a training state at rest: names, bytes, scalars.

Rule: used after the gate is closed and the training thread rests, from the threads that save.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jitmpi.events import TensorInfo
from jitmpi.settle import Rest

if TYPE_CHECKING:
    import torch

    from jitmpi.device import HostReader
    from jitmpi.torch_state import TrainingState


class Vault:
    """One training state, listed once and read by rows."""

    def __init__(self, state: TrainingState, reader: HostReader) -> None:
        self._state, self._reader = state, reader
        self._listed: list[tuple[TensorInfo, torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def note(self, rest: Rest) -> str:
        """Finish a minibatch whose tail was cut off; return what could not be finished, "" for nothing."""
        if not rest.cut:
            return ""
        return self._state.complete_tail()

    def tensors(self) -> list[TensorInfo]:
        """List the state's tensors in canonical order."""
        return [info for info, _ in self._list()]

    def read(self, index: int, start: int, stop: int) -> memoryview:
        """Return rows [start, stop) of tensor `index` as contiguous raw bytes."""
        return self._reader.read(self._list()[index][1], start, stop)

    def scalars(self) -> bytes:
        """Return what is not a tensor: hyper-parameters, scheduler, scaler."""
        return self._state.scalars()

    def _list(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        with self._lock:
            if self._listed is None:
                self._listed = self._state.tensors()
            return self._listed
