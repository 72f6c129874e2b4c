"""The values that flow through the runtime, from fault to replay. Data only: no I/O, no torch, no MPI.

detect -> Fault   settle -> Report   agree -> SavePlan   save -> Written   commit -> Manifest   restore -> Restored
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1  # of the manifest and of the files that it names


@dataclass(frozen=True)
class Member:
    """One rank of the world and where its control plane listens."""

    rank: int
    node: str  # Slurm's node name
    host: str  # IP address
    port: int


@dataclass(frozen=True)
class Fault:
    """Why the job stopped, as one observer saw it.

    Attributes:
        kind: "death" (a process is gone), "hang", "exception" or "signal" (a planned end).
        ranks: the ranks it began with; for "signal" those that got it.
        unreachable: those of `ranks` whose node no longer answers (dead or cut off), not just the process.
        minibatch: the observer's minibatch; -1 while starting.
        detail: one line for people.
        when: seconds since the epoch.
    """

    kind: str
    ranks: tuple[int, ...]
    unreachable: tuple[int, ...]
    minibatch: int
    detail: str
    when: float


BUFFERS_BY = "buffers-by"  # piece of a context: the rank whose buffers all get at the next forward pass, as digits


@dataclass(frozen=True)
class Context:
    """What one rank alone needs to run a minibatch again (random states, data position, own buffers, user state).

    `pieces` maps a name such as "random/torch", "position", "user", "buffer/bn1.running_mean" to bytes.
    `exact` is False while it is a forecast made at the end of the forward pass of the minibatch before.
    """

    rank: int
    minibatch: int
    exact: bool
    pieces: Mapping[str, bytes]


@dataclass(frozen=True)
class Report:
    """What one survivor holds after it has settled.

    Attributes:
        minibatch: the m for which its tensors are S(m).
        intact: whether they are; False after an update that failed half-way.
        shard: which shard it holds.
        lost: ranks it knows to be gone or unresponsive.
        contexts: replay contexts it holds, its own and its wards'.
        error: the text of its own exception, "" for none.
        phase: where its training thread was: "starting", "between", "updating" or "tail".
        note: what a person should know about this rank's state, "" for nothing.
    """

    rank: int
    minibatch: int
    intact: bool
    shard: int
    lost: tuple[int, ...]
    contexts: tuple[Context, ...]
    error: str
    phase: str
    note: str = ""


@dataclass(frozen=True)
class SavePlan:
    """Who writes S(minibatch), decided by one coordinator.

    Attributes:
        epoch: grows with every new plan of an attempt; the newest is the one that counts.
        savers: shard -> the ranks that share its bytes, in order.
        directory: absolute path of the folder to write into; not yet visible to readers.
    """

    epoch: int
    coordinator: int
    minibatch: int
    savers: Mapping[int, tuple[int, ...]]
    directory: str


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the state.

    Attributes:
        name: "model/<parameter or buffer>", "optimizer/<parameter>/<key>", ...
        dtype: torch's name, "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a tensor's first dimension as one saver wrote them; crc32 is of their raw bytes."""

    name: str
    start: int
    stop: int
    crc32: int


@dataclass(frozen=True)
class Written:
    """One saver's file: durable, complete."""

    rank: int
    epoch: int
    file: str
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Described:
    """What a saver's state consists of: for a coordinator that does not hold the minibatch which is saved.

    Attributes:
        scalars: everything that is not a tensor, as text.
    """

    epoch: int
    tensors: tuple[TensorInfo, ...]
    scalars: bytes


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint: what it holds, from which failure it came. Stored as manifest.json.

    Attributes:
        attempt: the launch that wrote it.
        fault: the merged fault; see `Fault`.
        nodes: node name of every rank of the world that wrote it.
        tensors: every tensor of the state in canonical order.
        files: the savers' files.
        index_bytes, index_crc32: size and checksum of checkpoint.h5.
        exact: False when a rank's replay context had to be made up; `notes` says which.
        times: seconds since the epoch of fault, detected, settled, agreed, saved, committed.
        versions: of torch, python, mpi, h5py.
    """

    job_id: str
    attempt: int
    minibatch: int
    world_size: int
    directory: str
    fault: Fault
    nodes: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]
    files: tuple[Written, ...]
    index_bytes: int
    index_crc32: int
    exact: bool
    notes: tuple[str, ...]
    times: Mapping[str, float]
    versions: Mapping[str, str]
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Manifest:
        """Read back what `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, unknown or malformed.
        """
        values = dict(raw)
        if values.get("format") != FORMAT:
            raise ValueError(f"format is {values.get('format')!r}, this version reads {FORMAT}")
        values["fault"] = Fault(**_tuples(values["fault"], "ranks", "unreachable"))
        values["nodes"] = tuple(str(n) for n in values["nodes"])
        values["notes"] = tuple(str(n) for n in values["notes"])
        values["tensors"] = tuple(TensorInfo(**_tuples(t, "shape")) for t in values["tensors"])
        values["files"] = tuple(
            Written(**{**f, "pieces": tuple(Piece(**p) for p in f["pieces"])}) for f in values["files"]
        )
        return cls(**values)


@dataclass(frozen=True)
class Cursor:
    """Where to go on after a restore: minibatch and this rank's context for it."""

    minibatch: int
    context: Context


def _tuples(raw: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: tuple(v) if k in names else v for k, v in raw.items()}
