"""Put together the replay contexts that other ranks handed over; read only after a fault.

Rule: cheap while nothing fails. What a feed began with comes once a feed; what is new, with every minibatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from jitmpi import sheet
from jitmpi.errors import WireError
from jitmpi.events import Context

STARTS = 2  # the feed of a minibatch may be the newest or the one before


class Wards:
    """The contexts of the ranks whose buddy this rank is.

    Args:
        frames: gives the last context payloads that a rank sent, oldest first.
    """

    def __init__(self, ranks: Iterable[int], frames: Callable[[int], list[bytes]]) -> None:
        self._frames = frames
        self._starts: dict[int, deque[bytes]] = {rank: deque(maxlen=STARTS) for rank in ranks}

    def began(self, rank: int, payload: bytes) -> None:
        """Keep what a feed of `rank` began with."""
        if rank in self._starts:
            self._starts[rank].append(payload)

    def contexts(self, minibatch: int) -> tuple[Context, ...]:
        """Return the wards' contexts for minibatches next to `minibatch`: survivors differ by one at most."""
        found: list[Context] = []
        for rank, starts in sorted(self._starts.items()):
            begun = [context.pieces for context in map(_read, list(starts)) if context is not None]
            for context in map(_read, self._frames(rank)):
                if context is not None and context.rank == rank and abs(context.minibatch - minibatch) <= 1:
                    whole = _join(context, begun)
                    if whole is not None:
                        found.append(whole)
        return tuple(found)


def _join(context: Context, begun: list[Mapping[str, bytes]]) -> Context | None:
    """Put a context together with what its feed began with; None when that is not known."""
    number = context.pieces.get(sheet.BEGAN)
    for base in reversed(begun):
        if base.get(sheet.BEGAN) == number:
            with suppress(WireError):
                return sheet.whole(context, base)
    return None


def _read(payload: bytes) -> Context | None:
    try:
        return sheet.read(payload)
    except WireError:
        return None
