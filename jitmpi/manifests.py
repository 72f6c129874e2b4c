"""Turn manifests into text and text into manifests that can be believed.

Rule 1: what does not fit together (rows missing or doubled, sizes that cannot be, names that lead elsewhere) is
    DamagedError.
Rule 2: the text carries its own checksum, so that a flipped bit in a minibatch number is found like one in a tensor.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jitmpi import files, store
from jitmpi.errors import DamagedError
from jitmpi.events import Fault, Manifest, Piece, TensorInfo, Written
from slurm_plugin import contract

CHECKSUM = "manifest_crc32"
MOST_TEXT = 1 << 30  # bytes of manifest.json; a million tensors make 300 MB
MOST_BYTES = 1 << 60  # of one tensor or file
MOST_DIMENSIONS = 32  # HDF5's own limit


def to_text(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, compact, with its checksum."""
    body = manifest.to_dict()
    body[CHECKSUM] = zlib.crc32(_canonical(body))
    return _canonical(body) + b"\n"


def from_text(text: bytes, source: str) -> Manifest:
    """Read what `to_text` wrote.

    Raises:
        DamagedError: it is not that; the message begins with `source`.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("is not a manifest")
        checksum = body.pop(CHECKSUM, None)
        if checksum != zlib.crc32(_canonical(body)):
            raise ValueError("its checksum differs: the text was damaged or edited")
        manifest = Manifest.from_dict(body)
        for problem in _problems(manifest):
            raise ValueError(problem)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{source}: {error}") from error
    return manifest


def read(folder: str, owner: int | None = None) -> Manifest:
    """Read manifest.json of a checkpoint folder; its `directory` is where the folder is now.

    Raises:
        DamagedError: there is none, or it cannot be believed, or it is not `owner`'s.
    """
    path = os.path.join(folder, contract.MANIFEST)
    return replace(from_text(files.read(path, MOST_TEXT, owner), path), directory=os.path.abspath(folder))


def misfits(manifest: Manifest, folder: str) -> Iterator[tuple[str, str]]:
    """Yield (file, what) for each file of a checkpoint that is missing or has another size than the manifest says."""
    expected = [(contract.CHECKPOINT, manifest.index_bytes), *((f.file, f.nbytes) for f in manifest.files)]
    for name, nbytes in expected:
        size = files.size_of(os.path.join(folder, name))
        if size is None:
            yield name, "is missing or not a regular file"
        elif size != nbytes:
            yield name, f"has {size} bytes, the manifest says {nbytes}"


def uncovered(tensors: Sequence[TensorInfo], written: Sequence[Written]) -> Iterator[str]:
    """Yield a line for each tensor whose rows are not in `written` exactly once, and for pieces of no tensor."""
    pieces = dict(store.pieces_of(written))
    for tensor in tensors:
        at = 0
        for _, piece in pieces.pop(tensor.name, ()):
            if piece.start != at or piece.stop < at:
                break
            at = piece.stop
        else:
            if at == store.rows(tensor):
                continue
        yield f"{tensor.name}: rows are missing or doubled at row {at} of {store.rows(tensor)}"
    for name in pieces:
        yield f"{name}: written, but no tensor of the state"


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what cannot be right, types first, so that the later checks may rely on the earlier ones."""
    yield from _types(manifest)
    if not 0 < manifest.world_size == len(manifest.nodes):
        yield f"world_size is {manifest.world_size} but {len(manifest.nodes)} nodes are named"
    names = set()
    for tensor in manifest.tensors:
        if tensor.name in names or not store.is_name(tensor.name):
            yield f"tensor name {tensor.name!r} is doubled or not a name"
        names.add(tensor.name)
        if tensor.dtype not in store.STORED:
            yield f"{tensor.name}: unknown dtype {tensor.dtype!r}"
        if len(tensor.shape) > MOST_DIMENSIONS or any(not 0 <= n < MOST_BYTES for n in tensor.shape):
            yield f"{tensor.name}: shape {tensor.shape} cannot be right"
        if tensor.nbytes != store.rows(tensor) * store.row_bytes(tensor) or tensor.nbytes >= MOST_BYTES:
            yield f"{tensor.name}: {tensor.nbytes} bytes is not the size of {tensor.dtype} {tensor.shape}"
    for file in manifest.files:
        if not re.fullmatch(r"rank[0-9]{1,9}\.h5", file.file) or file.file != contract.RANK_FILE.format(rank=file.rank):
            yield f"file name {file.file!r} is not that of rank {file.rank}"
        if not file.rank < manifest.world_size:
            yield f"{file.file}: the world has {manifest.world_size} ranks"
    if len({file.rank for file in manifest.files}) != len(manifest.files):
        yield "a file is named twice"
    yield from uncovered(manifest.tensors, manifest.files)
    width = {tensor.name: store.row_bytes(tensor) for tensor in manifest.tensors}
    for file in manifest.files:
        if sum((piece.stop - piece.start) * width[piece.name] for piece in file.pieces) > file.nbytes:
            yield f"{file.file}: holds more than its {file.nbytes} bytes"


def _types(manifest: Manifest) -> Iterator[str]:
    wanted: dict[type, dict[str, type]] = {
        Manifest: {"job_id": str, "attempt": int, "minibatch": int, "world_size": int, "directory": str, "exact": bool,
                   "index_bytes": int, "index_crc32": int, "times": dict, "versions": dict},
        Fault: {"kind": str, "detail": str},
        TensorInfo: {"name": str, "dtype": str, "nbytes": int},
        Written: {"rank": int, "epoch": int, "file": str, "nbytes": int},
        Piece: {"name": str, "start": int, "stop": int, "crc32": int},
    }  # fmt: skip
    values: list[Any] = [manifest, manifest.fault, *manifest.tensors, *manifest.files]
    for value in (*values, *(piece for file in manifest.files for piece in file.pieces)):
        for name, kind in wanted[type(value)].items():
            content: Any = getattr(value, name)
            if type(content) is not kind or (type(content) is int and not 0 <= content < MOST_BYTES):
                yield f"{name} is {content!r:.60}"
    for tensor in manifest.tensors:
        if any(type(n) is not int for n in tensor.shape):
            yield f"{tensor.name}: shape {tensor.shape!r:.60}"
    fault = manifest.fault
    if any(type(n) is not int for n in (*fault.ranks, *fault.unreachable, fault.minibatch)):
        yield f"fault names ranks {fault.ranks!r:.60}"
    if any(type(t) not in (int, float) for t in (fault.when, *manifest.times.values())):
        yield "times are not numbers"
