"""Turn the user's loader into a Feed whose every position can be opened again.

Rule 1: an undisturbed run and a resumed one go through the same code, with the same draws from the same random streams:
`start` (all random states just before the iterator is made) is restored, the iterator is made, `skip` batches of
*indices* are drawn and dropped, and the caller restores the random state of the boundary.
Rule 2: what a batch is made of depends on the start and on its index alone, never on which worker makes it or when. So
random numbers inside workers are seeded for each batch, and a sampler or iterable of the user's own draws from a stream
of its own.

Open the feed first and capture the boundary's random state afterwards: opening draws, as a DataLoader's iterator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, get_worker_info, sampler
from torch.utils.data.distributed import DistributedSampler

from jitmpi import random_state
from jitmpi.errors import MismatchError

# Samplers that draw from the global streams only when they start: Rule 2 holds without a stream of their own.
KNOWN_SAMPLERS = (
    sampler.BatchSampler,
    sampler.RandomSampler,
    sampler.SequentialSampler,
    sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
# What a rebuilt loader takes over as it is. Not here: dataset, samplers and generator (replaced), batch_size, drop_last
# and shuffle (they live in the samplers).
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)

Item = TypeVar("Item")


class Feed(Iterator[Any]):
    """One pass over a loader.

    Attributes:
        index: batches handed out in this pass, those skipped included.
        start: random states, and those of the generators of loader and samplers, just before the iterator was made.
        own: the generators that the data set and the collation own and draw from in this process.
        note: what cannot be repeated exactly, or must be read again, in one line; "" for nothing.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batches: Iterator[Any],
        *,
        skip: int,
        start: Mapping[str, bytes],
        own: Mapping[str, Any],
        note: str,
    ) -> None:
        self.index = skip
        self.start = start
        self.note = note
        self.own = own
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        """Return the number of batches of a whole pass.

        Raises:
            TypeError: the loader does not know.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.index += 1
        return batch

    def pieces(self) -> dict[str, bytes]:
        """Copy the states, at this boundary, of the generators in `own`."""
        return {f"dataset/{name}": random_state.generator_state(g) for name, g in self.own.items()}

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Put back what `pieces` gave; call it after opening."""
        for name, generator in self.own.items():
            if f"dataset/{name}" in pieces:
                random_state.set_generator_state(generator, pieces[f"dataset/{name}"])


def open_feed(loader: Iterable[Any], *, skip: int = 0, start: Mapping[str, bytes] | None = None) -> Feed:
    """Begin a pass over a loader, at its first batch or at batch `skip`.

    Args:
        loader: a DataLoader, or anything that can be iterated.
        skip: batches that were handed out before. With a DataLoader over a map-style dataset their data is not read.
        start: `Feed.start` of the pass that is taken up; None begins a new one. This process's random states, and those
            of the generators that loader and samplers own, are set to it.

    Raises:
        MismatchError: the loader ends before `skip` batches, or has other generators than the pass had.
    """
    owned = dict(_generators(loader))
    if start is None:
        start = random_state.capture()
        start.update({f"loader/{name}": random_state.generator_state(g) for name, g in owned.items()})
    else:
        _restore_start(start, owned)
    if not _can_skip(loader):
        return _reread(loader, skip, start)
    assert isinstance(loader, DataLoader)
    rebuilt = _rebuilt(loader)
    rebuilt.order.begin(skip, _draw_seed(loader.generator), None if _known(loader) else _Stream())
    batches = iter(rebuilt.loader)
    if not loader.num_workers:
        rebuilt.order.skip_now()  # with workers, prefetching has done it
    own = {} if loader.num_workers else dict(_drawn_from(loader.dataset, loader.collate_fn))
    return Feed(loader, batches, skip=skip, start=start, own=own, note=_note(loader))


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is asked for: batch number `index` of the pass that began with `seed`, made of `items`."""

    seed: int
    index: int
    items: Any


class Ordering:
    """The sampler of a rebuilt loader: the user's own, from batch `skip` on, with each batch's seed put on it."""

    def __init__(self, source: Iterable[Any], *, seeded: bool) -> None:
        self._source, self._seeded = source, seeded
        self._skip = self._seed = 0
        self._stream: _Stream | None = None
        self._current: _Numbered | None = None

    def begin(self, skip: int, seed: int, stream: _Stream | None) -> None:
        """Say where the next iterator is to begin."""
        self._skip, self._seed, self._stream = skip, seed, stream

    def skip_now(self) -> None:
        """Draw and drop the skipped batches now rather than at the first `next`."""
        if self._skip and self._current is not None:
            self._current.skip_now()

    def __iter__(self) -> Iterator[Any]:
        self._current = _Numbered(self._source, self._skip, self._seed if self._seeded else None, self._stream)
        return self._current

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]


class _Numbered(Iterator[Any]):
    def __init__(self, source: Iterable[Any], skip: int, seed: int | None, stream: _Stream | None) -> None:
        self._skip, self._seed, self._stream = skip, seed, stream
        self._source = source
        self._items: Iterator[Any] | None = None  # made once a pass; torch may make and drop one of us before
        self._index = 0

    def skip_now(self) -> None:
        for drawn in range(self._index, self._skip):
            try:
                self._next_items()
            except StopIteration:
                raise MismatchError(f"the sampler ends after {drawn} batches, {self._skip} were used before") from None
        self._index = max(self._index, self._skip)

    def __next__(self) -> Any:
        if self._index < self._skip:
            self.skip_now()
        items = self._next_items()
        index = self._index
        self._index += 1
        return items if self._seed is None else Order(self._seed, index, items)

    def _next_items(self) -> Any:
        return self._advance() if self._stream is None else self._stream.run(self._advance)

    def _advance(self) -> Any:
        if self._items is None:
            self._items = iter(self._source)
        return next(self._items)


class _Stream:
    """Random streams of its own for code that may draw at any time, so that what it draws does not depend on when."""

    def __init__(self) -> None:
        self._inside = random_state.fork()

    def run(self, call: Callable[[], Item]) -> Item:
        outside = random_state.capture()
        random_state.restore(self._inside)
        try:
            return call()
        finally:
            self._inside = random_state.capture()
            random_state.restore(outside)


class SeededDataset:
    """The dataset as a worker sees it: seeds all random streams for each batch, then asks the user's dataset."""

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, order: Order) -> Any:
        self._seed(order)
        return self.dataset[order.items]

    def __getitems__(self, order: Order) -> Any:
        self._seed(order)
        many = getattr(self.dataset, "__getitems__", None)
        return many(order.items) if many else [self.dataset[item] for item in order.items]

    def _seed(self, order: Order) -> None:
        seed = random_state.mix(order.seed, order.index)
        random_state.seed(seed)
        for name, generator in _drawn_from(self.dataset, self.collate):
            random_state.seed_generator(generator, random_state.mix(seed, *name.encode()))


