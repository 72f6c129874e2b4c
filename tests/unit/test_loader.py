"""A pass over a loader taken up at batch k gives the batches and the random draws of one that was never left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from jitmpi import loader, random_state
from jitmpi.errors import MismatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a machine with one core
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),  # Python 3.12 on, torch's own fork
]

SIZE, BATCH = 22, 4  # five batches and a short one
READ: list[int] = []  # items that this process read


class Noisy(Dataset[torch.Tensor]):
    """Items with augmentation from every random stream that there is, its own included."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        READ.append(index)
        noise = [random.random(), np.random.random(), torch.rand(()).item(), random.gauss(0, 1), self.rng.random()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class Many(Noisy):
    """Reads a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        shift = torch.rand(())
        return [self[index] + shift for index in indices]


class Jitter:
    """A transform, or a collation, with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.own = random.Random(seed)

    def __call__(self, value: Any) -> Any:
        return (torch.stack(value) if isinstance(value, list) else value) + self.own.random()


class Transformed(Noisy):
    """Items that go through transforms which hold the generators, and the system's, which has no state."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.transforms = [Jitter(seed), partial(torch.add, other=0.5), {"late": Jitter(seed + 1)}]
        self.system = random.SystemRandom()
        self.parent = self

    def __getitem__(self, index: int) -> torch.Tensor:
        first, fixed, more = self.transforms
        return more["late"](fixed(first(super().__getitem__(index % SIZE))))  # type: ignore[operator,index]


class Restless(Sampler[int]):
    """A sampler of the user's own that draws from the global streams whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield (random.randrange(SIZE) + int(torch.randint(SIZE, ())) + int(np.random.randint(SIZE))) % SIZE

    def __len__(self) -> int:
        return SIZE


class Stream(IterableDataset[torch.Tensor]):
    """A shuffle buffer: what it gives depends on all that it drew before."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        part = range(SIZE) if info is None else range(info.id, SIZE, info.num_workers)
        buffer: list[int] = []
        for item in part:
            buffer.append(item)
            if len(buffer) > 3:
                yield torch.tensor([buffer.pop(random.randrange(len(buffer))), torch.rand(()).item()])
        yield from (torch.tensor([item, 0.0]) for item in buffer)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(dataset: type[Noisy] = Noisy, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH, shuffle=True, **options)


MAKERS: dict[str, Callable[..., Any]] = {
    "sequential": lambda **w: DataLoader(Noisy(), batch_size=BATCH, **w),
    "random": shuffled,
    "random, own generator": lambda **w: shuffled(generator=generator(3), **w),
    "getitems": lambda **w: shuffled(Many, **w),
    "subset": lambda **w: DataLoader(Subset(Noisy(), range(3, SIZE)), batch_size=BATCH, shuffle=True, **w),
    "replacement": lambda **w: DataLoader(
        Noisy(), batch_size=3, sampler=RandomSampler(range(SIZE), True, 80, generator(1)), drop_last=True, **w
    ),
    "weighted": lambda **w: DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * 11, SIZE), **w),
    "subset sampler": lambda **w: DataLoader(Noisy(), BATCH, sampler=SubsetRandomSampler(range(20), generator(9)), **w),
    "distributed": lambda **w: DataLoader(Noisy(), 2, sampler=DistributedSampler(range(SIZE), 2, 1), **w),
    "batch sampler": lambda **w: DataLoader(Noisy(), batch_sampler=[(0, 1), (2,), (3, 4), (5, 6)], **w),
    "transforms": lambda **w: DataLoader(
        ConcatDataset([Transformed(), Transformed(5)]), BATCH, shuffle=True, collate_fn=Jitter(9), **w
    ),
    "no batches": lambda **w: DataLoader(Noisy(), batch_size=None, sampler=RandomSampler(range(7)), **w),
    "restless": lambda **w: DataLoader(Noisy(), batch_size=BATCH, sampler=Restless(), **w),
    "iterable": lambda **w: DataLoader(Stream(), batch_size=BATCH, **w),
}


@dataclass
class Trace:
    """What a run saw: boundaries (random states, the dataset's own), batches, the states at the end."""

    boundaries: list[dict[str, bytes]] = field(default_factory=list)
    batches: list[torch.Tensor] = field(default_factory=list)
    end: dict[str, bytes] = field(default_factory=dict)
    start: dict[str, bytes] = field(default_factory=dict)


def train(feed: loader.Feed) -> Trace:
    """Use up a feed as a training loop does: with draws of its own between the batches."""
    trace = Trace(start=dict(feed.start))
    while True:
        trace.boundaries.append({**random_state.capture(), **feed.pieces()})
        batch = next(feed, None)
        if batch is None:
            break
        trace.batches.append(batch)
        random.random(), np.random.random(3), torch.rand(2)
    trace.end = random_state.capture()
    return trace


def set_epoch(data: Any, epoch: int) -> None:
    if isinstance(data, DataLoader) and isinstance(data.sampler, DistributedSampler):
        data.sampler.set_epoch(epoch)


def undisturbed(make: Callable[[], Any]) -> list[Trace]:
    random_state.seed(11)
    data, traces = make(), []
    for epoch in range(2):
        set_epoch(data, epoch)
        traces.append(train(loader.open_feed(data)))
    return traces


def resumed(make: Callable[[], Any], epoch: int, k: int, trace: Trace) -> Trace:
    """Do what a new process does: everything made anew, all random states wrong, then taken up at batch k."""
    random_state.seed(99)
    data = make()
    set_epoch(data, epoch)
    feed = loader.open_feed(data, skip=k, start=trace.start)
    assert feed.index == k
    random_state.restore(trace.boundaries[k])
    feed.restore(trace.boundaries[k])
    return train(feed)


def check(make: Callable[[], Any], positions: list[tuple[int, int]]) -> None:
    traces = undisturbed(make)
    assert not torch.equal(traces[0].batches[0], traces[1].batches[0])  # the second pass is another one
    for epoch, k in positions:
        trace = traces[epoch]
        k = min(k, len(trace.batches))
        again = resumed(make, epoch, k, trace)
        assert len(again.batches) == len(trace.batches) - k
        assert all(torch.equal(a, b) for a, b in zip(again.batches, trace.batches[k:], strict=True))
        assert again.boundaries == trace.boundaries[k:]
        assert again.end == trace.end


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_is_taken_up_exactly_without_workers(name: str) -> None:
    """At the first batch, the second, one in the middle, the last, and after the last; in both epochs."""
    check(lambda: MAKERS[name](), [(e, k) for e in (0, 1) for k in (0, 1, 3, 5, 99)])


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_is_taken_up_exactly_with_workers(name: str) -> None:
    """With batches prefetched and random augmentation inside two workers, too."""
    check(lambda: MAKERS[name](num_workers=2, prefetch_factor=1), [(0, 0), (1, 3)])


def test_persistent_workers_are_taken_up_in_a_later_epoch() -> None:
    """Workers that live through epochs give what new workers give."""
    check(lambda: shuffled(num_workers=2, persistent_workers=True), [(1, 0), (1, 2)])


def test_spawned_workers_are_served() -> None:
    """Nothing that goes to a worker needs to be inherited."""
    random_state.seed(1)
    data = DataLoader(range(6), batch_size=2, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    assert [b.tolist() for b in loader.open_feed(data, skip=1)] == [[2, 3], [4, 5]]


def test_skipped_batches_are_not_read() -> None:
    """Indices are drawn and dropped; no data is read for them."""
    random_state.seed(2)
    feed = loader.open_feed(shuffled(), skip=3)
    READ.clear()
    next(feed)
    assert len(READ) == BATCH
    assert (feed.index, len(feed), feed.note) == (4, 6, "")


def test_an_iterable_says_that_it_reads_again() -> None:
    """The note says in one line what cannot be skipped."""
    feed = loader.open_feed([torch.ones(1)] * 3, skip=2)
    assert len(list(feed)) == 1
    assert "reads them again" in feed.note
    assert "\n" not in feed.note


def test_the_options_of_the_loader_are_kept() -> None:
    """Collation, worker start and the view of the dataset inside a worker are the user's."""

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.offset = 100 + worker

    class Plain(Dataset[int]):
        offset = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            info = get_worker_info()
            assert info is not None
            assert info.dataset is self
            return self.offset + index

    data = DataLoader(
        Plain(),
        batch_size=2,
        num_workers=2,
        worker_init_fn=begin,
        collate_fn=lambda items: ("mine", items),
        timeout=60,
        multiprocessing_context="fork",  # what is defined here has no name that another start of processes could use
    )
    assert list(loader.open_feed(data)) == [("mine", [100, 101]), ("mine", [103, 104])]


def test_a_subclass_iterates_in_its_own_way() -> None:
    """A loader whose iteration was overridden is not rebuilt; it is read again."""

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    feed = loader.open_feed(Own(range(2)), skip=1)  # type: ignore[arg-type]
    assert list(feed) == [2, 3]
    assert feed.note


def test_a_shorter_loader_is_refused() -> None:
    """A data set that shrank since the failure is a mismatch, not a silent end of the epoch."""
    for data in (shuffled(), [1, 2], shuffled(num_workers=1)):
        with pytest.raises(MismatchError, match="were used before"):
            next(loader.open_feed(data, skip=7))


def test_other_generators_are_refused() -> None:
    """A loader that now has, or lacks, a generator of its own is not the one that was interrupted."""
    start = loader.open_feed(shuffled(generator=generator(3))).start
    with pytest.raises(MismatchError, match="generators"):
        loader.open_feed(shuffled(), start=start)


def test_unordered_loading_says_what_it_costs() -> None:
    """in_order=False cannot be replayed, and the note says so."""
    try:
        data = shuffled(num_workers=1, in_order=False)
    except TypeError:
        pytest.skip("this torch has no in_order")
    assert "depends on timing" in loader.open_feed(data).note
