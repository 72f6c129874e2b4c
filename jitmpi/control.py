"""Turn the world's members into this rank's links, and what happens on them into events.

Rule 1: `poll` is the only wait; it sleeps in the kernel until something happens or its deadline is there.
Rule 2: one thread (the agent's) calls everything here; `wake`, `send`, `broadcast` and `offer` may come from any.
Rule 3: a peer that is stuck, a stranger or a flood of strangers costs bounded memory and never a wait.

Links are made once, at the start. When they are, the listening socket is closed: from then on nobody can connect.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from jitmpi import wire
from jitmpi.errors import BootstrapError, WireError
from jitmpi.events import Member
from jitmpi.greet import Greeter, Handshake
from jitmpi.messages import Kind, replaces
from jitmpi.topology import buddies, candidates, edges, wards

__all__ = [
    "ControlPlane",
    "Event",
    "Gone",
    "Received",
    "Signalled",
    "Woken",
    "buddies",
    "candidates",
    "edges",
    "own_address",
    "wards",
]
CONNECT_S: Final = 0.05  # between two looks at who should be called, or given up, while links are built
KEPT: Final = 8  # contexts kept of each peer: its last minibatches, exact and forecast, with room for a lag
GATHERED: Final = 64  # reads of 64 KB at most when contexts are asked for: more than any window holds
FLUSH_S: Final = 0.002  # between two looks at what the peers' kernels have acknowledged


@dataclass(frozen=True)
class Gone:
    """The link to a rank ended; `unreachable` when its node no longer answers, not just its process."""

    rank: int
    unreachable: bool
    said_goodbye: bool


@dataclass(frozen=True)
class Received:
    """A verified frame; contexts do not come this way, see `ControlPlane.contexts`."""

    rank: int
    kind: Kind
    payload: bytes


@dataclass(frozen=True)
class Woken:
    """Somebody called `wake`."""


@dataclass(frozen=True)
class Signalled:
    """Python's signal module wrote this number to `wakeup_fd`."""

    signum: int


BACKLOG_S: Final = (0.02, 0.001)  # between two looks whether a peer has room again: in vain before, or not
WAKE: Final = 0  # bytes on the wake-up descriptor beside the numbers of signals, which are 1 to 64
INTERRUPT: Final = 255
KINDS: Final = frozenset(Kind)
Event = Gone | Received | Woken | Signalled


def own_address(*towards: str) -> str:
    """Return the IP address by which other hosts reach this one.

    Asks the routing table how it talks to each host named, then to its own name, then to the world; the first answer
    that is not a loopback address counts (Debian lets a host's own name mean 127.0.1.1).
    """
    loopback = "127.0.0.1"
    for target in (*filter(None, towards), socket.gethostname(), "192.0.2.1"):
        with suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                own = str(probe.getsockname()[0])
            if not (own.startswith("127.") or own == "::1"):
                return own
    return loopback