class WorkerStart:
    """Runs in a new worker: shows the user's own dataset in `get_worker_info()`, calls the user's worker_init_fn."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the info is frozen
        if self.user is not None:
            self.user(worker)


@dataclass(frozen=True)
class _Rebuilt:
    loader: DataLoader[Any]
    order: Ordering
    made_from: tuple[Any, ...]


# One rebuilt loader for each of the user's, so that persistent workers persist.
_built: weakref.WeakKeyDictionary[DataLoader[Any], _Rebuilt] = weakref.WeakKeyDictionary()


def _rebuilt(loader: DataLoader[Any]) -> _Rebuilt:
    kept = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
    made_from = tuple(kept.values())
    known = _built.get(loader)
    if known is not None and known.made_from == made_from:
        return known
    seeded = loader.num_workers > 0
    order = Ordering(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, seeded=seeded)
    where = {"sampler": order, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": order}
    if seeded:
        kept["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
    dataset = SeededDataset(loader.dataset, loader.collate_fn) if seeded else loader.dataset
    generator = torch.Generator()  # for torch's own base seed, which a persistent iterator draws only once
    rebuilt = DataLoader(dataset, generator=generator, **where, **kept)  # type: ignore[arg-type]
    _built[loader] = _Rebuilt(rebuilt, order, made_from)
    return _built[loader]


def _draw_seed(generator: torch.Generator | None) -> int:
    """Draw the pass's seed as a DataLoader draws its base seed: one number, from the same stream, at the same place."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _can_skip(loader: Iterable[Any]) -> bool:
    """Return whether batches can be skipped without reading them; subclasses may iterate in a way of their own."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return (
        plain
        and type(loader)._get_iterator is DataLoader._get_iterator  # type: ignore[attr-defined]
        and not isinstance(loader.dataset, (IterableDataset, MapDataPipe))  # type: ignore[attr-defined]
    )


def _known(loader: DataLoader[Any]) -> bool:
    return all(type(owner) in KNOWN_SAMPLERS for owner in _samplers(loader))


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers that a loader really uses, outermost first."""
    owner = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    seen: set[int] = set()
    while owner is not None and id(owner) not in seen:
        seen.add(id(owner))
        yield owner
        owner = getattr(owner, "batch_sampler", None) or getattr(owner, "sampler", None)


def _generators(loader: Any) -> Iterator[tuple[str, Any]]:
    yield from random_state.own_generators(loader, "loader")
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        for depth, owner in enumerate(_samplers(loader)):
            yield from random_state.own_generators(owner, f"sampler{depth}")


def _drawn_from(dataset: Any, collate: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators of what makes a batch: the data set, what it wraps and its transforms, and the collation."""
    yield from random_state.held_generators(dataset, "dataset")
    yield from random_state.held_generators(collate, "collate")


def _restore_start(start: Mapping[str, bytes], owned: Mapping[str, Any]) -> None:
    saved = {name.removeprefix("loader/") for name in start if name.startswith("loader/")}
    if saved != set(owned):
        raise MismatchError(
            f"the loader has the generators {sorted(owned)}, the interrupted pass had {sorted(saved)}; "
            "build it as it was built before"
        )
    random_state.restore(start)
    for name, generator in owned.items():
        random_state.set_generator_state(generator, start[f"loader/{name}"])


def _reread(loader: Iterable[Any], skip: int, start: Mapping[str, bytes]) -> Feed:
    """Open an iterable: the skipped batches are read again, and all reading draws from a stream of its own."""
    stream = _Stream()
    source = stream.run(lambda: iter(loader))
    for done in range(skip):
        try:
            stream.run(lambda: next(source))
        except StopIteration:
            raise MismatchError(f"the loader ends after {done} batches, {skip} were used before") from None
    again = f": {skip} batches were read again" if skip else ""
    note = f"a {type(loader).__name__} cannot skip batches, a resume reads them again{again}"
    if getattr(loader, "persistent_workers", False):
        note += "; its persistent workers keep random states over epochs that cannot be repeated"
    return Feed(loader, _Drawn(source, stream), skip=skip, start=start, own={}, note=note)


class _Drawn(Iterator[Any]):
    def __init__(self, source: Iterator[Any], stream: _Stream) -> None:
        self._source, self._stream = source, stream

    def __next__(self) -> Any:
        return self._stream.run(lambda: next(self._source))


def _note(loader: DataLoader[Any]) -> str:
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "in_order=False: which batches were used depends on timing; a resume may repeat some and leave some out"
    return ""
