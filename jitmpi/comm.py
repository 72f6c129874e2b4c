"""Turn the tasks of a Slurm step into one world: over MPI, or over files where srun starts without MPI.

Rule 1: a world is used only while every rank is known to be alive, and closed before training begins: a rank that dies
        with MPI open takes the others along under Slurm's pmix. Behind a wait that did not end no MPI function is
        called, not even MPI_Finalize, which kills the survivors with some builds.
Rule 2: a world has exactly the step's size. N silent worlds of one rank are an error that names its cause.
Rule 3: every wait has a deadline (of time.monotonic), which MPI does not offer: collectives are started, then tested.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from jitmpi import turns
from jitmpi.config import Settings
from jitmpi.errors import BootstrapError

CHUNK: Final = 64 << 20  # bytes of one broadcast; far below 2^31, what an MPI count can hold
# Open MPI 4.1.4 crashes when a peer's first message arrives while a rank is still at the end of MPI_Init: in 5 of 144
# starts of three ranks on a busy machine, always rank 0, to which the others connect; 5.0.7 was seen to do the same.
# So nobody speaks at once.
INIT_TAIL_S: Final = 0.5
CHUNK_S: Final = 120.0  # seconds that one chunk may take where the caller gives no deadline
POLL_S: Final = (0.005, 0.1)  # between two looks at the rendezvous folder: at first, at last
ADVICE: Final = (
    "Start with the PMI that this MPI was built for (`srun --mpi=pmix` or `srun --mpi=pmi2`; `srun --mpi=list` shows "
    "what this cluster has), or with `srun --mpi=none` to meet through files"
)
_witnesses: list[int] = []


class World(Protocol):
    """All ranks of the step.

    Attributes:
        name: what carries it, for people: "Open MPI v4.1.4", "files".
        can_broadcast: whether `bcast` works; without it every rank reads the file system itself.
        held: MPI stays open behind `close`, because the script had opened it before.
    """

    rank: int
    size: int
    name: str
    can_broadcast: bool
    held: bool

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        """Give every rank's value to every rank, in rank order.

        Raises:
            BootstrapError: a rank did not take part in time, now or in an earlier call.
        """

    def bcast(self, data: bytearray | memoryview, root: int, deadline: float | None = None) -> None:
        """Fill every rank's buffer, all of one length, with that of `root`.

        Raises:
            BootstrapError: as above, or this world cannot broadcast.
        """

    def close(self) -> None:
        """End the world in an orderly way, once; nothing where a rank did not take part in time."""


def open_world(settings: Settings) -> World:
    """Open the world of this step; collective.

    Raises:
        BootstrapError: MPI is missing or made another world than the step; says which MPI, which PMI, and the fix.
    """
    if settings.mpi_type == "none":
        # MPI is not even loaded: without a PMI some builds end the process in MPI_Init.
        if settings.rank == 0 and settings.size > 1:
            why = "torchrun started the ranks" if settings.torchrun else "srun starts without MPI (--mpi=none)"
            print(f"jit-ckpt: {why}; the ranks meet through files", file=sys.stderr)
        folder = f".rendezvous-r{settings.attempt}-{settings.step_id}"
        return FileWorld(settings.rank, settings.size, os.path.join(settings.job_directory, folder))
    try:
        with _witness(settings.rank, f"MPI ended the process in MPI_Init under --mpi={settings.mpi_type}. {ADVICE}"):
            world = MpiWorld(settings)
    except (ImportError, RuntimeError) as error:
        raise BootstrapError(
            f"srun offers MPI over {settings.mpi_type}, but mpi4py cannot start it ({error}); install mpi4py and an "
            "MPI library in the job's Python, or start with `srun --mpi=none` to meet through files"
        ) from error
    if (world.rank, world.size) != (settings.rank, settings.size):
        raise BootstrapError(
            f"{world.name} made a world of {world.size} rank(s) and calls this one {world.rank}, but the step has "
            f"{settings.size} task(s) and this one is {settings.rank}: srun used --mpi={settings.mpi_type}, which this "
            f"MPI does not speak. {ADVICE}"
        )
    return world


@contextmanager
def _witness(rank: int, last_words: str) -> Iterator[None]:
    """Let a shell started by rank 0 say `last_words` if the process ends inside the block, where Python has no say.

    Open MPI calls exit(1) inside MPI_Init when it was built for another PMI; its own message names no fix for Slurm.
    """
    if rank != 0:
        yield
        return
    # A shell and not a fork: this process has threads and large memory, and the witness needs neither.
    reader, writer = os.pipe()
    _witnesses.append(writer)
    command = ["sh", "-c", 'read -r alive || printf "jit-ckpt: %s\\n" "$1" >&2', "sh", last_words]
    child = 0
    with suppress(OSError):
        child = os.posix_spawn("/bin/sh", command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
    os.close(reader)
    try:
        yield
    finally:
        dismiss()
        _witnesses.remove(writer)
        os.close(writer)
        if child:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def dismiss() -> None:
    """Let nobody say that MPI ended this process: another does, while it waits in MPI_Init; from any thread."""
    for writer in _witnesses:
        with suppress(OSError):
            os.write(writer, b"alive\n")


class MpiWorld:
    """The world of MPI_COMM_WORLD, in a communicator of its own."""

    can_broadcast = True

    def __init__(self, settings: Settings | None = None) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # `close` finalizes; an exit behind a failure must not
        from mpi4py import MPI

        self._mpi: Any = MPI
        self.held = bool(MPI.Is_initialized())
        if not self.held:
            time.sleep(turns.wait(settings, time.time()) if settings else 0.0)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)  # what less the library gives is enough: one thread calls at a time
        if MPI.Get_library_version().startswith(("Open MPI v4", "Open MPI v5")):
            time.sleep(INIT_TAIL_S)
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self.name = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
        self._over = False

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        """See `World`."""
        lengths = array("q", [0]) * self.size
        self._finish(self._usable().Iallgather(array("q", [len(value)]), lengths), deadline, "exchange")
        offsets = [sum(lengths[:rank]) for rank in range(self.size)]
        merged = bytearray(sum(lengths))
        into = [merged, (lengths.tolist(), offsets), self._mpi.BYTE]
        self._finish(self._usable().Iallgatherv([value, self._mpi.BYTE], into), deadline, "exchange")
        return [bytes(merged[o : o + n]) for o, n in zip(offsets, lengths, strict=True)]

    def bcast(self, data: bytearray | memoryview, root: int, deadline: float | None = None) -> None:
        """See `World`."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = [view[start : start + CHUNK], self._mpi.BYTE]
            until = time.monotonic() + CHUNK_S if deadline is None else deadline
            self._finish(self._usable().Ibcast(part, root), until, "broadcast")

    def close(self) -> None:
        """See `World`."""
        if self._over:
            return
        self._over = True
        self._comm.Free()
        if not self.held:
            self._mpi.Finalize()

    def _usable(self) -> Any:
        if self._over:
            raise BootstrapError(f"rank {self.rank}: the MPI world has ended; it is not used any more")
        return self._comm

    def _finish(self, request: Any, deadline: float, what: str) -> None:
        # MPI makes progress only inside its calls, so this tests without a pause; the sleep lets other threads run.
        while not request.Test():
            if time.monotonic() > deadline:
                self._over = True  # a collective that did not end can be neither repeated nor taken back
                raise BootstrapError(
                    f"rank {self.rank}: the MPI {what} did not end in time; a rank of the step is missing, hangs or "
                    "is cut off"
                )
            time.sleep(0)