class ControlPlane:
    """This rank's links to its peers; see `listen`, `connect`, `poll`."""

    def __init__(self, rank: int, key: bytes) -> None:
        self.rank = rank
        self._refused = 0
        self._epoll = select.epoll()
        self._greeter = Greeter(rank, key, self._epoll)
        self._links: dict[int, wire.Link] = {}  # by rank
        self._by_fd: dict[int, wire.Link] = {}
        self._contexts: dict[int, tuple[wire.Opener, deque[wire.Frame]]] = {}
        self._buddies: tuple[int, ...] = ()  # who gets this rank's contexts, and dozes for that
        self._wards: tuple[int, ...] = ()
        self._goodbyes: set[int] = set()
        self._backlogged: set[wire.Link] = set()  # links whose peer has no room for what waits
        self._pending: list[Event] = []
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        _planes.add(self)

    def listen(self, host: str) -> int:
        """Listen on an address of this host and return the port, chosen by the kernel."""
        return self._greeter.listen(host)

    def connect(self, members: Sequence[Member], deadline: float) -> None:
        """Build all links of this rank; the higher rank of a pair calls the lower. `deadline` is of time.monotonic.

        Raises:
            BootstrapError: some are not there at the deadline, or ended before it; says who and why.
        """
        pairs = edges(members)
        self._buddies, self._wards = buddies(members, self.rank), wards(members, self.rank)
        greeter = self._greeter
        greeter.expect({m.rank: m for m in members if (m.rank, self.rank) in pairs or (self.rank, m.rank) in pairs})
        while greeter.missing:
            now = time.monotonic()
            if now >= deadline:
                raise BootstrapError(greeter.who_is_missing())
            for event in self._pending:
                if isinstance(event, Gone):
                    raise BootstrapError(f"rank {event.rank} ended while rank {self.rank} waited for others to connect")
            greeter.tick(now)
            self._pending += self._turn(min(deadline - now, CONNECT_S))
        greeter.stop()

    def _adopt(self, sock: socket.socket, handshake: Handshake) -> list[Event]:
        assert handshake.peer is not None
        assert handshake.keys is not None
        link = wire.Link(sock, handshake.peer, handshake.keys, self._on_backlog)
        link.nudge = link.peer in self._buddies
        if link.peer in self._wards:
            link.doze()
        self._links[link.peer] = self._by_fd[link.fd] = link
        self._contexts[link.peer] = (link.opener, deque(maxlen=KEPT))
        try:
            return self._receive(link, link.opener.feed(handshake.rest))
        except WireError:
            self._refused += 1
            return self._lose(link)

    @property
    def refused(self) -> int:
        """Connections and frames that were dropped because they were not a peer's."""
        return self._refused + self._greeter.refused

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that are linked now."""
        return frozenset(self._links)

    @property
    def wakeup_fd(self) -> int:
        """A descriptor for signal.set_wakeup_fd; what it gets comes out of `poll` as `Signalled`."""
        return self._waker.fileno()

    def wake(self) -> None:
        """Make `poll` return `Woken`; from any thread."""
        self._interrupt(WAKE)

    def send(self, rank: int, kind: Kind, payload: bytes) -> bool:
        """Send now or as soon as the peer takes it; False when there is no link to this rank.

        Raises:
            WireError: the payload is longer than `wire.MAX_FRAME`.
        """
        link = self._links.get(rank)
        return link is not None and link.send(kind, payload)

    def broadcast(self, kind: Kind, payload: bytes) -> None:
        """Send to every linked rank."""
        for link in list(self._links.values()):
            link.send(kind, payload)

    def offer(self, ranks: Sequence[int], kind: Kind, parts: Sequence[wire.Buffer]) -> bool:
        """Send a payload that lies in parts to some ranks, as far as they take it at once; False unless all did.

        For the training thread: it never waits, and the payload is hashed once.
        """
        hashed, size, all_took = wire.digest(parts), sum(map(len, parts)), True
        for rank in ranks:
            link = self._links.get(rank)
            if link is None or not link.offer(kind, parts, size, hashed):
                all_took = False
        return all_took

    def gather(self) -> list[Event]:
        """Read what the kernel has kept of the wards' words, and return what happened; bounded, for they may go on."""
        for rank in self._wards:
            for _ in range(GATHERED):
                link = self._links.get(rank)
                if link is None or not link.readable():
                    break
                self._pending += self._serve(link)
        events, self._pending = self._pending, []
        return events

    def contexts(self, rank: int) -> list[bytes]:
        """Return the last contexts that a rank sent, oldest first; also after it is gone. Call `gather` before.

        They are verified here and not when they come: most are never asked for, and the hash costs the training thread.
        """
        if rank not in self._contexts:
            return []
        opener, frames = self._contexts[rank]
        good = [frame.payload for frame in frames if opener.verify(frame)]
        self._refused += len(frames) - len(good)
        return good

    def poll(self, timeout: float) -> list[Event]:
        """Sleep until something happens, at most `timeout` seconds; return what did, in order."""
        deadline = time.monotonic() + timeout
        events, self._pending = self._pending, []
        left = timeout
        while not events:
            events = self._turn(left)
            left = deadline - time.monotonic()
            if left <= 0:
                break
        return events

    def flush(self, deadline: float) -> bool:
        """Wait until every peer's kernel has all that was sent; False at the deadline (of time.monotonic)."""
        while any(link.unsent() for link in list(self._links.values())):
            if time.monotonic() >= deadline:
                return False
            self._pending += self._turn(FLUSH_S)
        return True

    def close(self) -> None:
        """Close everything; peers see this rank gone. Call `flush` first when the last words matter."""
        self._greeter.stop()
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        self._by_fd.clear()
        self._epoll.close()
        self._waker.close()
        self._wakeup.close()
        _planes.discard(self)

    def _turn(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        if self._backlogged:
            moved = [link.write() for link in list(self._backlogged)]
            timeout = min(timeout, BACKLOG_S[any(moved)])
        for fd, _ in self._epoll.poll(max(timeout, 0)):
            if fd in self._by_fd:
                events += self._serve(self._by_fd[fd])
            elif fd == self._wakeup.fileno():
                events += self._wakeups()
            elif proved := self._greeter.on_event(fd):
                events += self._adopt(*proved)
        return events

    def _serve(self, link: wire.Link) -> list[Event]:
        try:
            events = self._receive(link, link.read())
        except WireError:
            self._refused += 1
            return self._lose(link)
        return events + self._lose(link) if link.ended else events

    def _receive(self, link: wire.Link, frames: list[wire.Frame]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            if frame.kind == Kind.CONTEXT:
                kept = self._contexts[link.peer][1]
                if kept and replaces(frame.payload, kept[-1].payload):
                    kept.pop()
                kept.append(frame)
                continue
            if frame.kind not in KINDS or not link.opener.verify(frame):
                self._refused += 1
                return events + self._lose(link)
            if frame.kind == Kind.GOODBYE:
                self._goodbyes.add(link.peer)
            events.append(Received(link.peer, Kind(frame.kind), frame.payload))
        return events

    def _lose(self, link: wire.Link) -> list[Event]:
        if self._links.pop(link.peer, None) is None:
            return []
        del self._by_fd[link.fd]
        self._backlogged.discard(link)
        self._epoll.unregister(link.fd)
        link.close()
        return [Gone(link.peer, link.unreachable, link.peer in self._goodbyes)]

    def _wakeups(self) -> list[Event]:
        try:
            numbers = self._wakeup.recv(4096)
        except BlockingIOError:
            return []
        seen = [number for number in dict.fromkeys(numbers) if number != INTERRUPT]
        return [Woken() if number == WAKE else Signalled(number) for number in seen]

    def _interrupt(self, number: int = INTERRUPT) -> None:
        with suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._waker.send(bytes((number,)))

    def _on_backlog(self, link: wire.Link, waiting: bool) -> None:
        if not waiting:
            self._backlogged.discard(link)
        elif link not in self._backlogged:
            self._backlogged.add(link)
            self._interrupt()  # a `poll` that sleeps must look at it from now on

    def _abandon(self) -> None:
        """Let go of every descriptor in a forked child, which would else keep a dead rank looking alive."""
        for link in self._links.values():
            link.abandon()
        self._greeter.abandon()
        _unhook(self._waker.fileno())
        wire.abandon(self._waker)
        wire.abandon(self._wakeup)
        self._links, self._by_fd = {}, {}
        self._epoll.close()


def _unhook(fd: int) -> None:
    # Signals of the child would be written to whatever file gets this number next.
    with suppress(ValueError):
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, fd):
            signal.set_wakeup_fd(before)


def _after_fork() -> None:
    for plane in list(_planes):
        plane._abandon()


_planes: weakref.WeakSet[ControlPlane] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
