"""What every World promises, as code that each rank of one runs; and `main`, which runs it under mpiexec."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from jitmpi.comm import World
from jitmpi.errors import BootstrapError

WAIT = 60.0
SHORT = 0.3  # a deadline that is meant to pass


def soon(seconds: float = WAIT) -> float:
    return time.monotonic() + seconds


def exchanges_in_rank_order(world: World) -> None:
    """Values of any length, none included, come to all in rank order; one exchange after the other."""
    for turn in range(5):
        got = world.exchange(bytes([turn]) * (world.rank * 1000), soon())
        assert got == [bytes([turn]) * (rank * 1000) for rank in range(world.size)]
    assert world.exchange(b"", soon()) == [b""] * world.size
    assert world.exchange(os.urandom(8), soon()) != [b""] * world.size


def waits_for_the_late(world: World) -> None:
    """An exchange waits for a rank that comes late."""
    if world.rank == world.size - 1:
        time.sleep(SHORT)
    assert world.exchange(b"%d" % world.rank, soon()) == [b"%d" % rank for rank in range(world.size)]


def broadcasts_into_buffers(world: World) -> None:
    """Every rank's buffer gets the root's bytes, in place; a world that cannot says so."""
    if not world.can_broadcast:
        raised = ""
        try:
            world.bcast(bytearray(1), 0)
        except BootstrapError as error:
            raised = str(error)
        assert "cannot broadcast" in raised
        return
    for root in range(world.size):
        data = bytearray(os.urandom(100_000)) if world.rank == root else bytearray(100_000)
        world.bcast(data, root, soon())
        assert len(set(world.exchange(bytes(data), soon()))) == 1
    part = memoryview(bytearray(b"0123456789"))
    world.bcast(part[2:5] if world.rank else memoryview(bytearray(b"abc")), 0)
    assert world.rank == 0 or bytes(part) == b"01abc56789"
    world.bcast(bytearray(), 0)


def deadlines_hold(world: World) -> None:
    """An exchange that a rank does not join ends with an error at its deadline, and `close` does not wait for it."""
    world.exchange(b"", soon())
    if world.rank != world.size - 1:
        expect(lambda: world.exchange(b"", soon(SHORT)), "in time")
        world.close()


def expect(call: Callable[[], object], text: str) -> None:
    said = None
    try:
        call()
    except BootstrapError as error:
        said = str(error)
    assert said is not None
    assert text in said, said


KEEPING = (exchanges_in_rank_order, waits_for_the_late, broadcasts_into_buffers)
ENDING = (deadlines_hold,)  # the world cannot be used after it


def main(name: str) -> None:
    """Run one promise on MpiWorld, or all that leave it usable; print a line when this rank is done."""
    from jitmpi.comm import MpiWorld

    world = MpiWorld()
    ending = [promise for promise in ENDING if promise.__name__ == name]
    for promise in ending or KEEPING:
        promise(world)
    print(f"kept {world.rank} of {world.size} over {world.name}", flush=True)
    if ending:
        time.sleep(2 * SHORT)  # as after a death: nobody calls MPI any more, the process just ends
        os._exit(0)
    world.close()
    world.close()
    from mpi4py import MPI

    assert MPI.Is_finalized()  # before training begins: a rank that dies with MPI open takes others along


if __name__ == "__main__":
    main(sys.argv[1])
