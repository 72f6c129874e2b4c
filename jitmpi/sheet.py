"""Hold one replay context as the bytes that travel: the state of this process in, a payload of `messages` out.

Rule 1: `fill` runs in the training thread twice a minibatch, in caches that the computation has emptied. One large
        allocation costs 50 us there, for malloc tidies its lists first, and each kind of operation that was not used
        just before some microseconds. So all goes into memory set aside before, through one kind: memoryviews.
Rule 2: a sheet is written by the training thread, and never while the gate's place holds it: the agent reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitmpi import messages, random_state
from jitmpi.events import Context
from jitmpi.position import PACKED, Position, Where

AT = "at"  # the position, packed
MORE = "more"  # the pieces that not every script has, or whose length changes
ALL = slice(None)


class Sheet:
    """The replay context of one moment.

    Attributes:
        kept: pieces that this rank saves itself and does not hand over: what the feed began with, large buffers.
        parts: the payload of a frame, in two parts; the second is empty when there is nothing for `MORE`.
    """

    def __init__(self, rank: int, taps: random_state.Taps) -> None:
        self.kept: Mapping[str, bytes] = {}
        self._python = taps.python
        room = {AT: (bytes(PACKED.size),), **taps.memory, MORE: (b"",)}
        blank = {name: b"".join(map(bytes, parts)) for name, parts in room.items()}
        self._block = bytearray(messages.encode_context(Context(rank, -1, False, blank)))
        self.parts: tuple[bytearray, bytes] = (self._block, b"")
        whole = memoryview(self._block)
        self._head = whole[: messages.HEAD.size].cast("q")  # rank, minibatch, exact
        self._gauss: float | None = None
        self._copies: list[tuple[memoryview, memoryview]] = []
        place = len(whole) - sum(map(len, blank.values()))
        self._length = place - messages.LENGTH.size  # where the length of the last piece stands
        for name, parts in room.items():
            for part in parts:
                if isinstance(part, memoryview):
                    self._copies.append((whole[place : place + len(part)], part))
                elif name == AT:
                    self._at = whole[place : place + len(part)].cast("q")
                elif name == random_state.PYTHON:
                    self._gauss_at = place
                place += len(part)

    def fill(self, minibatch: int, where: Where, more: bytes) -> None:
        """Capture the random states of this moment, as a forecast; `more` is of `encode_pieces`, or empty."""
        for place, source in self._copies:
            place[ALL] = source
        self._head[1] = minibatch
        self._head[2] = 0
        at = self._at
        at[0], at[1], at[2], at[3] = where
        if self._python is not None and self._python.gauss_next != self._gauss:
            self._gauss = gauss = self._python.gauss_next
            random_state.GAUSS.pack_into(self._block, self._gauss_at, gauss is not None, gauss or 0.0)
        if more or self.parts[1]:
            messages.LENGTH.pack_into(self._block, self._length, len(more))
            self.parts = (self._block, more)

    def foretells(self, other: Sheet) -> bool:
        """Whether two forecasts say the same."""
        return self.parts == other.parts

    def exact(self) -> None:
        """Say that this is no forecast."""
        self._head[2] = 1

    def context(self) -> Context:
        """Return all that this rank knows of the moment."""
        told = read(b"".join(self.parts))
        return Context(told.rank, told.minibatch, told.exact, {**told.pieces, **self.kept})


@messages.strict
def read(payload: bytes) -> Context:
    """Read the payload of a context that was handed over.

    Raises:
        WireError: it is malformed.
    """
    told = messages.decode_context(payload)
    pieces = dict(told.pieces)
    if AT in pieces:
        position = Position(*PACKED.unpack(pieces.pop(AT)))
        pieces |= {"position": position.encode(), "feed": position.feed_key}
    if more := pieces.pop(MORE, b""):
        pieces |= messages.decode_pieces(more)
    return Context(told.rank, told.minibatch, told.exact, random_state.settled(pieces))
