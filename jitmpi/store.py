"""Turn lists of tensors into the bytes of HDF5 files and back: the only door to h5py.

Rule 1: HDF5 never touches the disk. It lays a file out in memory (`Image`, `index_image`) and reads one through a file
    that we opened; the data go to the places it names by plain pwrite and pread. So a full disk is an errno and not an
    HDF5 library that cannot close its file, the GIL is free while data move, and no file is locked (Lustre, NFS).
Rule 2: no torch here. A dtype is torch's name for it; those that HDF5 lacks are stored as integers of the same width,
    and every dataset says its `torch_dtype`.
Rule 3: nothing read is believed: only plain contiguous datasets behind hard links count, so no file leads out of its
    folder.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import h5py
import numpy

from jitmpi.errors import DamagedError, SaveError
from jitmpi.events import Context, Piece, TensorInfo, Written

# torch dtype -> how HDF5 stores it (little-endian numpy).
STORED: dict[str, str] = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2",
    "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1", "float4_e2m1fn_x2": "u1",
    "complex128": "<c16", "complex64": "<c8", "complex32": "<u4",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "?",
}  # fmt: skip

# The newest file format of HDF5 1.10, which every h5ls in use reads: checksummed metadata, compact groups, virtual
# datasets. "latest" would write what only the HDF5 of this h5py understands.
LIBVER = ("v110", "v110")

# What h5py raises on a damaged file, all of it seen or documented.
ON_DAMAGE = (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OSError, OverflowError, MemoryError)

SCALARS = "scalars"
RANKS = "ranks"


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of one tensor, as one rank file holds them."""

    tensor: TensorInfo
    start: int
    stop: int


def version() -> str:
    """Name the versions of h5py and HDF5."""
    return f"{h5py.version.version} (HDF5 {h5py.version.hdf5_version})"


def is_name(name: str) -> bool:
    """Say whether a dataset can have this name: a path inside the file that leads down only."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def rows(tensor: TensorInfo) -> int:
    """Rows of the first dimension; a tensor without dimensions is one row."""
    return tensor.shape[0] if tensor.shape else 1


def row_bytes(tensor: TensorInfo) -> int:
    """Bytes of one row of the first dimension."""
    width = numpy.dtype(STORED[tensor.dtype]).itemsize
    for length in tensor.shape[1:]:
        width *= length
    return width


def pieces_of(written: Sequence[Written]) -> Mapping[str, list[tuple[Written, Piece]]]:
    """Map each tensor's name to the pieces that make it up, by row."""
    pieces: dict[str, list[tuple[Written, Piece]]] = {}
    for file in written:
        for piece in file.pieces:
            pieces.setdefault(piece.name, []).append((file, piece))
    for found in pieces.values():
        found.sort(key=lambda pair: (pair[1].start, pair[1].stop))
    return pieces


def check(tensors: Sequence[TensorInfo]) -> None:
    """Make sure, before training, that tensors of these names and dtypes can be stored.

    Raises:
        SaveError: one cannot; names it.
    """
    for tensor in tensors:
        if tensor.dtype not in STORED:
            raise SaveError(
                f"{tensor.name}: a tensor of dtype {tensor.dtype} cannot be stored; keep it in another dtype"
            )
        if not is_name(tensor.name):
            raise SaveError(f"{tensor.name!r} cannot be the name of a dataset; rename that parameter or buffer")
    index_image(tensors, (), (), b"")


