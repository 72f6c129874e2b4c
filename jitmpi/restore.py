"""Turn a committed checkpoint back into bytes: Manifest -> tensors, contexts, scalars.

Rule 1: what is handed out has been checked against the manifest's checksums; damage is DamagedError, naming file and
    dataset.
Rule 2: only the files that the manifest names, beside it, are opened; the virtual datasets of checkpoint.h5 are for
    people.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from jitmpi import files, manifests, store, tidy
from jitmpi.errors import ConfigError, DamagedError
from jitmpi.events import Context, Manifest, Piece, TensorInfo, Written
from jitmpi.manifests import read as read_manifest
from slurm_plugin import contract

__all__ = ["Problem", "Source", "candidates", "differences", "read_manifest", "verify"]

log = logging.getLogger("jitmpi")

CHUNK = 16 << 20  # bytes read at a time; its checksum is computed while they are in the processor's cache
MADE_BY_THE_SCRIPT = ("model/", "extra/")  # tensors that are there before the first update: parameters and buffers
SHOWN = 8  # differences named in a message; the rest is counted

Bytes = numpy.typing.NDArray[numpy.uint8]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint; `dataset` is "" when it concerns the whole file."""

    file: str
    dataset: str
    what: str


def candidates(job_directory: str, resume: str = "") -> list[str]:
    """List the checkpoints to start from, newest first: the job's own, then `resume`. None means a fresh start.

    Only manifests and sizes are looked at, so that it takes no time; the checksums are compared when the data are read.

    Raises:
        DamagedError: the job has committed checkpoints, but none of them can be used, and there is nothing else.
        ConfigError: `resume` is all there is, and is not a whole checkpoint.
    """
    tidy.finish(job_directory)
    own = [found.path for found in tidy.committed(job_directory)]
    found, problems = [], []
    for path in [*own, resume] if resume else own:
        problem = _quick_problem(path)
        if problem:
            problems.append(problem)
            log.warning("jit-ckpt: checkpoint not used: %s", problem)
        else:
            found.append(path)
    if problems and not found:
        if own:
            raise DamagedError(f"no checkpoint of {job_directory} can be used: {problems[0]}; repair or remove them")
        raise ConfigError(f"resume={resume} cannot be used: {problems[0]}; name the folder of a committed checkpoint")
    return found


def differences(manifest: Manifest, tensors: Sequence[TensorInfo], world_size: int) -> list[str]:
    """Say how a fresh process differs from the one that was saved; empty when the checkpoint fits.

    Parameters and buffers must be the same ones. State of optimizers, schedulers and scaler mostly comes into being
    with the first update, so it may be missing here; what is there already must agree in shape and dtype.
    """
    lines = []
    if manifest.world_size != world_size:
        lines.append(f"world size: saved by {manifest.world_size} ranks, this job has {world_size}")
    saved = {t.name: t for t in manifest.tensors}
    fresh = {t.name: t for t in tensors}
    for name, tensor in saved.items():
        here = fresh.get(name)
        if here and (here.shape, here.dtype) != (tensor.shape, tensor.dtype):
            lines.append(f"{name}: saved as {_kind(tensor)}, here {_kind(here)}")
        elif not here and name.startswith(MADE_BY_THE_SCRIPT):
            lines.append(f"{name}: saved, but not here")
    lines += [
        f"{name}: here, but not saved" for name in fresh if name not in saved if name.startswith(MADE_BY_THE_SCRIPT)
    ]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


