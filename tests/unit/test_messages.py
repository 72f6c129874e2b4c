"""What ranks tell each other arrives as it was said, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import messages
from jitmpi.errors import WireError
from jitmpi.events import Context, Described, Fault, Piece, Report, SavePlan, TensorInfo, Written

ranks = st.integers(0, 2**31)
tuples = st.lists(ranks, max_size=5).map(tuple)
texts = st.text(max_size=40)
contexts = st.builds(
    Context,
    rank=ranks,
    minibatch=st.integers(-1, 2**62),
    exact=st.booleans(),
    pieces=st.dictionaries(texts, st.binary(max_size=64), max_size=6),
)
faults = st.builds(
    Fault,
    kind=st.sampled_from(["death", "hang", "exception", "signal"]),
    ranks=tuples,
    unreachable=tuples,
    minibatch=st.integers(-1),
    detail=texts,
    when=st.floats(allow_nan=False, allow_infinity=False),
)
reports = st.builds(
    Report,
    rank=ranks,
    minibatch=st.integers(-1),
    intact=st.booleans(),
    shard=ranks,
    lost=tuples,
    contexts=st.lists(contexts, max_size=3).map(tuple),
    error=texts,
    phase=texts,
    note=texts,
)
plans = st.builds(
    SavePlan,
    epoch=ranks,
    coordinator=ranks,
    minibatch=ranks,
    savers=st.dictionaries(ranks, tuples, max_size=3),
    directory=texts,
)
pieces = st.builds(Piece, name=texts, start=ranks, stop=ranks, crc32=st.integers(0, 2**32 - 1))
written = st.builds(
    Written, rank=ranks, epoch=ranks, file=texts, nbytes=ranks, pieces=st.lists(pieces, max_size=4).map(tuple)
)
infos = st.builds(TensorInfo, name=texts, shape=tuples, dtype=texts, nbytes=ranks)
described = st.builds(
    Described, epoch=ranks, tensors=st.lists(infos, max_size=3).map(tuple), scalars=st.binary(max_size=9)
)
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "context": messages.decode_context,
    "fault": messages.decode_fault,
    "report": messages.decode_report,
    "plan": messages.decode_plan,
    "written": messages.decode_written,
    "described": messages.decode_described,
    "failed": messages.decode_dict,
}
values = st.one_of(
    st.tuples(st.just("context"), contexts),
    st.tuples(st.just("fault"), faults),
    st.tuples(st.just("report"), reports),
    st.tuples(st.just("plan"), plans),
    st.tuples(st.just("written"), written),
    st.tuples(st.just("described"), described),
    st.tuples(st.just("failed"), st.dictionaries(texts, st.one_of(texts, ranks, st.none()), max_size=4)),
)


@given(values)
def test_round_trip(told: tuple[str, Any]) -> None:
    """Every value comes back equal."""
    kind, value = told
    assert DECODERS[kind](messages.encode(kind, value)) == value


@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=200))
def test_garbage_is_a_wire_error(kind: str, payload: bytes) -> None:
    """Bytes from nowhere never raise anything but WireError, and are never taken for a context or report."""
    try:
        value = DECODERS[kind](payload)
    except WireError:
        return
    assert kind in ("context", "failed")  # the only kinds so short that chance can write one
    assert isinstance(value, (Context, dict))


@given(values, st.data())
def test_damage_is_noticed_or_harmless(told: tuple[str, Any], data: st.DataObject) -> None:
    """A payload with changed or missing bytes decodes to the same type or raises WireError."""
    kind, value = told
    payload = bytearray(messages.encode(kind, value))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    for damaged in (bytes(payload), cut):
        with suppress(WireError):
            assert type(DECODERS[kind](damaged)) is type(value)


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("fault", b"[" * 100_000),
        ("fault", b'{"kind": 1}'),
        ("plan", b'{"epoch":1,"coordinator":0,"minibatch":0,"savers":[[0,[true]]],"directory":""}'),
        ("fault", b'{"kind":"","ranks":[],"unreachable":[],"minibatch":0,"detail":"","when":NaN}'),
        ("fault", b'{"kind":"","ranks":[],"unreachable":[],"minibatch":0,"detail":"","when":1' + b"0" * 999 + b"}"),
        ("written", b'{"rank":0,"epoch":0,"file":"","nbytes":0.5,"pieces":[]}'),
        ("failed", b"[]"),
        ("failed", b"\xff\xfe"),
    ],
)
def test_malformed_headers_are_wire_errors(kind: str, header: bytes) -> None:
    """Deep nesting, wrong types, extra or missing fields and impossible numbers are refused."""
    with pytest.raises(WireError, match="malformed"):
        DECODERS[kind](len(header).to_bytes(4, "big") + header)


def test_a_context_that_claims_too_many_pieces_is_refused() -> None:
    """A length in a payload reserves no memory before it is checked against what came."""
    payload = messages.HEAD.pack(0, 0, 1) + messages.PIECES.pack(2**32 - 1, 2) + b"[]"
    with pytest.raises(WireError, match="cut short"):
        messages.decode_context(payload)


def test_a_value_of_another_kind_is_not_sent() -> None:
    """`encode` names a mismatch of kind and value instead of sending it."""
    with pytest.raises(WireError, match="plan frame does not hold a dict"):
        messages.encode("plan", {})


def test_a_newer_forecast_replaces_an_older_one_and_nothing_else() -> None:
    """Sixteen micro-batches must not push the minibatch's exact context out of a buddy's memory."""
    exact, other = (messages.encode_context(Context(1, 7, True, {"user": value})) for value in (b"a", b"b"))
    first, second = (messages.encode_context(Context(1, 8, False, {"user": value})) for value in (b"a", b"b"))
    later = messages.encode_context(Context(1, 9, False, {}))
    assert messages.replaces(second, first)
    assert not any(
        messages.replaces(*pair) for pair in ((other, exact), (first, exact), (exact, first), (later, first))
    )
    assert not messages.replaces(b"", b"")