class Image:
    """A rank file laid out in memory without its data: one dataset a part, named as its tensor.

    Reserve a place for each part, write the data there, then write what `finish` gives around them.
    """

    def __init__(self) -> None:
        self._memory = os.fdopen(os.memfd_create("jit-ckpt", os.MFD_CLOEXEC), "w+b", buffering=0)  # sparse
        with _unstorable():
            self._h5 = h5py.File(self._memory, "w", libver=LIBVER)
        self._taken: list[tuple[int, int]] = []  # (offset, bytes) of data

    def reserve(self, part: Part) -> int:
        """Return the offset in the file at which the data of a part belong.

        Raises:
            SaveError: a dtype or a name that cannot be stored.
        """
        with _unstorable():
            offset = _reserve(self._h5, part)
        if offset:
            self._taken.append((offset, (part.stop - part.start) * row_bytes(part.tensor)))
        return offset

    def finish(self) -> tuple[list[tuple[int, bytes]], int]:
        """Return HDF5's own bytes as (offset, bytes), all of them beside the data, and the size of the whole file."""
        with _unstorable():
            self._h5.close()
        fd = self._memory.fileno()
        size, at, metadata = os.fstat(fd).st_size, 0, []
        for offset, nbytes in [*sorted(self._taken), (size, 0)]:
            if offset > at:
                metadata.append((at, os.pread(fd, offset - at, at)))
            at = offset + nbytes
        return metadata, size

    def close(self) -> None:
        """Forget the image."""
        self._h5.close()
        self._memory.close()


def index_image(
    tensors: Sequence[TensorInfo], written: Sequence[Written], contexts: Iterable[Context], scalars: bytes
) -> bytes:
    """Make checkpoint.h5: every tensor in full shape as a virtual dataset over the rank files beside it.

    Contexts lie under /ranks/<rank>/<piece name>, with attributes minibatch and exact on /ranks/<rank>.

    Raises:
        SaveError: a dtype or a name that cannot be stored.
    """
    sources = pieces_of(written)
    memory = io.BytesIO()
    with _unstorable(), h5py.File(memory, "w", libver=LIBVER) as index:
        for tensor in tensors:
            _virtual(index, tensor, sources.get(tensor.name, []))
        for context in contexts:
            group = index.create_group(f"{RANKS}/{context.rank}")
            group.attrs["minibatch"] = context.minibatch
            group.attrs["exact"] = context.exact
            for name, data in context.pieces.items():
                group.create_dataset(name, data=numpy.frombuffer(data, numpy.uint8))
        index.create_dataset(SCALARS, data=numpy.frombuffer(scalars, numpy.uint8))
    return memory.getvalue()


def read_index(image: bytes) -> tuple[dict[int, Context], bytes]:
    """Read contexts and scalars back from the bytes of checkpoint.h5.

    Raises:
        DamagedError: it is not what `index_image` makes.
    """
    with _damage("checkpoint.h5"), h5py.File(io.BytesIO(image), "r") as index:
        contexts = {}
        ranks = _hard(index, RANKS) if RANKS in index else {}
        for name in ranks:
            group = _hard(ranks, name)
            pieces = dict(_leaves(group, ""))
            context = Context(int(name), int(group.attrs["minibatch"]), bool(group.attrs["exact"]), pieces)
            contexts[context.rank] = context
        return dict(sorted(contexts.items())), _bytes(_hard(index, SCALARS))


