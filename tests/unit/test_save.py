from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import save, store
from jitmpi.errors import SaveError
from jitmpi.events import SavePlan, TensorInfo

WIDTH = {"float32": 4, "bfloat16": 2, "uint8": 1}


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorInfo]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 50), max_size=3)))
        dtype = draw(st.sampled_from(sorted(WIDTH)))
        nbytes = WIDTH[dtype]
        for length in shape:
            nbytes *= length
        found.append(TensorInfo(f"model/{number}", shape, dtype, nbytes))
    return found


@given(tensors(), st.lists(st.integers(0, 999), min_size=1, max_size=9, unique=True))
def test_divide_gives_every_row_once_and_equal_shares(state: list[TensorInfo], savers: list[int]) -> None:
    """Every row has exactly one saver, in canonical order, and no share is off the mean by more than a row."""
    shares = save.divide(state, savers)
    assert list(shares) == savers
    rows = [(index, row) for saver in savers for index, start, stop in shares[saver] for row in range(start, stop)]
    assert rows == [(index, row) for index, tensor in enumerate(state) for row in range(store.rows(tensor))]
    mean = sum(tensor.nbytes for tensor in state) / len(savers)
    widest = max((store.row_bytes(tensor) for tensor in state), default=0)
    for share in shares.values():
        assert abs(sum((b - a) * store.row_bytes(state[i]) for i, a, b in share) - mean) <= widest
        assert all(a < b for _, a, b in share)


def test_files_hold_the_bytes_and_their_checksums(job: Any, state: Any) -> None:
    """Savers together write each byte once; what they acknowledge is what lies on the disk."""
    plan = job.plan(5, 0, savers=(0, 1, 2))
    written = job.write(plan, state)
    assert [w.file for w in written] == ["rank0.h5", "rank1.h5", "rank2.h5"]
    for w in written:
        path = os.path.join(plan.directory, w.file)
        assert os.stat(path).st_size == w.nbytes
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(plan.directory).st_mode) == 0o700
    assert set(os.listdir(plan.directory)) == {"rank0.h5", "rank1.h5", "rank2.h5"}


def test_large_tensors_are_read_in_bounded_pieces(job: Any, new_state: Callable[..., Any]) -> None:
    """The reader is asked for at most CHUNK bytes at a time, so that a GPU's pinned memory stays small."""
    state = new_state(shapes=(("model/w", (1000, 5000), "float64"), ("model/v", (3,), "int8")))
    asked = []

    def read(index: int, start: int, stop: int) -> memoryview:
        view: memoryview = state.read(index, start, stop)
        asked.append(len(view))
        return view

    plan = job.plan(5, 0, savers=(4,))
    save.save(plan, rank=4, tensors=state.tensors, read=read, deadline=time.monotonic() + 60)
    assert max(asked) <= save.CHUNK
    assert sum(asked) == 40_000_003


def test_a_rank_without_a_share_still_writes_a_file(job: Any, new_state: Callable[..., Any]) -> None:
    """More savers than rows is no error."""
    state = new_state(shapes=(("model/w", (), "float64"),))
    written = job.write(job.plan(5, 0, savers=(0, 1, 2, 3)), state)
    assert sum(len(w.pieces) for w in written) == 1


def test_a_failing_reader_leaves_nothing(job: Any, state: Any) -> None:
    """Whatever the reader raises comes out as it is, and no half file stays."""

    def read(index: int, start: int, stop: int) -> memoryview:
        if index > 2:
            raise RuntimeError("device lost")
        view: memoryview = state.read(index, start, stop)
        return view

    plan = job.plan(5, 0, savers=(0,))
    with pytest.raises(RuntimeError, match="device lost"):
        save.save(plan, rank=0, tensors=state.tensors, read=read, deadline=time.monotonic() + 60)
    assert os.listdir(plan.directory) == []


def test_a_reader_that_gives_too_little_is_refused(job: Any, state: Any) -> None:
    """A short buffer is an error, not a shifted file."""
    with pytest.raises(SaveError, match="bytes were given"):
        save.save(
            job.plan(5, 0, savers=(0,)), rank=0, tensors=state.tensors,
            read=lambda index, start, stop: state.read(index, start, stop)[:-1], deadline=time.monotonic() + 60,
        )  # fmt: skip


def test_the_deadline_ends_a_save(job: Any, state: Any) -> None:
    """After the deadline nothing new is begun and nothing is left behind."""
    plan = job.plan(5, 0, savers=(0,))
    with pytest.raises(SaveError, match="raise save="):
        save.save(plan, rank=0, tensors=state.tensors, read=state.read, deadline=time.monotonic() - 1)
    assert os.listdir(plan.directory) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, b"size=2m,mode=700") != 0:
        pytest.skip("a small file system can be mounted only by root")
    yield path
    assert libc.umount2(bytes(path), 2) == 0


def test_a_full_disk_is_said_with_numbers_and_cleaned_up(small_disk: Path, new_state: Callable[..., Any]) -> None:
    """ENOSPC names the path, the bytes needed and those free; the space comes back."""
    state = new_state(shapes=(("model/w", (1000, 1000), "float32"),))
    plan = SavePlan(1, 0, 5, {0: (0,)}, str(small_disk / "7" / ".m5-r0-e1-c0"))
    with pytest.raises(SaveError, match=r"rank0\.h5: No space left on device: 4000000 bytes needed, \d+ bytes free"):
        save.save(plan, rank=0, tensors=state.tensors, read=state.read, deadline=time.monotonic() + 60)
    assert os.listdir(plan.directory) == []
    assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize > 1_900_000
