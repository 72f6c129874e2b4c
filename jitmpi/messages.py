"""Turn the values that ranks tell each other into the payloads of frames, and back.

Rule 1: what comes in is only read: JSON and raw bytes, no pickle; whatever is malformed ends in WireError.
Rule 2: what is handed over with every minibatch is encoded once and then patched (`sheet`); nothing here is on the hot
path but `encode_pieces`, for scripts that have a state of their own.

A payload is a length (4 bytes), that much JSON, and raw pieces whose lengths the JSON or the head tells.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import IntEnum
from functools import lru_cache, wraps
from typing import Any, Final, TypeVar

from jitmpi.errors import WireError
from jitmpi.events import Context, Described, Fault, Piece, Report, SavePlan, TensorInfo, Written


class Kind(IntEnum):
    """What a frame holds."""

    CONTEXT = 1  # a rank's replay context, to its buddies
    FAULT = 2  # what one rank saw
    REPORT = 3  # what a survivor holds, to the coordinator
    PLAN = 4  # who writes what, from the coordinator
    WRITTEN = 5  # a saver's file is durable
    FAILED = 6  # a saver could not write
    COMMITTED = 7  # the checkpoint is committed; leave
    ABORT = 8  # nothing can be saved; leave
    GOODBYE = 9  # an orderly end; the connection's close that follows is no fault
    START = 10  # what a feed of the data began with, to the buddies; part of every context of that feed
    DESCRIBED = 11  # what the savers' state consists of, from the first of them to a coordinator that holds another
    ASK = 12  # is anybody busy outside the minibatch? before a hang is called
    BUSY = 13  # yes


CONTEXT, FAULT, REPORT, PLAN, WRITTEN, FAILED, COMMITTED, ABORT, GOODBYE, START, DESCRIBED, ASK, BUSY = Kind
HEAD: Final = struct.Struct("=qqq")  # the head of a context: rank, minibatch, exact; pieces follow
FORECAST: Final = bytes(8)  # the last of these
PIECES: Final = struct.Struct("!II")  # how many pieces, bytes of their names; names, lengths and values follow
LENGTH: Final = struct.Struct("!I")
REPORT_FIELDS: Final = ("rank", "minibatch", "intact", "shard", "lost", "error", "phase", "note")
T = TypeVar("T")


def encode_context(context: Context) -> bytes:
    """Encode a replay context."""
    return HEAD.pack(context.rank, context.minibatch, context.exact) + encode_pieces(context.pieces)


def encode_pieces(pieces: Mapping[str, bytes]) -> bytes:
    """Encode names and values; about 3 us for six pieces of 8 KB in all."""
    names, lengths = _layout(tuple(pieces))
    values = pieces.values()
    return b"".join((PIECES.pack(len(pieces), len(names)), names, lengths.pack(*map(len, values)), *values))


def replaces(payload: bytes, older: bytes) -> bool:
    """Whether an encoded context is a newer forecast of the same minibatch; each micro-batch makes one.

    Reads the heads only: it runs for every context that comes in.
    """
    return payload[: HEAD.size] == older[: HEAD.size] and payload[HEAD.size - 8 : HEAD.size] == FORECAST


@lru_cache(maxsize=16)
def _layout(names: tuple[str, ...]) -> tuple[bytes, struct.Struct]:
    return json.dumps(names).encode(), struct.Struct(f"={len(names)}I")


def strict(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Let everything that malformed input can raise become a WireError."""

    @wraps(decode)
    def checked(payload: bytes) -> T:
        try:
            return decode(payload)
        except (KeyError, TypeError, ValueError, OverflowError, struct.error, RecursionError) as error:
            what = decode.__name__.removeprefix("decode_")
            raise WireError(f"a malformed {what} of {len(payload)} bytes: {error}") from error

    return checked


@strict
def decode_context(payload: bytes) -> Context:
    """Read back what `encode_context` gave.

    Raises:
        WireError: it is malformed.
    """
    rank, minibatch, exact = HEAD.unpack_from(payload)
    if exact not in (0, 1):
        raise ValueError("its head contradicts itself")
    return Context(rank, minibatch, bool(exact), decode_pieces(payload, HEAD.size))


