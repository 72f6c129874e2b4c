"""Notice when the state is updated, and how often the schedulers step between updates.

Rule: an update is everything from the first change of a tensor to the last one that belongs to it. With a GradScaler it
ends with `scaler.update()`, and a step that the scaler skipped is an update as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

CLEAR = 3  # minibatches in a row with the same number of scheduler steps that make a pattern


class Updates:
    """Hooks around the updates of some optimizers.

    Each optimizer's step is an update of its own (an LBFGS step with all its closures is one), if there is no scaler.
    """

    def __init__(self, optimizers: list[Any], scaler: Any) -> None:
        self._optimizers, self._scaler = optimizers, scaler
        self._handles: list[Callable[[], None]] = []
        self._open = False

    def install(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` before the first tensor changes and `after` when the update is complete."""

        def begin(*_: Any) -> None:
            if not self._open:
                before()
                self._open = True

        def end(*_: Any) -> None:
            self._open = False
            after()

        for optimizer in self._optimizers:
            self._hook(optimizer, begin, end if self._scaler is None else _nothing)
        if self._scaler is not None:
            self._wrap(self._scaler, "update", begin, end)

    def remove(self) -> None:
        """Take the hooks out."""
        for remove in self._handles:
            remove()
        self._handles.clear()

    def _hook(self, optimizer: Any, begin: Callable[..., None], end: Callable[..., None]) -> None:
        if not hasattr(
            optimizer, "_optimizer_step_pre_hooks"
        ):  # looks like an optimizer but does not derive from torch's
            self._wrap(optimizer, "step", begin, end)
            return
        self._handles.append(optimizer.register_step_pre_hook(begin).remove)
        self._handles.append(optimizer.register_step_post_hook(end).remove)

    def _wrap(self, owner: Any, method: str, begin: Callable[..., None], end: Callable[..., None]) -> None:
        inner = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin()
            result = inner(*args, **kwargs)
            end()
            return result

        setattr(owner, method, wrapped)
        self._handles.append(lambda: delattr(owner, method))


class Tail:
    """Knows how often the schedulers step in a minibatch, to do it for a thread that was stopped after its update.

    Attributes:
        pattern: scheduler steps of the last minibatches, oldest first, one list a minibatch; at most `CLEAR`.
    """

    def __init__(self, schedulers: list[Any]) -> None:
        self._schedulers = schedulers
        self._marked: list[int] | None = None
        self.pattern: list[list[int]] = []

    def mark(self) -> None:
        """Note a boundary."""
        if not self._schedulers:
            return
        counts = [_count(scheduler) for scheduler in self._schedulers]
        if self._marked is not None:
            self.pattern.append([now - then for now, then in zip(counts, self._marked, strict=True)])
            del self.pattern[:-CLEAR]
        self._marked = counts

    @property
    def ahead(self) -> bool:
        """Whether a scheduler has stepped since the boundary."""
        return self._marked is not None and [_count(scheduler) for scheduler in self._schedulers] != self._marked

    def complete(self) -> str:
        """Step the schedulers as often as the last minibatches did; returns why not, "" where it is done."""
        if not self._schedulers or self._marked is None:
            return ""
        done = [_count(s) - then for s, then in zip(self._schedulers, self._marked, strict=True)]
        if len(self.pattern) < CLEAR or any(steps != self.pattern[0] for steps in self.pattern):
            return f"the schedulers do not step equally often in each minibatch; in the last one they did {done} times"
        missing = [usual - now for usual, now in zip(self.pattern[0], done, strict=True)]
        if any(count < 0 for count in missing):
            return f"the schedulers stepped {done} times in the last minibatch, usually {self.pattern[0]} times"
        for scheduler, count in zip(self._schedulers, missing, strict=True):
            if count and isinstance(scheduler, ReduceLROnPlateau):
                return "ReduceLROnPlateau was not stepped for the last minibatch: its metric is not known"
            for _ in range(count):
                scheduler.step()
        self._marked = [now - usual for now, usual in zip(map(_count, self._schedulers), self.pattern[0], strict=True)]
        return ""


def _count(scheduler: Any) -> int:
    """Return how often a scheduler stepped; 0 for one that does not say."""
    count = getattr(scheduler, "_step_count", None)
    return int(getattr(scheduler, "last_epoch", 0) if count is None else count)


def _nothing(*_: Any) -> None:
    return None