class Source:
    """One checkpoint, open for reading. Close it, or use it in a with statement."""

    def __init__(self, path: str, owner: int | None = None) -> None:
        """Open a checkpoint folder; only files of this user id are read if one is given.

        Raises:
            DamagedError: no believable manifest.
        """
        self.path, self._owner = path, owner
        self.manifest = read_manifest(path, owner)
        self._pieces = store.pieces_of(self.manifest.files)
        self._open: dict[str, store.RankFile] = {}
        self._index: tuple[dict[int, Context], bytes] | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor_bytes(self, info: TensorInfo, progress: Callable[[int], None] = lambda nbytes: None) -> Bytes:
        """Read the raw bytes of one tensor of the manifest, writable and contiguous, every piece checked.

        Raises:
            DamagedError: a file or dataset is missing, truncated or differs from its checksum.
        """
        data = numpy.empty(info.nbytes, numpy.uint8)
        for file, piece in self._pieces.get(info.name, ()):
            width = store.row_bytes(info)
            self._read(file, piece, info, data.data[piece.start * width : piece.stop * width], progress)
        return data

    def check_piece(self, file: Written, piece: Piece, info: TensorInfo, progress: Callable[[int], None]) -> None:
        """Read one piece and compare its checksum, with little memory.

        Raises:
            DamagedError: as for `tensor_bytes`.
        """
        self._read(file, piece, info, None, progress)

    def contexts(self) -> dict[int, Context]:
        """Read the replay context of each rank.

        Raises:
            DamagedError: checkpoint.h5 is missing or differs from its checksum.
        """
        return self._read_index()[0]

    def scalars(self) -> bytes:
        """Read the text that was handed to commit as `scalars`.

        Raises:
            DamagedError: checkpoint.h5 is missing or differs from its checksum.
        """
        return self._read_index()[1]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _read_index(self) -> tuple[dict[int, Context], bytes]:
        if self._index is None:
            path = os.path.join(self.path, contract.CHECKPOINT)
            image = files.read(path, self.manifest.index_bytes, self._owner)
            if len(image) != self.manifest.index_bytes or zlib.crc32(image) != self.manifest.index_crc32:
                raise DamagedError(f"{path}: differs from its checksum in the manifest")
            self._index = store.read_index(image)
        return self._index

    def _rank_file(self, file: Written) -> store.RankFile:
        if file.file not in self._open:
            path = os.path.join(self.path, file.file)
            opened = store.RankFile(path, files.open_regular(path, self._owner))
            if opened.size != file.nbytes:
                opened.close()
                raise DamagedError(f"{path}: has {opened.size} bytes, the manifest says {file.nbytes}")
            self._open[file.file] = opened
        return self._open[file.file]

    def _read(
        self, file: Written, piece: Piece, info: TensorInfo, into: memoryview | None, progress: Callable[[int], None]
    ) -> None:
        source = self._rank_file(file)
        at = source.locate(store.Part(info, piece.start, piece.stop))
        left, crc = (piece.stop - piece.start) * store.row_bytes(info), 0
        scratch = memoryview(bytearray(min(left, CHUNK))) if into is None else into
        while left:
            part = scratch[: min(left, CHUNK)]
            done = _pread(source, part, at)
            crc, at, left = zlib.crc32(part[:done], crc), at + done, left - done
            if into is not None:
                scratch = scratch[done:]
            progress(done)
        if crc != piece.crc32:
            raise DamagedError(f"{source.path}: dataset {info.name}: differs from its checksum in the manifest")


def verify(path: str, progress: Callable[[int], None] = lambda nbytes: None) -> list[Problem]:
    """Check everything a checkpoint consists of: manifest, sizes, index and the checksum of every piece.

    `progress` is called with the bytes read since it was last called.
    """
    try:
        source = Source(path)
    except DamagedError as error:
        return [Problem(contract.MANIFEST, "", _without(str(error), path, contract.MANIFEST))]
    with source:
        manifest = source.manifest
        problems = [Problem(file, "", what) for file, what in manifests.misfits(manifest, path)]
        bad = {problem.file for problem in problems}
        if contract.CHECKPOINT not in bad:
            try:
                source.contexts()
            except DamagedError as error:
                problems.append(Problem(contract.CHECKPOINT, "", _without(str(error), path, contract.CHECKPOINT)))
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        for file in manifest.files:
            for piece in file.pieces if file.file not in bad else ():
                try:
                    source.check_piece(file, piece, tensors[piece.name], progress)
                except DamagedError as error:
                    known = _without(str(error), path, file.file).removeprefix(f"dataset {piece.name}: ")
                    problems.append(Problem(file.file, piece.name, known))
    return problems


def _quick_problem(path: str) -> str:
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return str(error)
    for file, what in manifests.misfits(manifest, path):
        return f"{path}: {file} {what}"
    return ""


def _pread(source: store.RankFile, part: memoryview, at: int) -> int:
    try:
        done = os.preadv(source.file.fileno(), [part], at)
    except OSError as error:
        raise DamagedError(f"{source.path}: cannot be read at byte {at}: {error.strerror}") from error
    if not done:
        raise DamagedError(f"{source.path}: ends at byte {at}")
    return done


def _kind(tensor: TensorInfo) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _without(text: str, path: str, file: str) -> str:
    return text.removeprefix(os.path.join(path, file)).removeprefix(": ")