def decode_pieces(payload: bytes, start: int = 0) -> dict[str, bytes]:
    """Read back what `encode_pieces` gave, to the end of the payload.

    Raises:
        ValueError, TypeError, struct.error, RecursionError: it is malformed.
    """
    count, size = PIECES.unpack_from(payload, start)
    start += PIECES.size
    names = _json(payload[start : start + size])
    start += size
    if count * 4 > len(payload) - start:
        raise ValueError("it is cut short")
    lengths = struct.unpack_from(f"={count}I", payload, start)
    pieces = dict(zip(_strings(names), _split(payload, start + 4 * count, lengths), strict=True))
    if len(pieces) != count:
        raise ValueError("two of its pieces have one name")
    return pieces


def encode_fault(fault: Fault) -> bytes:
    """Encode a fault."""
    return _pack(asdict(fault))


@strict
def decode_fault(payload: bytes) -> Fault:
    """Read back what `encode_fault` gave.

    Raises:
        WireError: it is malformed.
    """
    raw = _fields(_plain(payload), "kind", "ranks", "unreachable", "minibatch", "detail", "when")
    return Fault(
        kind=_string(raw["kind"]),
        ranks=_ints(raw["ranks"]),
        unreachable=_ints(raw["unreachable"]),
        minibatch=_int(raw["minibatch"]),
        detail=_string(raw["detail"]),
        when=_number(raw["when"]),
    )


def encode_report(report: Report) -> bytes:
    """Encode a report with the contexts it carries."""
    contexts = [encode_context(context) for context in report.contexts]
    raw = {name: getattr(report, name) for name in REPORT_FIELDS}
    return _pack({**raw, "contexts": [len(context) for context in contexts]}, *contexts)


@strict
def decode_report(payload: bytes) -> Report:
    """Read back what `encode_report` gave.

    Raises:
        WireError: it is malformed.
    """
    values, start = _unpack(payload)
    raw = _fields(values, *REPORT_FIELDS, "contexts")
    if type(raw["intact"]) is not bool:
        raise TypeError("intact is not a truth value")
    return Report(
        rank=_int(raw["rank"]),
        minibatch=_int(raw["minibatch"]),
        intact=raw["intact"],
        shard=_int(raw["shard"]),
        lost=_ints(raw["lost"]),
        contexts=tuple(decode_context(part) for part in _split(payload, start, _ints(raw["contexts"]))),
        error=_string(raw["error"]),
        phase=_string(raw["phase"]),
        note=_string(raw["note"]),
    )


def encode_plan(plan: SavePlan) -> bytes:
    """Encode a plan."""
    return _pack({**asdict(plan), "savers": sorted(plan.savers.items())})


@strict
def decode_plan(payload: bytes) -> SavePlan:
    """Read back what `encode_plan` gave.

    Raises:
        WireError: it is malformed.
    """
    raw = _fields(_plain(payload), "epoch", "coordinator", "minibatch", "savers", "directory")
    return SavePlan(
        epoch=_int(raw["epoch"]),
        coordinator=_int(raw["coordinator"]),
        minibatch=_int(raw["minibatch"]),
        savers={_int(shard): _ints(ranks) for shard, ranks in _list(raw["savers"])},
        directory=_string(raw["directory"]),
    )


def encode_written(written: Written) -> bytes:
    """Encode a saver's answer."""
    return _pack(asdict(written))


@strict
def decode_written(payload: bytes) -> Written:
    """Read back what `encode_written` gave.

    Raises:
        WireError: it is malformed.
    """
    raw = _fields(_plain(payload), "rank", "epoch", "file", "nbytes", "pieces")
    pieces = [_fields(piece, "name", "start", "stop", "crc32") for piece in _list(raw["pieces"])]
    return Written(
        rank=_int(raw["rank"]),
        epoch=_int(raw["epoch"]),
        file=_string(raw["file"]),
        nbytes=_int(raw["nbytes"]),
        pieces=tuple(Piece(_string(p["name"]), _int(p["start"]), _int(p["stop"]), _int(p["crc32"])) for p in pieces),
    )


