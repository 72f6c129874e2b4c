"""Turn one saver's share of a SavePlan into a durable file of its own: SavePlan -> Written.

Rule 1: no rank waits for another; what to write follows from the plan alone.
Rule 2: a failed save leaves nothing behind and says what the disk said, with numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from jitmpi import files, store
from jitmpi.errors import SaveError
from jitmpi.events import Piece, SavePlan, TensorInfo, Written
from slurm_plugin import contract

Reader = Callable[[int, int, int], memoryview]  # tensor index, start row, stop row -> raw bytes, until the next call
Share = tuple[tuple[int, int, int], ...]  # (tensor index, start row, stop row)

CHUNK = 16 << 20  # bytes asked for at a time: bounds the pinned memory of a GPU reader, long enough to amortize a call
BEHIND = 4 << 20  # bytes that may wait in the page cache before the disk is told to begin
SYNC_FILE_RANGE_WRITE = 2  # begin to write back, do not wait
SYNC_FILE_RANGE = ctypes.CDLL(None).sync_file_range
SYNC_FILE_RANGE.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def divide(tensors: Sequence[TensorInfo], savers: Sequence[int]) -> dict[int, Share]:
    """Divide the bytes among savers along the first dimension, in canonical order, each row exactly once.

    Shares differ from the mean by less than the bytes of one row; every saver computes the same division alone.
    """
    total, count = sum(tensor.nbytes for tensor in tensors), len(savers)
    shares: dict[int, list[tuple[int, int, int]]] = {saver: [] for saver in savers}
    saver, before = 0, 0  # before: bytes of the tensors already divided
    for index, tensor in enumerate(tensors):
        rows, width, row = store.rows(tensor), store.row_bytes(tensor), 0
        while row < rows:
            end = total * (saver + 1) // count  # of this saver's share
            last = saver == count - 1
            # The row that straddles the end goes to the side that holds the larger half of it.
            stop = rows if last or not width else min(rows, max(row, (2 * (end - before) + width) // (2 * width)))
            if stop > row:
                shares[savers[saver]].append((index, row, stop))
                row = stop
            if row < rows:
                saver += 1
        before += tensor.nbytes
    return {saver: tuple(share) for saver, share in shares.items()}


def save(
    plan: SavePlan, *, rank: int, shard: int = 0, tensors: Sequence[TensorInfo], read: Reader, deadline: float
) -> Written:
    """Write this rank's share into `plan.directory`/rank<r>.h5: aside, checksummed, fsynced, renamed.

    Args:
        tensors: the whole state in canonical order, the same on every saver of the shard.
        read: gives contiguous raw bytes of rows, at most CHUNK bytes (or one row) a call, in the caller's thread.
        deadline: time.monotonic() after which nothing new is begun. A file system that hangs inside one call is not
            interrupted: call from a thread that may be left behind.

    Raises:
        SaveError: not written; names the path, the reason, the bytes needed and free. Nothing is left of the file.
    """
    share = divide(tensors, plan.savers[shard])[rank]
    parts = [(index, store.Part(tensors[index], start, stop)) for index, start, stop in share]
    name = contract.RANK_FILE.format(rank=rank)
    path, aside = os.path.join(plan.directory, name), os.path.join(plan.directory, f".{name}.part")
    try:
        for folder in (os.path.dirname(plan.directory), plan.directory):  # makedirs gives its mode to the last one only
            os.makedirs(folder, files.FOLDER_MODE, exist_ok=True)
        with contextlib.closing(store.Image()) as image, files.create(aside) as file:
            pieces, nbytes = _write(file.fileno(), image, parts, read, deadline)
        os.rename(aside, path)
        files.sync_folder(plan.directory)
    except (OSError, SaveError) as error:
        _discard(aside, path)
        if isinstance(error, SaveError):
            raise
        raise SaveError(files.explain(path, error, sum(_nbytes(part) for _, part in parts))) from error
    except BaseException:
        _discard(aside, path)
        raise
    return Written(rank=rank, epoch=plan.epoch, file=name, nbytes=nbytes, pieces=pieces)


def _write(
    fd: int, image: store.Image, parts: Sequence[tuple[int, store.Part]], read: Reader, deadline: float
) -> tuple[tuple[Piece, ...], int]:
    """Write data first and HDF5's own bytes last: until then the file is not one that anybody could take for whole."""
    pieces, behind = [], Writeback(fd)
    for index, part in parts:
        offset, crc = image.reserve(part), 0
        for start, stop in _chunks(part):
            if time.monotonic() > deadline:
                raise SaveError(f"out of time in the save at {part.tensor.name} row {start}; raise save=")
            view = read(index, start, stop)
            data = view.cast("B") if view.format != "B" or view.ndim != 1 else view
            if len(data) != (stop - start) * store.row_bytes(part.tensor):
                raise SaveError(f"{part.tensor.name}: {len(data)} bytes were given for rows {start} to {stop}")
            files.pwrite(fd, data, offset)
            offset += len(data)
            behind.reached(offset)
            crc = zlib.crc32(data, crc)  # while the disk is busy with what was begun
        pieces.append(Piece(part.tensor.name, part.start, part.stop, crc))
    metadata, nbytes = image.finish()
    for at, own in metadata:
        files.pwrite(fd, memoryview(own), at)
    os.ftruncate(fd, nbytes)
    os.fsync(fd)
    return tuple(pieces), nbytes


def _chunks(part: store.Part) -> Iterator[tuple[int, int]]:
    width = store.row_bytes(part.tensor)
    if width:
        step = max(1, CHUNK // width)
        for start in range(part.start, part.stop, step):
            yield start, min(start + step, part.stop)


def _nbytes(part: store.Part) -> int:
    return (part.stop - part.start) * store.row_bytes(part.tensor)


def _discard(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


class Writeback:
    """Lets the disk begin with what is written: checksums are computed meanwhile, and fsync finds little to do."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begun = 0

    def reached(self, offset: int) -> None:
        """Begin with all up to `offset`, a few megabytes at a time. Only a hint: errors come out in fsync."""
        if offset - self._begun >= BEHIND:
            SYNC_FILE_RANGE(self._fd, self._begun, offset - self._begun, SYNC_FILE_RANGE_WRITE)
            self._begun = offset
