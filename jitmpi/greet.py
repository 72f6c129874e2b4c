"""Turn connections of strangers into connections of peers that have proved that they hold the job's key.

Rule 1: a stranger gets `HELLO_BYTES` of memory, `PROOF_S` seconds and one of `HALF_OPEN` places, nothing more.
Rule 2: nothing here waits; the owner of the epoll object hands in what it reports.

Four messages under the job's key: hello (who, to whom, nonce), challenge (nonce, proof), proof, welcome. Each proof
covers both nonces and both ranks, and so do the two keys, one a direction, that sign the frames afterwards; hence a
recorded frame fits neither another connection, nor the other direction, nor another place in the sequence.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from jitmpi import wire
from jitmpi.errors import WireError
from jitmpi.events import Member

MAGIC: Final = b"JIT1"
HELLO: Final = struct.Struct("!4sII32s")  # magic, rank that calls, rank that is called, nonce
HELLO_BYTES: Final = HELLO.size + 32  # all that the called side reads before the caller has proved itself
HALF_OPEN: Final = 64  # connections that have not proved themselves, at a time
PROOF_S: Final = 2.0  # that a connection may take to prove itself
CROWDED_S: Final = 0.05  # the same when others wait; a peer whose turn is cut short by it calls again
RETRY_S: Final = 0.1  # between two calls
BACKLOG: Final = 4096  # connections that the kernel keeps for us; a whole large job may call at once


class Handshake:
    """One side of the mutual proof, without I/O: bytes in through `receive`, bytes to send out of it.

    The connecting side knows whom it wants (`peer`) and begins with `hello`; the accepting side passes None and asks
    `welcome` whether it expects the rank that calls.
    """

    def __init__(self, key: bytes, rank: int, peer: int | None, welcome: Callable[[int], bool] | None = None) -> None:
        self.peer = peer
        self.keys: tuple[bytes, bytes] | None = None  # (to send with, to receive with) once the peer has proved itself
        self.trusted = False  # the peer has proved itself
        self.rest = b""  # what came after the handshake; frames
        self._key, self._rank, self._welcome = key, rank, welcome
        self._nonce = secrets.token_bytes(32)
        self._transcript = b""
        self._connecting = peer is not None
        self._next = self._on_challenge if self._connecting else self._on_hello
        self._need = 64 if self._connecting else HELLO.size
        self._buffer = b""

    def hello(self) -> bytes:
        """Return what the connecting side sends first."""
        assert self.peer is not None
        self._transcript = HELLO.pack(MAGIC, self._rank, self.peer, self._nonce)
        return self._transcript

    def receive(self, data: bytes) -> bytes:
        """Take what the peer sent and return the answer; `keys` is set when the peer has proved itself.

        Raises:
            WireError: it is not a peer of this job, or not the one expected.
        """
        self._buffer += data
        answer = b""
        while self.keys is None and len(self._buffer) >= self._need:
            message, self._buffer = self._buffer[: self._need], self._buffer[self._need :]
            answer += self._next(message)
        if self.keys is not None:
            self.rest, self._buffer = self._buffer, b""
        elif not self._connecting and not MAGIC.startswith(self._buffer[:4]) and not self._transcript:
            raise WireError("a connection did not begin as one of ours")
        return answer

    def _on_hello(self, message: bytes) -> bytes:
        magic, peer, wanted, _ = HELLO.unpack(message)
        if magic != MAGIC or wanted != self._rank or not (self._welcome is None or self._welcome(peer)):
            raise WireError(f"an unexpected hello, of rank {peer} to rank {wanted}")
        self.peer = peer
        self._transcript = message + self._nonce
        self._next, self._need = self._on_proof, 32
        return self._nonce + self._prove(b"challenge")

    def _on_challenge(self, message: bytes) -> bytes:
        self._transcript += message[:32]
        self._check(message[32:], b"challenge")
        self._next, self._need = self._on_welcome, 32
        return self._prove(b"proof")

    def _on_proof(self, message: bytes) -> bytes:
        self._check(message, b"proof")
        self.keys = self._prove(b"down"), self._prove(b"up")
        return self._prove(b"welcome")

    def _on_welcome(self, message: bytes) -> bytes:
        self._check(message, b"welcome")
        self.keys = self._prove(b"up"), self._prove(b"down")
        return b""

    def _prove(self, role: bytes) -> bytes:
        return blake2b(role + self._transcript, key=self._key, digest_size=32).digest()

    def _check(self, proof: bytes, role: bytes) -> None:
        if not hmac.compare_digest(proof, self._prove(role)):
            raise WireError(f"rank {self.peer} does not hold this job's key ({role.decode()} refused)")
        self.trusted = True


@dataclass
class _Opening:
    """A connection whose peer has not proved itself."""

    sock: socket.socket
    handshake: Handshake
    began: float
    calling: int | None  # the rank that we call; None when we are called
    greeted: bool = False


class Greeter:
    """Calls the lower peers, lets in the higher ones, and keeps all others out.

    Args:
        epoll: where the sockets are registered.
    """

    def __init__(self, rank: int, key: bytes, epoll: select.epoll) -> None:
        self.missing: dict[int, Member] = {}  # peers without a connection
        self.refused = 0  # connections dropped because they were not a peer's
        self._rank, self._key, self._epoll = rank, key, epoll
        self._openings: dict[int, _Opening] = {}  # by descriptor
        self._listener: socket.socket | None = None
        self._retry: dict[int, float] = {}  # rank to call -> when
        self._reasons: dict[int, str] = {}

    def listen(self, host: str) -> int:
        """Listen on an address of this host and return the port, chosen by the kernel."""
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind((host, 0))
        self._listener.listen(BACKLOG)
        return int(self._listener.getsockname()[1])

    def expect(self, peers: Mapping[int, Member]) -> None:
        """Begin to call those below this rank and to let in those above it."""
        self.missing = dict(peers)
        self._retry = {rank: 0.0 for rank in peers if rank < self._rank}
        if self._listener is not None:
            self._epoll.register(self._listener, select.EPOLLIN)

    def tick(self, now: float) -> None:
        """Give up on those whose time is over and call those whose turn it is."""
        self._expire(now)
        for rank in [rank for rank, when in self._retry.items() if when <= now]:
            self._call(self.missing[rank], now)

    def on_event(self, fd: int) -> tuple[socket.socket, Handshake] | None:
        """Take an event of epoll; return a connection that has just proved to be a peer's, still registered."""
        if self._listener is not None and fd == self._listener.fileno():
            self._accept()
        elif fd in self._openings:
            return self._advance(fd)
        return None

    def who_is_missing(self) -> str:
        """Say which peers have no connection, and why."""
        lines = []
        for rank, member in sorted(self.missing.items()):
            reason = self._reasons.get(rank, "it did not connect" if rank > self._rank else "it did not answer")
            lines.append(f"rank {rank} on {member.node} ({member.host}:{member.port}): {reason}")
        return (
            f"rank {self._rank} has no control link to {len(lines)} rank(s): {'; '.join(lines[:8])}; "
            "check that these tasks run and that no firewall stands between the nodes"
        )

    def stop(self) -> None:
        """Close everything that is not a peer's; from now on nobody can connect."""
        for fd in list(self._openings):
            self._refuse(fd, "all peers are connected")
        self._retry.clear()
        if self._listener is not None:
            with suppress(OSError):  # `close` may come before `connect` registered it
                self._epoll.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def abandon(self) -> None:
        """Let go of every descriptor in a forked child."""
        for opening in self._openings.values():
            wire.abandon(opening.sock)
        if self._listener is not None:
            wire.abandon(self._listener)
        self._openings, self._listener = {}, None

    def _call(self, member: Member, now: float) -> None:
        del self._retry[member.rank]
        sock = socket.socket(socket.AF_INET6 if ":" in member.host else socket.AF_INET, socket.SOCK_STREAM)
        wire.configure(sock)
        handshake = Handshake(self._key, self._rank, member.rank)
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
                    self._epoll.modify(self._listener, 0)  # until the next `tick`
                    return
                self._refuse(oldest.sock.fileno(), "it did not prove itself in time")
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free, or the caller has gone already
                self._epoll.modify(self._listener, 0)
                return
            wire.configure(sock)
            handshake = Handshake(self._key, self._rank, None, self._expects)
            self._openings[sock.fileno()] = _Opening(sock, handshake, now, None)
            self._epoll.register(sock, select.EPOLLIN)

    def _expects(self, rank: int) -> bool:
        return rank > self._rank and rank in self.missing

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

    def _advance(self, fd: int) -> tuple[socket.socket, Handshake] | None:
        opening = self._openings[fd]
        try:
            if opening.calling is not None and not opening.greeted:
                code = opening.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                opening.greeted = True
                opening.sock.send(opening.handshake.hello())
                self._epoll.modify(fd, select.EPOLLIN)
                return None
            data = opening.sock.recv(HELLO_BYTES)
            if not data:
                raise WireError("it closed the connection")
            answer = opening.handshake.receive(data)
            if answer:
                opening.sock.send(answer)  # at most 64 bytes into an empty buffer: taken whole or the peer is gone
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(fd, error.strerror or str(error))
            return None
        except WireError as error:
            self._refuse(fd, str(error))
            return None
        return self._admit(fd) if opening.handshake.keys is not None else None

    def _admit(self, fd: int) -> tuple[socket.socket, Handshake] | None:
        opening = self._openings[fd]
        if opening.handshake.peer not in self.missing:  # a second connection of one rank; the first counts
            self._refuse(fd, "it is connected already")
            return None
        del self._openings[fd], self.missing[opening.handshake.peer]
        return opening.sock, opening.handshake