class FileWorld:
    """A world whose ranks meet in a folder that all of them see; for `srun --mpi=none`.

    Exchange n of rank r is the file `n.r`, mode 0600 (it may be a key). Whoever has read all files leaves a mark,
    `n.r.read`; whoever finds all marks removes the exchange's files, so nothing is left of it.
    """

    name = "files"
    can_broadcast = held = False

    def __init__(self, rank: int, size: int, directory: str) -> None:
        self.rank, self.size = rank, size
        self._directory = directory
        self._turn = 0
        if rank == 0:
            _remove_older(directory)

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        """See `World`."""
        turn, self._turn = self._turn, self._turn + 1
        if self.size == 1:
            return [value]
        try:
            self._publish(f"{turn}.{self.rank}", value)
            names = {f"{turn}.{rank}" for rank in range(self.size)}
            self._await(names, deadline)
            values = [self._read(f"{turn}.{rank}") for rank in range(self.size)]
            self._publish(f"{turn}.{self.rank}.read", b"")
            marks = {name + ".read" for name in names}
            if marks <= self._listing():
                self._remove(names | marks)
        except OSError as error:
            raise BootstrapError(f"the ranks cannot meet in {self._directory}: {error}") from error
        return values

    def bcast(self, data: bytearray | memoryview, root: int, deadline: float | None = None) -> None:
        """See `World`."""
        raise BootstrapError("a world without MPI cannot broadcast; every rank reads the file system itself")

    def close(self) -> None:
        """See `World`; what the ranks left in the folder is gone already."""

    def _await(self, names: set[str], deadline: float) -> None:
        pause, most = POLL_S
        while missing := names - self._listing():
            if time.monotonic() > deadline:
                ranks = sorted(int(name.partition(".")[2]) for name in missing)
                raise BootstrapError(
                    f"{len(ranks)} of {self.size} ranks left no file in {self._directory} in time (rank(s) "
                    f"{', '.join(map(str, ranks[:16]))}); check that they started and see this folder"
                )
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _publish(self, name: str, value: bytes) -> None:
        aside = os.path.join(self._directory, f".{name}")
        while True:
            os.makedirs(
                os.path.dirname(self._directory), mode=0o700, exist_ok=True
            )  # the job's, if it is not there yet
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            if os.stat(self._directory).st_uid != os.geteuid():
                raise BootstrapError(f"{self._directory} belongs to another user; it is not used")
            # The folder may be removed by the rank that ends the exchange before: then it is made again.
            with suppress(FileNotFoundError):
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                    file.write(value)
                os.replace(aside, os.path.join(self._directory, name))
                return

    def _listing(self) -> set[str]:
        # Opening the folder makes NFS ask the server; looking each name up could be answered from its cache.
        try:
            return set(os.listdir(self._directory))
        except FileNotFoundError:
            return set()

    def _read(self, name: str) -> bytes:
        with open(os.path.join(self._directory, name), "rb") as file:
            return file.read()

    def _remove(self, names: set[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory, name))
        with suppress(OSError):  # the next exchange has begun in it
            os.rmdir(self._directory)


def _remove_older(directory: str) -> None:
    """Remove what earlier launches that died in their bootstrap left behind."""
    parent, own = os.path.split(directory)
    number = _attempt(own)
    with suppress(OSError):
        for name in os.listdir(parent):
            if -1 < _attempt(name) < number:
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _attempt(name: str) -> int:
    text = name.removeprefix(".rendezvous-r").partition("-")[0]
    return int(text) if name.startswith(".rendezvous-r") and text.isdigit() else -1
