"""Notices: what the ranks of a launch tell jit-srun over TCP, and whether nodes answer at all. This package's sockets.

    rank: event -> "<mac> <json>\\n" -> jit-srun: event -> "ok\\n"

Rule 1: the MAC is keyed with the launch's own key; what does not carry it is dropped and counted, never read.
Rule 2: nothing blocks; lines, connections and their life are bounded, so that strangers waste no memory and no time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

LINE_LIMIT: Final = 1 << 20  # a fault names the node of every rank: 20 bytes for each of 50,000
CONNECTIONS: Final = 64  # only a few ranks of a launch speak, one notice a connection
PATIENCE: Final = 10.0  # seconds a connection may take to deliver its line
AGAIN: Final = 0.05  # seconds until a caller that was turned away calls again
AT_ONCE: Final = 256  # nodes: a process has 1024 files as a rule, and a node that got none of them is not dead
MAC_BYTES: Final = 32
REPLY: Final = b"ok\n"
RESOLVE_S: Final = 10.0  # seconds for the addresses of all of a job's nodes


def encode(event: Mapping[str, Any], key: str) -> bytes:
    """Write an event as one line under the launch key (hex)."""
    text = json.dumps(event, separators=(",", ":")).encode()
    return _mac(text, key) + b" " + text + b"\n"


def decode(line: bytes, key: str) -> dict[str, Any] | None:
    """Read one line; None when it does not carry the key or is no event."""
    mac, _, text = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(mac, _mac(text, key)):
        return None
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def send(launcher: str, event: Mapping[str, Any], patience: float, reply: float = 0.0) -> bool:
    """Tell jit-srun about an event; `launcher` is "host:port:key", `patience` in seconds is for all of it.

    `reply`, in seconds, is for the answer alone where that is longer: what takes a connection is not dead, but it may
    stand still, as when the file system does that its journal is on.

    Returns False when jit-srun cannot be reached or does not answer: then it is dead, and the ranks are on their own.
    One that hangs up without an answer is alive and has too many callers at the moment; it is called again.
    """
    deadline = time.monotonic() + patience
    try:
        host, port, key = launcher.rsplit(":", 2)
        line = encode(event, key)
        while not _delivered((host, int(port)), line, deadline, reply):
            if time.monotonic() + AGAIN > deadline:
                return False
            time.sleep(AGAIN)
    except (OSError, ValueError):
        return False
    return True


def _delivered(address: tuple[str, int], line: bytes, deadline: float, patience: float) -> bool:
    reply = b""
    gone = contextlib.suppress(ConnectionResetError, BrokenPipeError)
    with socket.create_connection(address, timeout=_left(deadline)) as connection, gone:
        deadline = max(deadline, time.monotonic() + patience)
        connection.settimeout(_left(deadline))
        connection.sendall(line)
        while not reply.endswith(b"\n"):
            connection.settimeout(_left(deadline))
            piece = connection.recv(len(REPLY))
            if not piece:
                break
            reply += piece
    return reply == REPLY


@dataclass
class _Caller:
    connection: socket.socket
    until: float
    heard: bytearray


class Listener:
    """The end of the notices in jit-srun. `fileno()` becomes readable when `receive()` has something to do.

    Attributes:
        key: hex; what the ranks of this launch must know.
        port: where it listens.
        dropped: how many connections brought no notice of this launch.
    """

    def __init__(self, host: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.key = secrets.token_hex(32)
        self.dropped = 0
        self._clock = clock
        self._callers: dict[int, _Caller] = {}
        self._server = _listen(host)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self.port: int = self._server.getsockname()[1]

    def fileno(self) -> int:
        """Return a descriptor to wait on."""
        return self._selector.fileno()

    def launcher(self, host: str) -> str:
        """Return the value of JIT_CKPT_LAUNCHER; `host` is this machine as the ranks reach it."""
        return f"{host}:{self.port}:{self.key}"

    def receive(self) -> list[dict[str, Any]]:
        """Return the events that have arrived, in order of arrival, without waiting."""
        events: list[dict[str, Any]] = []
        ready = {key.fd for key, _ in self._selector.select(0)}
        for caller in [self._callers[fd] for fd in ready if fd in self._callers]:
            event = self._read(caller)
            if event is not None:
                events.append(event)
        if self._server.fileno() in ready:
            self._accept()  # last: it may turn callers away, but none who has spoken
        for caller in [c for c in self._callers.values() if c.until < self._clock()]:
            self._drop(caller)
        return events

    def close(self) -> None:
        """Stop listening."""
        for caller in list(self._callers.values()):
            self._end(caller)
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        for _ in range(CONNECTIONS):
            try:
                connection, _peer = self._server.accept()
            except OSError:
                return
            if len(self._callers) >= CONNECTIONS:
                self._drop(next(iter(self._callers.values())))  # the oldest: a rank speaks at once, others hold a place
            connection.setblocking(False)
            self._callers[connection.fileno()] = _Caller(connection, self._clock() + PATIENCE, bytearray())
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, caller: _Caller) -> dict[str, Any] | None:
        try:
            piece = caller.connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        caller.heard += piece
        if b"\n" not in piece:
            if not piece or len(caller.heard) > LINE_LIMIT:
                self._drop(caller)
            return None
        event = decode(bytes(caller.heard), self.key)
        if event is None:
            self._drop(caller)
            return None
        with contextlib.suppress(OSError):
            caller.connection.send(REPLY)  # a sender that is gone by now has still told us
        self._end(caller)
        return event

    def _drop(self, caller: _Caller) -> None:
        self.dropped += 1
        self._end(caller)

    def _end(self, caller: _Caller) -> None:
        del self._callers[caller.connection.fileno()]
        self._selector.unregister(caller.connection)
        caller.connection.close()


def answering(addresses: Mapping[str, tuple[str, int]], patience: float = 1.0) -> frozenset[str]:
    """Ask nodes whether they answer, many at once: name -> (address, port) in, the names that took a connection out.

    A node that refuses the connection is alive, but its slurmd is not, and nothing can be started there. `patience`, in
    seconds, is for each AT_ONCE of them.
    """
    asked = iter(addresses.items())
    alive: frozenset[str] = frozenset()
    while some := dict(itertools.islice(asked, AT_ONCE)):
        alive |= _answering(some, patience)
    return alive


def _answering(addresses: Mapping[str, tuple[str, int]], patience: float) -> frozenset[str]:
    deadline = time.monotonic() + patience
    alive: set[str] = set()
    with selectors.DefaultSelector() as selector:
        waiting = 0
        for name, address in addresses.items():
            waiting += _begin(selector, name, address)
        while waiting:
            ready = selector.select(max(0.0, deadline - time.monotonic()))  # once more where we ourselves stood still
            if not ready:
                break
            for key, _ in ready:
                probe: socket.socket = key.fileobj  # type: ignore[assignment]
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    alive.add(key.data)
                selector.unregister(probe)
                probe.close()
                waiting -= 1
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return frozenset(alive)


def responds(host: str, port: int, patience: float = 1.0) -> bool:
    """Say whether anything comes back from a host: a refused connection means that it is alive."""
    try:
        socket.create_connection((host, port), patience).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return True


def resolve(host: str, lookup: Callable[..., list[Any]] = socket.getaddrinfo) -> str:
    """Return the IP address of a host, or the name itself when it cannot be found now.

    Of two kinds the old one: slurmd listens to the new one only where slurm.conf says EnableIPv6, and then to both.
    """
    try:
        return _address(host, lookup)
    except OSError:
        return host


def resolve_all(
    hosts: Mapping[str, str],
    lookup: Callable[..., list[Any]] = socket.getaddrinfo,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Find the IP addresses of many hosts: name -> host in, name -> address out, for those that can be found now.

    Where the name service is out, each question takes its whole deadline: after RESOLVE_S seconds no more are asked.
    """
    deadline = clock() + RESOLVE_S
    found = {}
    for name, host in hosts.items():
        if clock() > deadline:
            break
        with contextlib.suppress(OSError):
            found[name] = _address(host, lookup)
    return found


def _address(host: str, lookup: Callable[..., list[Any]]) -> str:
    found = lookup(host, None, type=socket.SOCK_STREAM)
    return str(next((info for info in found if info[0] == socket.AF_INET), found[0])[4][0])


def this_host() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def _listen(host: str) -> socket.socket:
    """Listen at an address, or ("") at all that this machine has, of both kinds where it can."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel knows it, and the administrator has switched it off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=CONNECTIONS, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=CONNECTIONS)


def _begin(selector: selectors.BaseSelector, name: str, address: tuple[str, int]) -> int:
    probe: socket.socket | None = None
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        if probe.connect_ex(address) not in (0, errno.EINPROGRESS):
            raise OSError
        selector.register(probe, selectors.EVENT_WRITE, name)
    except (OSError, OverflowError):
        if probe is not None:
            probe.close()
        return 0
    return 1


def _mac(text: bytes, key: str) -> bytes:
    return hashlib.blake2b(text, digest_size=MAC_BYTES, key=bytes.fromhex(key)).hexdigest().encode()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
