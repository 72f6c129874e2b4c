"""What the user's script holds: a `Run` and its loop.

Rule 1: without the option, or outside Slurm, a Run is an ordinary loop that only counts.
Rule 2: a minibatch begins where the first batch after an update is asked for; batches without an update between them
        are micro-batches of one minibatch.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from jitmpi import codec, loader, random_state
from jitmpi.events import Cursor
from jitmpi.position import Position

if TYPE_CHECKING:
    from jitmpi.buffers import BufferShadow
    from jitmpi.record import Recorder
    from jitmpi.torch_state import TrainingState

Batch = TypeVar("Batch")
NESTED = (
    "two loaders are open at once: the inner one's position is not kept, a resume begins it anew; that is right for an "
    "evaluation inside the loop, but batches to train on must come from one loader"
)
UNSEEN = 100  # batches in a row; few scripts accumulate the gradients of more
NO_UPDATE = (
    f"{UNSEEN} batches went by without an update by the optimizer that attach was given. If they are micro-batches of "
    "one minibatch, all is well; else nothing can be saved: give attach the optimizer whose step() is called (one made "
    "later, or an update inside a CUDA graph, is not seen)"
)
NOTHING: Mapping[str, bytes] = {}
DROPS = frozenset(["POP_TOP", "POP_ITER"])  # what `break` and `return` end a loop with; POP_ITER from Python 3.14 on


class Run:
    """A training run: `epochs` and `minibatches` give what a plain loop gives, from wherever the run has to go on.

    Attributes:
        minibatch: number of the current minibatch in the whole run, from 0; -1 before the first.
        state: the user's own values (numbers, text, lists, dictionaries); put back on a resume.
        resumed: whether this process goes on from a checkpoint.
    """

    def __init__(
        self,
        state: TrainingState,
        recorder: Recorder | None = None,
        shadow: BufferShadow | None = None,
        cursor: Cursor | None = None,
    ) -> None:
        self.minibatch = -1
        self.state: dict[str, Any] = {}
        self.resumed = cursor is not None
        self._state, self._recorder, self._shadow = state, recorder, shadow
        self._epoch, self._feeds, self._begun = -1, 0, 0  # the last: epochs of all loops that began
        self._updated = self._in_flight = self._used = False  # of the minibatch under way
        self._target: Position | None = None  # where to go on, until it is reached
        self._pieces: Mapping[str, bytes] = {}
        self._feed: tuple[loader.Feed, int] | None = None  # the one that is open, and its number in the epoch
        self._waited = 0  # batches in a row without an update
        self._nested = False  # whether the user was told what that means
        if cursor is not None:
            self._aim(cursor)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epoch numbers that are left of `range(count)`; a script may have several such loops, one by one."""
        before = self._begun  # so an epoch of a later loop is no epoch of the first one
        self._begun += count
        first = max(self._target.epoch - before, 0) if self._target else 0
        for epoch in range(first, count):
            self._epoch, self._feeds = before + epoch, 0
            yield epoch

    def minibatches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a DataLoader (or of any iterable) that are left in this epoch."""
        if self._feed is not None:  # the boundaries, and what they are counted by, belong to the outer loop
            if self._recorder is not None and not self._nested:
                self._nested = True
                sys.stderr.write(f"jit-ckpt: {NESTED}\n")
            yield from loader.open_feed(batches)
            return
        number = self._feeds
        self._feeds += 1
        feed = self._open(batches, number)
        if feed is None:
            return
        self._feed = feed, number
        first = True
        try:
            while True:
                self._boundary(feed, number, edge=first)
                first = False
                batch = next(feed, self)
                if batch is self:
                    break
                self._in_flight = True
                yield batch  # type: ignore[misc]
            self._boundary(feed, number, edge=True, idle=True)
        except GeneratorExit:
            if _on_purpose(sys._getframe(1)):
                self._boundary(feed, number, edge=True, idle=True, done=True)
            raise
        finally:
            self._feed = None

    def before_update(self) -> None:
        """Optimizer hook."""
        if self._recorder is not None:
            if not self._used:  # no forward pass was seen: the model is in evaluation mode, or called in another way
                self._state.updates_in_evaluation |= not self._state.training
                self.after_forward()
            self._recorder.begin_update()

    def after_update(self) -> None:
        """Optimizer hook."""
        self._updated = True
        if self._recorder is not None:
            self._recorder.end_update()

    def after_forward(self) -> None:
        """Model hook: the random numbers of this minibatch are drawn."""
        self._used = True
        if self._recorder is not None and self._feed is not None:
            feed, number = self._feed
            where = (self._epoch, number, feed.index, False)
            self._recorder.forecast(where, self.state, feed.pieces() if feed.own else NOTHING)

    def _boundary(
        self, feed: loader.Feed, number: int, *, edge: bool = False, idle: bool = False, done: bool = False
    ) -> None:
        """Pass a boundary, unless the minibatch under way waits for its update; `edge`: where a feed begins or ends."""
        waiting = self._in_flight and not self._updated and self._state.updates
        if waiting and (self._used or not idle):
            self._waited += 1
            if self._waited == UNSEEN and self._recorder is not None:
                sys.stderr.write(f"jit-ckpt: {NO_UPDATE}\n")
            if idle and self._recorder is not None:  # micro-batches are left over; what follows may take for ever
                self._state.keep(self.minibatch)
                self._recorder.pause()
            return
        ended = self._in_flight and not waiting  # a batch that was only looked at, as before a `break`, is no minibatch
        self._in_flight = self._updated = self._used = False
        self._waited = 0
        if self.minibatch < 0 or ended:
            self.minibatch += 1
            self._state.mark()
        if edge and self._recorder is not None:
            self._state.keep(self.minibatch)
        if self._recorder is not None:
            where = (self._epoch, number, feed.index, done)
            own = feed.pieces() if feed.own else NOTHING
            self._recorder.boundary(self.minibatch, where, self.state, own, idle=idle)

    def _open(self, batches: Iterable[Batch], number: int) -> loader.Feed | None:
        """Open a feed where this run has to go on; None when all of it was used before the restart."""
        target = self._target
        here = self._epoch, number
        if target is None or here > (target.epoch, target.feed):
            feed = loader.open_feed(batches)
        elif here < (target.epoch, target.feed):
            return None
        else:
            pieces = self._pieces
            start = {k.removeprefix("start/"): v for k, v in pieces.items() if k.startswith("start/")}
            feed = loader.open_feed(batches, skip=target.index, start=start or None)
            if feed.note:
                sys.stderr.write(f"jit-ckpt: {feed.note}\n")
            feed.restore(pieces)
            random_state.restore(pieces)
            self._target, self._pieces = None, {}
            if target.done:
                return None
        if self._recorder is not None:
            self._recorder.opened({f"start/{k}": v for k, v in feed.start.items()})
        return feed

    def _aim(self, cursor: Cursor) -> None:
        """Put back what belongs to this rank alone; the data position follows when the script asks for batches."""
        pieces = cursor.context.pieces
        self.minibatch = cursor.minibatch
        if "position" in pieces:
            self._target = Position.decode(pieces["position"])
        if "user" in pieces:
            self.state.update(codec.loads(pieces["user"]))
        if self._shadow is not None:
            self._shadow.restore(pieces)
        self._pieces = pieces
        self._state.mark()


def _on_purpose(frame: FrameType | None) -> bool:
    """Whether the script left its loop by `break` or `return`, and not because its body raised an exception.

    Either closes this generator, and an exception that is on its way shows nowhere but here: `break` and `return` drop
    the loop's iterator by an instruction of their own, an exception drops it at the instruction that raised it.
    Generators in between (tqdm) are closed the same way; their callers tell.
    """
    while frame is not None:
        code = frame.f_code
        if 0 <= frame.f_lasti < len(code.co_code) and dis.opname[code.co_code[frame.f_lasti]] in DROPS:
            return True
        if not code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return False
