"""Bring every rank to the newest good checkpoint: candidates -> Cursor.

Rule 1: runs before training, while every rank is alive, so MPI may be used; rank 0 reads, the others get its bytes.
Rule 2: all ranks accept a checkpoint or none does; the next older one is tried then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jitmpi import messages, restore
from jitmpi.comm import World
from jitmpi.config import Settings
from jitmpi.errors import DamagedError, JitError, MismatchError
from jitmpi.events import Context, Cursor, Manifest, TensorInfo

if TYPE_CHECKING:
    from jitmpi.torch_state import TrainingState

EXCHANGE = 600.0  # seconds for all ranks to agree, beside the time that the slowest needs to read the state
SLOWEST = 10e6  # bytes a second of a file system that is too slow to wait for; a rank that dies is seen at once
STATE_COPIES = 3  # parameters and two moments, which a fresh process does not have yet
GOOD, DAMAGED, MISMATCH = b"good", b"damaged", b"mismatch"


def resume(world: World, state: TrainingState, settings: Settings) -> tuple[Cursor | None, str]:
    """Load the newest good checkpoint into `state` and return this rank's cursor and the checkpoint's path.

    Returns (None, "") when the job has no checkpoint yet.

    Raises:
        MismatchError: the checkpoint is of another model or world.
        DamagedError: there are checkpoints, and none of them is whole.
    """
    paths = _candidates(world, settings)
    nbytes = STATE_COPIES * sum(info.nbytes for info, _ in state.tensors())
    damage: list[str] = []
    for path in paths:
        cursor, verdict, reason = None, GOOD, ""
        try:
            cursor = _load(world, state, settings, path)
        except MismatchError as error:
            verdict, reason = MISMATCH, str(error)
        except DamagedError as error:
            verdict, reason = DAMAGED, str(error)
        verdicts = world.exchange(verdict + b" " + reason.encode(), _until(nbytes))
        worst = [v.partition(b" ")[2].decode() for v in verdicts if v.startswith(MISMATCH)]
        if worst:
            raise MismatchError(worst[0])
        broken = [v.partition(b" ")[2].decode() for v in verdicts if v.startswith(DAMAGED)]
        if not broken:
            return cursor, path
        damage.append(broken[0])
    if damage:
        raise DamagedError("no checkpoint of this job is whole: " + "; ".join(damage))
    return None, ""


def _candidates(world: World, settings: Settings) -> list[str]:
    """Let rank 0 look: ranks may not agree on what a parallel file system shows."""
    answer: dict[str, object] = {}
    if world.rank == 0:
        try:
            answer = {"paths": restore.candidates(settings.job_directory, settings.options.resume)}
        except JitError as error:
            answer = {"error": str(error)}
    first = json.loads(world.exchange(json.dumps(answer).encode(), time.monotonic() + EXCHANGE)[0])
    if "error" in first:
        raise DamagedError(str(first["error"]))
    return [str(path) for path in first["paths"]]


def _load(world: World, state: TrainingState, settings: Settings, path: str) -> Cursor:
    reads = world.rank == 0 or not world.can_broadcast
    source = None
    try:
        header = b""
        trouble: JitError | None = None
        if reads:
            try:
                own = os.path.dirname(path) == settings.job_directory  # `resume` may name a colleague's
                source = restore.Source(path, os.geteuid() if own else None)
                header = _header(source)
            except JitError as error:
                trouble = error
        manifest, contexts, scalars = _decode(_share(world, header, trouble))
        found = restore.differences(manifest, [info for info, _ in state.tensors()], world.size)
        if found:
            raise MismatchError(f"{path} does not fit this job: " + "; ".join(found[:5]))
        state.load(_reader(world, source), manifest.tensors, scalars)
        if settings.rank not in contexts:
            return Cursor(manifest.minibatch, Context(settings.rank, manifest.minibatch, False, {}))
        return Cursor(manifest.minibatch, contexts[settings.rank])
    finally:
        if source is not None:
            source.close()


def _header(source: restore.Source) -> bytes:
    contexts = [messages.encode_context(c) for _, c in sorted(source.contexts().items())]
    parts = [json.dumps(source.manifest.to_dict()).encode(), source.scalars(), *contexts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _decode(blob: bytes) -> tuple[Manifest, dict[int, Context], bytes]:
    parts: list[bytes] = []
    at = 0
    while at < len(blob):
        size = int.from_bytes(blob[at : at + 8], "little")
        parts.append(blob[at + 8 : at + 8 + size])
        at += 8 + size
    contexts = [messages.decode_context(part) for part in parts[2:]]
    return Manifest.from_dict(json.loads(parts[0])), {c.rank: c for c in contexts}, parts[1]


def _share(world: World, data: bytes, trouble: JitError | None, read: int = 0) -> bytes:
    """Send rank 0's bytes, or its trouble, to all; `read` is how many it reads before."""
    if not world.can_broadcast:
        if trouble is not None:
            raise trouble
        return data
    head = bytearray(9)
    if world.rank == 0:
        head[0] = 0 if trouble is None else (2 if isinstance(trouble, MismatchError) else 1)
        data = data if trouble is None else str(trouble).encode()
        head[1:9] = len(data).to_bytes(8, "little")
    world.bcast(head, 0, _until(read))
    body = bytearray(int.from_bytes(head[1:9], "little"))
    if world.rank == 0:
        body[:] = data
    world.bcast(body, 0, _until(len(body)))
    if head[0]:
        raise (MismatchError if head[0] == 2 else DamagedError)(body.decode())
    return bytes(body)


def _until(nbytes: int) -> float:
    """Return when a rank that reads so many bytes has hung, as a deadline of time.monotonic."""
    return time.monotonic() + EXCHANGE + nbytes / SLOWEST


def _reader(world: World, source: restore.Source | None) -> Callable[[TensorInfo], memoryview]:
    """Return the function that gives a tensor's raw bytes on every rank, in the same order everywhere."""

    def read(info: TensorInfo) -> memoryview:
        if not world.can_broadcast:
            assert source is not None
            return source.tensor_bytes(info).data
        buffer, trouble = memoryview(b""), None
        if source is None:
            buffer = memoryview(bytearray(info.nbytes))
        else:
            try:
                buffer = source.tensor_bytes(info).data
            except DamagedError as error:
                trouble = error
        _share(world, b"", trouble, info.nbytes)  # rank 0 has read all of it before it says so
        world.bcast(buffer, 0, _until(info.nbytes))
        return buffer

    return read
