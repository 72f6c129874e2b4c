"""Turn the world's members into this rank's links, and what happens on them into events.

Rule 1: `poll` is the only wait; it sleeps in the kernel until something happens or its deadline is there.
Rule 2: one thread (the agent's) calls everything here; `wake`, `send`, `broadcast` and `offer` may come from any.
Rule 3: a peer that is stuck, a stranger or a flood of strangers costs bounded memory and never a wait.

Links are made once, at the start. When they are, the listening socket is closed: from then on nobody can connect.
"""

from __future__ import annotations

import errno
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
from jitmpi.messages import Kind
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
HALF_OPEN: Final = 64  # connections that have not proved themselves, at a time
PROOF_S: Final = 2.0  # that a connection may take to prove itself
CROWDED_S: Final = 0.05  # the same when others wait; a peer whose turn is cut short by it tries again
RETRY_S: Final = 0.1  # between two tries to connect
KEPT: Final = 8  # contexts kept of each peer: its last minibatches, exact and forecast, with room for a lag
FLUSH_S: Final = 0.002  # between two looks at what the peers' kernels have acknowledged
QUIET_S: Final = 0.002  # after contexts came: they are gathered, so that a fast loop costs one wake-up each 2 ms


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


@dataclass
class _Opening:
    """A connection whose peer has not proved itself."""

    sock: socket.socket
    handshake: wire.Handshake
    began: float
    calling: int | None  # the rank that we call; None when we are called
    greeted: bool = False