class RankFile:
    """One rank file, open for reading. Its `file` is read with pread at the places that `locate` gives."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        """Take over an open regular file; it is closed when this fails.

        Raises:
            DamagedError: it is no HDF5 file, or is damaged.
        """
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        try:
            with _damage(path):
                self._h5 = h5py.File(file, "r")
        except DamagedError:
            file.close()
            raise

    def locate(self, part: Part) -> int:
        """Return the offset in bytes at which the data of a part lie, all of them inside the file.

        Raises:
            DamagedError: there is no such dataset of this shape and dtype, or it is not plain.
        """
        name = part.tensor.name
        with _damage(f"{self.path}: dataset {name}"):
            dataset = _hard(self._h5, name)
            nbytes = (part.stop - part.start) * row_bytes(part.tensor)
            if not isinstance(dataset, h5py.Dataset) or dataset.shape != _part_shape(part):
                raise ValueError(f"is not a dataset of shape {_part_shape(part)}")
            dtype = bytes(dataset.attrs["torch_dtype"]).decode()
            if dtype != part.tensor.dtype or dataset.dtype.itemsize != numpy.dtype(STORED[dtype]).itemsize:
                raise ValueError(f"holds {dtype}, not {part.tensor.dtype}")
            if nbytes == 0:
                return 0
            offset = _contiguous(dataset)
            if offset + nbytes > self.size:
                raise ValueError(f"its data end at byte {offset + nbytes} of a file of {self.size}")
            return offset

    def close(self) -> None:
        """Close the file."""
        self._h5.close()
        self.file.close()


def _reserve(file: Any, part: Part) -> int:
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    dcpl.set_layout(h5py.h5d.CONTIGUOUS)
    dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    dcpl.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dataset = _create(file, part.tensor, _part_shape(part), dcpl)
    if (part.start, part.stop) != (0, rows(part.tensor)):
        h5py.Dataset(dataset).attrs["start_row"] = part.start
    offset = dataset.get_offset()
    return 0 if offset is None else int(offset)  # None: no bytes


def _virtual(index: Any, tensor: TensorInfo, sources: Sequence[tuple[Written, Piece]]) -> None:
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if tensor.nbytes:
        dcpl.set_layout(h5py.h5d.VIRTUAL)
        for file, piece in sources:
            part = Part(tensor, piece.start, piece.stop)
            target, source = _space(tensor.shape), _space(_part_shape(part))
            if tensor.shape:
                target.select_hyperslab((part.start, *(0 for _ in tensor.shape[1:])), _part_shape(part))
            dcpl.set_virtual(target, file.file.encode(), f"/{tensor.name}".encode(), source)
    _create(index, tensor, tensor.shape, dcpl)


def _create(file: Any, tensor: TensorInfo, shape: tuple[int, ...], dcpl: Any) -> Any:
    """Create a dataset with its `torch_dtype`, through h5py's lower level: the higher one takes twice the time."""
    dcpl.set_obj_track_times(False)
    dataset = h5py.h5d.create(file.id, tensor.name.encode(), _type(tensor.dtype), _space(shape), dcpl, _with_groups())
    word, kind = numpy.array(tensor.dtype.encode()), _word(len(tensor.dtype))  # of variable length it would cost a heap
    h5py.h5a.create(dataset, b"torch_dtype", kind, _space(())).write(word)
    return dataset


@lru_cache
def _type(dtype: str) -> Any:
    return h5py.h5t.py_create(numpy.dtype(STORED[dtype]), logical=True)


@lru_cache
def _word(length: int) -> Any:
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(length)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    return kind


@lru_cache
def _with_groups() -> Any:
    lcpl = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    lcpl.set_create_intermediate_group(True)
    return lcpl


def _space(shape: tuple[int, ...]) -> Any:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def _part_shape(part: Part) -> tuple[int, ...]:
    return (part.stop - part.start, *part.tensor.shape[1:]) if part.tensor.shape else ()


def _hard(group: Any, name: str) -> Any:
    for step in name.split("/"):
        if group.id.links.get_info(step.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{step} is a link to elsewhere")
        group = group[step]
    return group


def _contiguous(dataset: Any) -> int:
    plist = dataset.id.get_create_plist()
    offset = dataset.id.get_offset()
    if plist.get_layout() != h5py.h5d.CONTIGUOUS or plist.get_external_count() or offset is None:
        raise ValueError("its data do not lie in this file in one piece")
    return int(offset)


def _bytes(dataset: Any) -> bytes:
    if dataset.dtype != numpy.uint8 or dataset.ndim != 1:
        raise ValueError(f"{dataset.name} does not hold bytes")
    if dataset.shape[0]:
        _contiguous(dataset)
    return bytes(dataset[...].tobytes())


def _leaves(group: Any, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name in group:
        item = _hard(group, name)
        if isinstance(item, h5py.Group):
            yield from _leaves(item, f"{prefix}{name}/")
        else:
            yield prefix + name, _bytes(item)


@contextmanager
def _unstorable() -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise SaveError(f"the state cannot be laid out as HDF5: {error}; rename or convert that tensor") from error


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Turn whatever h5py raises on a damaged file into DamagedError."""
    try:
        yield
    except ON_DAMAGE as error:
        raise DamagedError(f"{what}: {error}") from error
