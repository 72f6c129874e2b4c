"""Take the tensors out of nested state, and hang them back in.

`strip` turns a value into (a skeleton that the codec can write, named tensors); `plant` puts the two together again.
A skeleton is [kind, payload]: "plain" a value's text, "dict" pairs, "list"/"tuple" items, "tensor" [name, place].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from jitmpi import codec


class Tensors:
    """Named tensors in the order they were found, each once, however many places hold it."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}  # id -> name, of tensors that are listed elsewhere or here
        self._found: list[tuple[str, torch.Tensor]] = []

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Return what was added."""
        return self._found

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Note a tensor and return the name that it goes by."""
        known = self.known.get(id(tensor))
        if known is not None:
            return known
        self.known[id(tensor)] = name
        self._found.append((name, tensor))
        return name


def strip(value: Any, name: str, found: Tensors, *, like: Any = None) -> list[Any]:
    """Return the skeleton of a value and add its tensors to `found` as "<name>/<key>/...".

    Args:
        like: the parameter whose state it is.

    Raises:
        AttachError: a value that the codec cannot write; names the path to it.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", [found.add(name, value), _where(value, like)]]
    if type(value) in (dict, OrderedDict) and _holds_tensor(value):
        return ["dict", [[key, strip(item, f"{name}/{key}", found, like=like)] for key, item in value.items()]]
    if type(value) in (list, tuple) and _holds_tensor(value):
        items = [strip(item, f"{name}/{i}", found, like=like) for i, item in enumerate(value)]
        return [type(value).__name__, items]
    return ["plain", codec.dumps(value, name).decode()]


def plant(skeleton: Any, loaded: Mapping[str, torch.Tensor], like: torch.Tensor | None) -> Any:
    """Return the value of a skeleton; `like` is the parameter whose state it is, for the device and the strides."""
    kind, payload = skeleton
    if kind == "tensor":
        name, where = payload
        return _place(loaded[name], where, like)
    if kind == "dict":
        return {key: plant(item, loaded, like) for key, item in payload}
    if kind in ("list", "tuple"):
        items = [plant(item, loaded, like) for item in payload]
        return items if kind == "list" else tuple(items)
    return codec.loads(payload.encode())


def _where(tensor: torch.Tensor, like: Any) -> str:
    """Say "like" for the device and strides of its parameter, "same" for its device, else the kind of device."""
    if isinstance(like, torch.Tensor) and tensor.device == like.device:
        return "like" if (tensor.shape, tensor.stride()) == (like.shape, like.stride()) else "same"
    return tensor.device.type


def _place(tensor: torch.Tensor, where: str, like: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor where it lived; the very same object if it is there already."""
    if where == "like" and like is not None:
        if tensor.device == like.device and tensor.stride() == like.stride():
            return tensor
        return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    if where == "same" and like is not None:
        return tensor.to(like.device)
    return tensor.to(where if tensor.device.type != where else tensor.device)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    items = value.values() if type(value) in (dict, OrderedDict) else value if type(value) in (list, tuple) else ()
    return any(_holds_tensor(item) for item in items)