class ControlPlane:
    """This rank's links to its peers; see `listen`, `connect`, `poll`."""

    def __init__(self, rank: int, key: bytes) -> None:
        self.rank = rank
        self.refused = 0  # connections and frames dropped because they were not ours
        self._key = key
        self._epoll = select.epoll()
        self._links: dict[int, wire.Link] = {}  # by rank
        self._by_fd: dict[int, wire.Link] = {}
        self._openings: dict[int, _Opening] = {}  # by descriptor
        self._contexts: dict[int, tuple[wire.Opener, deque[wire.Frame]]] = {}
        self._goodbyes: set[int] = set()
        self._pending: list[Event] = []
        self._offered = (b"", wire.digest(b""))
        self._listener: socket.socket | None = None
        self._missing: dict[int, Member] = {}
        self._retry: dict[int, float] = {}  # rank to call -> when
        self._reasons: dict[int, str] = {}
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        _planes.add(self)

    # -- the start ----------------------------------------------------------------------------------------------

    def listen(self, host: str) -> int:
        """Listen on an address of this host and return the port, chosen by the kernel."""
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind((host, 0))
        self._listener.listen(4096)
        return int(self._listener.getsockname()[1])

    def connect(self, members: Sequence[Member], deadline: float) -> None:
        """Build all links of this rank; the higher rank of a pair calls the lower. `deadline` is of time.monotonic.

        Raises:
            BootstrapError: some are not there at the deadline; says who and why.
        """
        pairs = edges(members)
        self._missing = {m.rank: m for m in members if (m.rank, self.rank) in pairs or (self.rank, m.rank) in pairs}
        self._retry = {rank: 0.0 for rank in self._missing if rank < self.rank}
        if self._listener is not None:
            self._epoll.register(self._listener, select.EPOLLIN)
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise BootstrapError(self._who_is_missing())
            for event in self._pending:
                if isinstance(event, Gone):
                    raise BootstrapError(f"rank {event.rank} ended while rank {self.rank} waited for others to connect")
            self._expire(now)
            for rank in [rank for rank, when in self._retry.items() if when <= now]:
                self._call(self._missing[rank], now)
            self._pending += self._turn(min(deadline - now, CROWDED_S))
        self._stop_listening()

    def _who_is_missing(self) -> str:
        lines = []
        for rank, member in sorted(self._missing.items()):
            reason = self._reasons.get(rank, "it did not connect" if rank > self.rank else "it did not answer")
            lines.append(f"rank {rank} on {member.node} ({member.host}:{member.port}): {reason}")
        return (
            f"rank {self.rank} has no control link to {len(lines)} rank(s): {'; '.join(lines[:8])}; "
            "check that these tasks run and that no firewall stands between the nodes"
        )

    def _call(self, member: Member, now: float) -> None:
        del self._retry[member.rank]
        sock = socket.socket(socket.AF_INET6 if ":" in member.host else socket.AF_INET, socket.SOCK_STREAM)
        wire.configure(sock)
        handshake = wire.Handshake(self._key, self.rank, member.rank)
        self._openings[sock.fileno()] = _Opening(sock, handshake, now, member.rank)
        self._epoll.register(sock, select.EPOLLOUT)
        code = sock.connect_ex((member.host, member.port))
        if code not in (0, errno.EINPROGRESS):
            self._refuse(sock.fileno(), os.strerror(code))

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            now = time.monotonic()
            called = [o for o in self._openings.values() if o.calling is None]
            if len(called) >= HALF_OPEN:
                oldest = min(called, key=lambda opening: opening.began)
                if now - oldest.began < CROWDED_S:
                    self._epoll.modify(self._listener, 0)  # until `_expire` has made room
                    return
                self._refuse(oldest.sock.fileno(), "it did not prove itself in time")
            try:
                sock, _ = self._listener.accept()
            except (
                OSError
            ):  # nobody is left, or the caller has gone, or no descriptor is free: the next turn tries again
                return
            wire.configure(sock)
            handshake = wire.Handshake(self._key, self.rank, None, self._expects)
            self._openings[sock.fileno()] = _Opening(sock, handshake, now, None)
            self._epoll.register(sock, select.EPOLLIN)

    def _expects(self, rank: int) -> bool:
        return rank > self.rank and rank in self._missing

    def _expire(self, now: float) -> None:
        for fd, opening in list(self._openings.items()):
            # A peer that has proved itself to us may count us as connected already: giving up would look like a death.
            if now - opening.began > PROOF_S and not opening.handshake.trusted:
                self._refuse(fd, "it did not prove itself in time")
        if self._listener is not None:
            self._epoll.modify(self._listener, select.EPOLLIN)

    def _refuse(self, fd: int, reason: str) -> None:
        opening = self._openings.pop(fd)
        self._epoll.unregister(fd)  # closing alone does not: a child forked just now may still hold the descriptor
        opening.sock.close()
        self.refused += 1
        if opening.calling is not None:
            self._reasons[opening.calling] = reason
            self._retry[opening.calling] = time.monotonic() + RETRY_S

    def _advance(self, fd: int) -> list[Event]:
        opening = self._openings[fd]
        try:
            if opening.calling is not None and not opening.greeted:
                code = opening.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                opening.greeted = True
                opening.sock.send(opening.handshake.hello())
                self._epoll.modify(fd, select.EPOLLIN)
                return []
            data = opening.sock.recv(wire.HELLO_BYTES)
            if not data:
                raise WireError("it closed the connection")
            answer = opening.handshake.receive(data)
            if answer:
                opening.sock.send(answer)  # at most 64 bytes into an empty buffer: taken whole or the peer is gone
        except BlockingIOError:
            return []
        except OSError as error:
            self._refuse(fd, error.strerror or str(error))
            return []
        except WireError as error:
            self._refuse(fd, str(error))
            return []
        return self._adopt(fd) if opening.handshake.keys is not None else []

    def _adopt(self, fd: int) -> list[Event]:
        opening = self._openings.pop(fd)
        link = wire.Link(opening.sock, opening.handshake, self._want_write)
        if link.peer not in self._missing:  # two connections of one rank proved themselves; the first one counts
            self._epoll.unregister(fd)
            link.close()
            self.refused += 1
            return []
        del self._missing[link.peer]
        self._links[link.peer] = self._by_fd[fd] = link
        self._contexts[link.peer] = (link.opener, deque(maxlen=KEPT))
        return self._receive(link, link.opener.feed(opening.handshake.rest))

    def _stop_listening(self) -> None:
        for fd in list(self._openings):
            self._refuse(fd, "all peers are connected")
        self._retry.clear()
        if self._listener is not None:
            with suppress(OSError):  # `close` may come before `connect` registered it
                self._epoll.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # -- the run ------------------------------------------------------------------------------------------------

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
        with suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._waker.send(b"\0")

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

    def offer(self, rank: int, kind: Kind, payload: bytes) -> bool:
        """Send to a rank if it takes it at once, never waiting; False when not. For the training thread.

        The same payload object for several ranks is hashed once.
        """
        link = self._links.get(rank)
        if link is None:
            return False
        if self._offered[0] is not payload:
            self._offered = (payload, wire.digest(payload))
        return link.offer(kind, payload, self._offered[1])

    def contexts(self, rank: int) -> list[bytes]:
        """Return the last contexts that a rank sent, oldest first; also after it is gone.

        They are verified here and not when they come: most are never asked for, and the hash costs the training thread.
        """
        if rank not in self._contexts:
            return []
        opener, frames = self._contexts[rank]
        good = [frame.payload for frame in frames if opener.verify(frame)]
        self.refused += len(frames) - len(good)
        return good

    def poll(self, timeout: float) -> list[Event]:
        """Sleep until something happens, at most `timeout` seconds; return what did, in order."""
        deadline = time.monotonic() + timeout
        events, self._pending = self._pending, []
        while not events:
            left = deadline - time.monotonic()
            if left < 0:
                break
            events = self._turn(left)
            if not events:
                time.sleep(min(QUIET_S, left))
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
        self._stop_listening()
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
        for fd, mask in self._epoll.poll(max(timeout, 0)):
            if fd in self._by_fd:
                events += self._serve(self._by_fd[fd], mask)
            elif fd in self._openings:
                events += self._advance(fd)
            elif fd == self._wakeup.fileno():
                events += self._wakeups()
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
        return events

    def _serve(self, link: wire.Link, mask: int) -> list[Event]:
        if mask & select.EPOLLOUT:
            link.write()
        if mask == select.EPOLLOUT:
            return []
        try:
            events = self._receive(link, link.read())
        except WireError:
            self.refused += 1
            return self._lose(link)
        return events + self._lose(link) if link.ended else events

    def _receive(self, link: wire.Link, frames: list[wire.Frame]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            if frame.kind == Kind.CONTEXT:
                self._contexts[link.peer][1].append(frame)
                continue
            if frame.kind not in KINDS or not link.opener.verify(frame):
                self.refused += 1
                return events + self._lose(link)
            if frame.kind == Kind.GOODBYE:
                self._goodbyes.add(link.peer)
            events.append(Received(link.peer, Kind(frame.kind), frame.payload))
        return events

    def _lose(self, link: wire.Link) -> list[Event]:
        if self._links.pop(link.peer, None) is None:
            return []
        del self._by_fd[link.fd]
        self._epoll.unregister(link.fd)
        link.close()
        return [Gone(link.peer, link.unreachable, link.peer in self._goodbyes)]

    def _wakeups(self) -> list[Event]:
        try:
            numbers = self._wakeup.recv(4096)
        except BlockingIOError:
            return []
        return [Signalled(number) if number else Woken() for number in dict.fromkeys(numbers)]

    def _want_write(self, link: wire.Link, waiting: bool) -> None:
        self._epoll.modify(link.fd, select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    def _abandon(self) -> None:
        """Let go of every descriptor in a forked child, which would else keep a dead rank looking alive."""
        for link in self._links.values():
            link.abandon()
        for opening in self._openings.values():
            wire.abandon(opening.sock)
        if self._listener is not None:
            wire.abandon(self._listener)
        _unhook(self._waker.fileno())
        wire.abandon(self._waker)
        wire.abandon(self._wakeup)
        self._links, self._by_fd, self._openings, self._listener = {}, {}, {}, None
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
