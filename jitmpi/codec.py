"""Turn plain values into bytes (JSON text with tags) and back, exactly.

Rule 1: reading runs no code: only the types listed in `_WRITERS` exist, everything else is refused with its path.
Rule 2: what comes back has the same type and the same bits (floats, NaNs, tensors); only aliasing of values is lost.

JSON's own types stand for themselves; every other value is `{"$<tag>": payload}`. A dict whose keys are all plain
strings is a JSON object, unless a key begins with "$".
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from jitmpi.errors import AttachError, DamagedError

_DIGITS = 4000  # Python refuses to print longer integers in decimal (sys.set_int_max_str_digits); those go as hex


def dumps(value: object, name: str = "") -> bytes:
    """Write a value as UTF-8 JSON; `name` is the path that an error message begins with.

    Raises:
        AttachError: a value of another type, or a structure that contains itself; names the path to it.
    """
    try:
        tree = _encode(value, name)
    except RecursionError:
        raise AttachError(f"{name or 'value'}: nested too deeply, or it contains itself; it cannot be saved") from None
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Read what `dumps` wrote. Tensors come back on the kind of device that they were on, where there is one.

    Raises:
        DamagedError: not such a text.
    """
    try:
        return _decode(json.loads(bytes(data)))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, RecursionError) as error:
        raise DamagedError(f"a saved value cannot be read: {error}") from error


def _encode(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}.{key}" if path else key) for key, item in value.items()}
    writer = _WRITERS.get(kind) or _array_writer(value)
    if writer is None:
        what = f"{kind.__module__}.{kind.__qualname__}"
        raise AttachError(f"{path or 'value'}: a {what} cannot be saved; use plain values, arrays or tensors")
    tag, payload = writer(value, path)
    return payload if tag == "" else {f"${tag}": payload}


def _decode(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (tag, payload), *_ = tree.items()
        if tag.startswith("$"):
            return _READERS[tag[1:]](payload)
    return {key: _decode(item) for key, item in tree.items()}


def _write_int(value: int, path: str) -> tuple[str, Any]:
    return ("int", hex(value)) if value.bit_length() > _DIGITS else ("", value)


def _write_float(value: float, path: str) -> tuple[str, Any]:
    return ("", value) if math.isfinite(value) else ("float", struct.pack("<d", value).hex())


def _write_items(tag: str) -> Callable[[Any, str], tuple[str, Any]]:
    def write(value: Any, path: str) -> tuple[str, Any]:
        return tag, [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return write


def _write_pairs(tag: str) -> Callable[[Any, str], tuple[str, Any]]:
    def write(value: Any, path: str) -> tuple[str, Any]:
        return tag, [[_encode(k, f"{path}.keys"), _encode(v, f"{path}[{k!r}]")] for k, v in value.items()]

    return write


def _write_deque(value: deque[Any], path: str) -> tuple[str, Any]:
    return "deque", [value.maxlen, _write_items("")(value, path)[1]]


def _array_writer(value: Any) -> Callable[[Any, str], tuple[str, Any]] | None:
    """Return the writer of a torch or NumPy value; a program that never loaded them has none of theirs."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return _write_tensor
        if type(value) in (torch.dtype, torch.device):
            return lambda v, path: (type(v).__name__, str(v).removeprefix("torch."))
        if type(value) is torch.Size:
            return lambda v, path: ("size", list(v))
    if numpy is not None:
        if type(value) is numpy.ndarray and not value.dtype.hasobject and value.dtype.names is None:
            return _write_array
        if isinstance(value, numpy.generic) and not value.dtype.hasobject and value.dtype.names is None:
            return lambda v, path: ("scalar", [v.dtype.str, _text(v.tobytes())])
    return None


def _write_array(value: Any, path: str) -> tuple[str, Any]:
    return "array", [value.dtype.str, list(value.shape), _text(value.tobytes())]


def _write_tensor(value: Any, path: str) -> tuple[str, Any]:
    from jitmpi import device

    try:
        raw = _text(device.host_bytes(value))
    except AttachError as error:
        raise AttachError(f"{path or 'value'}: {error}") from None
    parameter = type(value).__name__ == "Parameter"
    where = value.device.type
    return "tensor", [device.dtype_name(value.dtype), list(value.shape), where, value.requires_grad, parameter, raw]


def _read_tensor(payload: Any) -> Any:
    import torch

    from jitmpi import device

    dtype, shape, where, requires_grad, parameter, raw = payload
    tensor = torch.empty(shape, dtype=device.dtype_of(dtype))
    device.fill(tensor, base64.b64decode(raw))
    if where == "cuda" and torch.cuda.is_available():
        tensor = tensor.cuda()
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _read_array(payload: Any) -> Any:
    import numpy

    dtype, shape, raw = payload
    return numpy.frombuffer(bytearray(base64.b64decode(raw)), numpy.dtype(dtype)).reshape(shape)


def _read_scalar(payload: Any) -> Any:
    return _read_array([payload[0], [1], payload[1]])[0]


def _read_torch(kind: str) -> Callable[[Any], Any]:
    def read(payload: Any) -> Any:
        import torch

        from jitmpi import device

        readers: dict[str, Callable[[Any], Any]] = {
            "dtype": device.dtype_of,
            "device": torch.device,
            "size": torch.Size,
        }
        return readers[kind](payload)

    return read


def _pairs(payload: Any) -> list[tuple[Any, Any]]:
    return [(_decode(key), _decode(item)) for key, item in payload]


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


_WRITERS: dict[type, Callable[[Any, str], tuple[str, Any]]] = {
    int: _write_int,
    float: _write_float,
    complex: lambda value, path: ("complex", struct.pack("<dd", value.real, value.imag).hex()),
    bytes: lambda value, path: ("bytes", _text(value)),
    bytearray: lambda value, path: ("bytearray", _text(value)),
    tuple: _write_items("tuple"),
    set: _write_items("set"),
    frozenset: _write_items("frozenset"),
    deque: _write_deque,
    dict: _write_pairs("dict"),
    OrderedDict: _write_pairs("ordered"),
    Counter: _write_pairs("counter"),
}

_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "tuple": lambda items: tuple(_decode(items)),
    "set": lambda items: set(_decode(items)),
    "frozenset": lambda items: frozenset(_decode(items)),
    "deque": lambda payload: deque(_decode(payload[1]), payload[0]),
    "dict": lambda payload: dict(_pairs(payload)),
    "ordered": lambda payload: OrderedDict(_pairs(payload)),
    "counter": lambda payload: Counter(dict(_pairs(payload))),
    "tensor": _read_tensor,
    "array": _read_array,
    "scalar": _read_scalar,
    "dtype": _read_torch("dtype"),
    "device": _read_torch("device"),
    "size": _read_torch("size"),
}
