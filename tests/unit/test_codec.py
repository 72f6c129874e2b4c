"""Values come back with the same type and the same bits; everything else is refused with its path."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import codec
from jitmpi.errors import AttachError, DamagedError

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b and repr(a) == repr(b)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value: object) -> None:
    """What was written is what is read, nested as it may be, whatever its keys."""
    assert same(codec.loads(codec.dumps(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, (3, "x")},
        frozenset({b"a"}),
        Counter({3: 2, 1: 1}),
        OrderedDict([("b", 1), ("a", (2, 3))]),
        deque([1, 2], maxlen=2),
        {"$tuple": [1], "plain": 2},
        {"$int": "0xff"},
        -(2**40_000),
        -0.0,
        5e-324,
        1j - 0.0,
        bytearray(b"\x00\xff"),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.Size([2, 3]),
        torch.device("cpu"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_listed_type_survives(value: object) -> None:
    """Sets, counters, ordered dictionaries, bounded deques, huge integers, NumPy scalars, torch dtypes survive."""
    back = codec.loads(codec.dumps(value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("bits", ["7ff0000000000000", "fff0000000000000", "7ff8000000000001", "fff8000000000abc"])
def test_infinities_and_nan_payloads_keep_their_bits(bits: str) -> None:
    """Not even the payload of a NaN changes."""
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    back = codec.loads(codec.dumps([value]))[0]
    assert struct.pack(">d", back).hex() == bits
    assert math.isnan(back) == math.isnan(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor of any dtype comes back bit for bit, also an empty one, a scalar, and a strided view."""
    raw = torch.randint(0, 2, (*shape, 8), dtype=torch.uint8)
    tensor = raw.flatten()[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    for value in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
        back = codec.loads(codec.dumps(value))
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.reshape(-1).view(torch.uint8).tolist() == value.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_parameters_and_arrays_keep_what_they_are() -> None:
    """A Parameter stays one, requires_grad stays, arrays keep byte order and can be written to."""
    assert isinstance(codec.loads(codec.dumps(torch.nn.Parameter(torch.ones(2)))), torch.nn.Parameter)
    assert codec.loads(codec.dumps(torch.ones(1, requires_grad=True))).requires_grad
    array = codec.loads(codec.dumps(np.arange(6, dtype=">i2").reshape(2, 3).T))
    assert array.dtype == np.dtype(">i2")
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]
    array[0, 0] = 9


class Own:
    """A type that the codec does not know."""


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"lr_lambdas": [lambda step: 1.0]}, "scheduler.lr_lambdas[0]"),
        ({"a": ({1: Own()},)}, "scheduler.a[0][1]"),
        (np.array([Own()], dtype=object), "scheduler"),
        ({"x": torch.ones(2).to_sparse()}, "scheduler.x"),
    ],
)
def test_other_values_are_refused_with_their_path(value: object, path: str) -> None:
    """The message names the path to the value that cannot be saved."""
    with pytest.raises(AttachError) as caught:
        codec.dumps(value, "scheduler")
    assert str(caught.value).startswith(f"{path}: ")


def test_a_structure_that_contains_itself_is_refused() -> None:
    """A cycle ends in an error, not in a crash."""
    value: list[object] = []
    value.append(value)
    with pytest.raises(AttachError, match="contains itself"):
        codec.dumps(value)


@pytest.mark.parametrize("text", [b"", b"{", b'{"$pickle":"x"}', b'{"$float":"zz"}', b'{"$dtype":"nn"}', b"\xff"])
def test_a_damaged_text_is_said_to_be_damaged(text: bytes) -> None:
    """No other error than DamagedError comes out of a text that nobody wrote."""
    with pytest.raises(DamagedError):
        codec.loads(text)
