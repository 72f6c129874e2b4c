"""Bring a new process's DistributedDataParallel to the state that a warm one has, before the first replayed minibatch.

Why: after its first backward DDP rebuilds its gradient buckets in the order in which gradients became ready, and the
order of the sums in an all-reduce changes with the buckets. A restarted DDP has the first buckets again, so its bits
would differ.

Rule: a rehearsal leaves no trace but the reducer's. The first training forward is run with the same inputs and a
backward of all its outputs; then gradients, buffers and random states are put back and the real forward runs.

All ranks resume at the same minibatch, so all rehearse, and their collectives match. Not covered, because torch offers
no way to put them back: the own state of a communication hook (PowerSGD; hooks without state, such as fp16 compression,
are fine), side effects of the model's forward and of the user's hooks, which run once more, and a loss that reaches
other parameters than the outputs do. cuDNN's autotuning and atomics can differ between processes with or without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jitmpi import device, random_state


class Rehearsal:
    """What `rehearse_once` installed.

    Attributes:
        done: whether it has run, or there is nothing to rehearse.
        note: why there is nothing, in one line; "" otherwise.
    """

    def __init__(self, model: nn.Module, minibatch: int) -> None:
        self._wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._passes = min(minibatch, max((_warm_after(wrapper) for wrapper in self._wrappers), default=0))
        self.note = "minibatch 0 has the first buckets" if minibatch == 0 else _reason(self._wrappers)
        self.done = bool(self.note)
        self._handle: Any = None
        if not self.done:
            self._handle = model.register_forward_pre_hook(self._hook, prepend=True, with_kwargs=True)

    def cancel(self) -> None:
        """Take the hook out."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return  # an evaluation first: the reducer has no part in it
        self.cancel()
        self.done = True
        for _ in range(self._passes):
            with _no_trace(model, self._wrappers):
                detached = [_map(value, _detach) for value in (args, kwargs)]
                outputs = [t for t in _tensors(model(*detached[0], **detached[1])) if t.requires_grad]
                if outputs:
                    with _no_autocast():
                        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def rehearse_once(model: nn.Module, minibatch: int = 2) -> Rehearsal:
    """Let the next training forward of a model that was just restored be rehearsed; nothing to do without DDP.

    Args:
        model: what the script calls: DDP itself, compiled or not, or a module that contains it.
        minibatch: the one that is replayed. Nothing is done for 0, where the undisturbed run has the first buckets too.
    """
    return Rehearsal(model, minibatch)


def rehearse_parts(parts: Sequence[nn.Module], minibatch: int) -> list[str]:
    """Let each of the modules that a script calls be rehearsed; return why some are not, "" left out."""
    wrapped = [part for part in parts if any(isinstance(m, DistributedDataParallel) for m in part.modules())]
    rehearsals = [rehearse_once(part, minibatch) for part in wrapped or parts[:1]]
    return [rehearsal.note for rehearsal in rehearsals if rehearsal.note]


def _warm_after(wrapper: DistributedDataParallel) -> int:
    """Return after how many minibatches the reducer no longer changes.

    Seen with torch 2.13: the first backward gives the new buckets, with a static graph the second one does.
    """
    return 2 if wrapper.static_graph else 1


def _reason(wrappers: list[DistributedDataParallel]) -> str:
    if not wrappers:
        return "no DistributedDataParallel"
    for wrapper in wrappers:
        for name, param in wrapper.module.named_parameters():
            if getattr(param, "_post_accumulate_grad_hooks", None):
                return f"{name} has a hook that runs when its gradient is ready and may update it; DDP is not rehearsed"
    return ""


@contextmanager
def _no_trace(model: nn.Module, wrappers: list[DistributedDataParallel]) -> Iterator[None]:
    """Put gradients, buffers, random states and the wrappers' synchronization back at the end."""
    with ExitStack() as stack:
        stack.callback(random_state.restore, random_state.capture())
        stack.callback(_put_back_buffers, _buffers(model))
        gradients = [(p, p.grad) for p in model.parameters()]
        stack.callback(_put_back_gradients, gradients)
        for param, _ in gradients:
            param.grad = None
        for wrapper in wrappers:  # the undisturbed run's first backward that counted was a synchronized one
            stack.callback(setattr, wrapper, "require_backward_grad_sync", wrapper.require_backward_grad_sync)
            wrapper.require_backward_grad_sync = True
        stack.callback(torch.clear_autocast_cache)  # casts made in the rehearsal belong to its graph
        yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave autocast: a backward is not meant to run in it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


Buffer = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]


def _buffers(model: nn.Module) -> list[Buffer]:
    """Return (owner, key, the tensor, its values) of every buffer."""
    return [
        (module._buffers, key, tensor, tensor.detach().clone())
        for module in model.modules()
        for key, tensor in module._buffers.items()
        if tensor is not None
    ]


def _put_back_buffers(buffers: list[Buffer]) -> None:
    with torch.no_grad():
        for owner, key, tensor, values in buffers:
            device.put(tensor, values)
            owner[key] = tensor


def _put_back_gradients(gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for param, gradient in gradients:
        param.grad = gradient


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an input and cut it off what computed it: the real forward and backward still need both."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild nested lists, tuples and dicts with their tensors changed; other values are passed on as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