def encode_described(described: Described) -> bytes:
    """Encode what a saver's state consists of."""
    header = {"epoch": described.epoch, "tensors": [asdict(tensor) for tensor in described.tensors]}
    return _pack(header, described.scalars)


@strict
def decode_described(payload: bytes) -> Described:
    """Read back what `encode_described` gave.

    Raises:
        WireError: it is malformed.
    """
    values, start = _unpack(payload)
    raw = _fields(values, "epoch", "tensors")
    tensors = [_fields(tensor, "name", "shape", "dtype", "nbytes") for tensor in _list(raw["tensors"])]
    infos = [TensorInfo(_string(t["name"]), _ints(t["shape"]), _string(t["dtype"]), _int(t["nbytes"])) for t in tensors]
    return Described(_int(raw["epoch"]), tuple(infos), payload[start:])


def encode_dict(values: Mapping[str, Any]) -> bytes:
    """Encode what has no type of its own (FAILED, COMMITTED, ABORT, GOODBYE): names to plain JSON values."""
    return _pack(dict(values))


@strict
def decode_dict(payload: bytes) -> dict[str, Any]:
    """Read back what `encode_dict` gave; the receiver checks each value it uses.

    Raises:
        WireError: it is malformed.
    """
    return _plain(payload)


def encode(kind: str, value: object) -> bytes:
    """Encode a value for a frame of this kind, "fault" for FAULT and so on.

    Raises:
        WireError: no frame of this kind holds such a value.
    """
    match value:
        case Context() if kind in ("context", "start"):
            return encode_context(value)
        case Fault() if kind == "fault":
            return encode_fault(value)
        case Report() if kind == "report":
            return encode_report(value)
        case SavePlan() if kind == "plan":
            return encode_plan(value)
        case Written() if kind == "written":
            return encode_written(value)
        case Described() if kind == "described":
            return encode_described(value)
        case dict() if kind in ("failed", "committed", "abort", "goodbye"):
            return encode_dict(value)
    raise WireError(f"a {kind} frame does not hold a {type(value).__name__}")


def _pack(values: dict[str, Any], *parts: bytes) -> bytes:
    header = json.dumps(values, allow_nan=False).encode()
    return b"".join((LENGTH.pack(len(header)), header, *parts))


def _unpack(payload: bytes) -> tuple[dict[str, Any], int]:
    (size,) = LENGTH.unpack_from(payload)
    start = LENGTH.size + size
    if start > len(payload):
        raise ValueError("it is cut short")
    values = _json(payload[LENGTH.size : start])
    if type(values) is not dict:
        raise TypeError("its header is not an object")
    return values, start


def _plain(payload: bytes) -> dict[str, Any]:
    values, end = _unpack(payload)
    if end != len(payload):
        raise ValueError("bytes follow its end")
    return values


def _json(text: bytes) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _split(payload: bytes, start: int, lengths: tuple[int, ...]) -> list[bytes]:
    if min(lengths, default=0) < 0 or start + sum(lengths) != len(payload):
        raise ValueError("its pieces do not fill it")
    parts = []
    for length in lengths:
        parts.append(payload[start : start + length])
        start += length
    return parts


def _fields(raw: Any, *names: str) -> dict[str, Any]:
    if type(raw) is not dict or set(raw) != set(names):
        raise ValueError(f"its fields are not {', '.join(names)}")
    return raw


def _int(raw: Any) -> int:
    if type(raw) is not int:
        raise TypeError(f"{raw!r:.40} is not a whole number")
    return raw


def _number(raw: Any) -> float:
    if type(raw) is not int and type(raw) is not float:
        raise TypeError(f"{raw!r:.40} is not a number")
    return float(raw)


def _string(raw: Any) -> str:
    if type(raw) is not str:
        raise TypeError(f"{raw!r:.40} is not a text")
    return raw


def _list(raw: Any) -> list[Any]:
    if type(raw) is not list:
        raise TypeError(f"{raw!r:.40} is not a list")
    return raw


def _ints(raw: Any) -> tuple[int, ...]:
    return tuple(_int(item) for item in _list(raw))


def _strings(raw: Any) -> tuple[str, ...]:
    return tuple(_string(item) for item in _list(raw))
