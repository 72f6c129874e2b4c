"""Where in the data a minibatch begins. Data only."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Final

PACKED: Final = struct.Struct("=qqqq")  # a position as it travels: epoch, feed, index, done
Where = tuple[int, int, int, bool]  # a position on the hot path, where to make an object of a class is too dear


@dataclass(frozen=True, slots=True)
class Position:
    """The batch that a minibatch begins with.

    Attributes:
        epoch: number of the epoch, from 0, counted over all loops of `Run.epochs`; -1 before the first.
        feed: which call of `Run.minibatches` in that epoch, from 0.
        index: how many batches of the feed came before.
        done: the script left the feed early (`break`); nothing of it is left.
    """

    epoch: int
    feed: int
    index: int
    done: bool = False

    def encode(self) -> bytes:
        """Return JSON text."""
        done = "true" if self.done else "false"
        return b'{"epoch":%d,"feed":%d,"index":%d,"done":%s}' % (self.epoch, self.feed, self.index, done.encode())

    @classmethod
    def decode(cls, text: bytes) -> Position:
        """Read what `encode` gave.

        Raises:
            ValueError, TypeError: not a position.
        """
        position = cls(**json.loads(text))
        if not all(isinstance(value, int) for value in asdict(position).values()):
            raise TypeError(f"not a position: {text[:80]!r}")
        return position
