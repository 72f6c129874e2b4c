"""Somebody on the network without the job's key, who talks nonsense to one door of it.

    stranger.py HOST PORT CONNECTIONS       prints how many connections were accepted

Bounded in connections and time, and it knows no other address. (Slurm's own ports of a step are left alone: a stranger
who talked to them once ended the step, by Slurm's pmix plugin.)
"""

from __future__ import annotations

import contextlib
import errno
import random
import select
import socket
import sys
import time

BATCH = 400  # connections at a time; more descriptors than that not every user has
SECONDS = 60.0
NONSENSE = (
    b"",  # connects and says nothing: holds a place for as long as it is let
    b"GET / HTTP/1.1\r\n\r\n",
    b"JIT1" + bytes(20),  # half of a rank's hello
    b'{"event": "committed", "directory": "/etc", "minibatch": 7}\n',
    b'{"event": "lost"} ' + b"0" * 64 + b"\n",
    b"\xff" * 2000,
    b"[" * 5000 + b"\n",
)


def main() -> None:
    door, wanted = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
    end, accepted = time.monotonic() + SECONDS, 0
    while accepted < wanted and time.monotonic() < end:
        accepted += annoy(door, min(BATCH, wanted - accepted))
    print(accepted)


def annoy(door: tuple[str, int], count: int) -> int:
    """Connect, say something on each connection, hold on for a moment, leave; return how many were accepted."""
    sockets = [begin(door) for _ in range(count)]
    accepted = sum(answered(sockets, time.monotonic() + 1.0))
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.send(random.choice(NONSENSE))
    time.sleep(0.05)
    for sock in sockets:
        sock.close()
    return accepted


def begin(door: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex(door) not in (0, errno.EINPROGRESS):
        sock.close()
    return sock


def answered(sockets: list[socket.socket], end: float) -> list[bool]:
    """Wait for the connections until `end` and say which were accepted."""
    poll = select.poll()
    waiting = {sock.fileno(): sock for sock in sockets if sock.fileno() >= 0}
    for fd in waiting:
        poll.register(fd, select.POLLOUT)
    found = []
    while waiting and (left := end - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            found.append(waiting.pop(fd).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0)
    return found


if __name__ == "__main__":
    main()
