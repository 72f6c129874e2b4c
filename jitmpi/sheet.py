"""Hold one replay context as the bytes that travel: the state of this process in, the parts of a payload out.

Rule 1: `fill` runs in the training thread twice a minibatch, in caches that the computation has emptied. One large
        allocation costs 50 us there, for malloc tidies its lists first, and each kind of operation that was not used
        just before some microseconds. So all goes into memory set aside before, through one kind: memoryviews.
Rule 2: a sheet is written by the training thread, and never while the gate's place holds it: the agent reads it there.
Rule 3: a generator that nobody drew from since the feed began (`Base`) is left out: its piece is empty.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping

from jitmpi import messages, random_state
from jitmpi.errors import WireError
from jitmpi.events import Context
from jitmpi.position import PACKED, Position, Where
from jitmpi.wire import Buffer

AT = "at"  # the position, packed
BEGAN = "began"  # which base it goes with, in native order
MORE = "more"  # the pieces that not every script has, or whose length changes
NUMBER = 8  # bytes of a number
ALL = slice(None)


class Base:
    """What the contexts of one feed have in common, handed over once.

    Args:
        start: what the feed began with, see `loader.Feed`.
    """

    def __init__(self, number: int, start: Mapping[str, bytes], taps: random_state.Taps) -> None:
        self.number = number
        states = {name: bytes(live) for name, live in taps.large.items()}
        self.pieces = {BEGAN: number.to_bytes(NUMBER, sys.byteorder), **start, **states}
        self.align(taps)

    def align(self, taps: random_state.Taps) -> None:
        """Put the states into the order of these taps; one that was not there yet is empty."""
        self.pages = [bytearray(self.pieces.get(name, b"")) for name in taps.large]


class Sheet:
    """The replay context of one moment.

    Attributes:
        kept: pieces that this rank saves itself and does not hand over: large buffers.
        parts: the payload of a frame.
    """

    def __init__(self, rank: int, taps: random_state.Taps) -> None:
        self.kept: Mapping[str, bytes] = {}
        self._python = taps.python
        small = {AT: PACKED.size, BEGAN: NUMBER, random_state.PYTHON_GAUSS: random_state.GAUSS.size}
        small |= {name: len(live) for name, live in taps.small.items()}
        blank = {name: bytes(size) for name, size in small.items()} | dict.fromkeys([*taps.large, MORE], b"")
        self._block = bytearray(messages.encode_context(Context(rank, -1, False, blank)))
        self.parts: list[Buffer] = [self._block]
        self._base: Base | None = None
        self._gauss: float | None = None
        whole = memoryview(self._block)
        self._head = whole[: messages.HEAD.size].cast("q")  # rank, minibatch, exact
        begin = len(whole) - sum(small.values())
        self._lengths = whole[begin - 4 * (len(taps.large) + 1) : begin].cast("I")
        self._at = whole[begin : begin + PACKED.size + NUMBER].cast("q")
        self._gauss_at = begin + PACKED.size + NUMBER
        self._copies: list[tuple[memoryview, memoryview]] = []
        end = self._gauss_at + random_state.GAUSS.size
        for live in taps.small.values():
            self._copies.append((whole[end : end + len(live)], live))
            end += len(live)
        self._pages: list[tuple[memoryview, bytearray, memoryview]] = []
        for live in taps.large.values():
            page = bytearray(len(live))
            self._pages.append((live, page, memoryview(page)))

    def fill(self, minibatch: int, where: Where, base: Base, more: bytes) -> None:
        """Capture the random states of this moment, as a forecast; `more` is of `encode_pieces`, or empty."""
        self._base = base
        self._head[1] = minibatch
        self._head[2] = 0
        at, lengths = self._at, self._lengths
        at[0], at[1], at[2], at[3] = where
        at[4] = base.number
        parts: list[Buffer] = [self._block]
        place = 0
        for live, page, view in self._pages:
            if base.pages[place] == live:
                lengths[place] = 0
            else:
                view[ALL] = live
                lengths[place] = len(page)
                parts.append(page)
            place += 1
        lengths[place] = len(more)
        if more:
            parts.append(more)
        self.parts = parts
        for view, live in self._copies:
            view[ALL] = live
        python = self._python
        if python is not None and python.gauss_next != self._gauss:
            self._gauss = gauss = python.gauss_next
            random_state.GAUSS.pack_into(self._block, self._gauss_at, gauss is not None, gauss or 0.0)

    def confirm(self, forecast: Sheet | None) -> bool:
        """Say that this is no forecast, but exact; returns whether that forecast had said all of it."""
        true = forecast is not None and self.parts == forecast.parts
        self._head[2] = 1
        return true

    def context(self) -> Context:
        """Return all that this rank knows of the moment."""
        assert self._base is not None
        return whole(read(b"".join(self.parts)), {**self._base.pieces, **self.kept})


@messages.strict
def read(payload: bytes) -> Context:
    """Read the payload of a context that was handed over; `whole` completes it.

    Raises:
        WireError: it is malformed.
    """
    told = messages.decode_context(payload)
    pieces = {name: raw for name, raw in told.pieces.items() if raw or not name.startswith(random_state.MEMORY)}
    if AT in pieces:
        epoch, feed, index, done = PACKED.unpack(pieces.pop(AT))
        pieces["position"] = Position(epoch, feed, index, bool(done)).encode()
    if more := pieces.pop(MORE, b""):
        pieces |= messages.decode_pieces(more)
    return Context(told.rank, told.minibatch, told.exact, pieces)


def whole(told: Context, base: Mapping[str, bytes]) -> Context:
    """Put a context together with the base that it goes with.

    Raises:
        WireError: a piece is malformed.
    """
    try:
        pieces = random_state.settled({**base, **told.pieces})
    except (ValueError, struct.error) as error:
        raise WireError(f"a malformed context of rank {told.rank}: {error}") from error
    pieces.pop(BEGAN, None)
    return Context(told.rank, told.minibatch, told.exact, pieces)
