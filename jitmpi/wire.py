"""Turn the socket of a peer that has proved itself into a link: whole frames in, whole frames out, never waiting.

Rule 1: every frame carries a MAC over its direction, place in the sequence, kind and payload; one that does not fit
        ends the link.
Rule 2: no call here blocks. What the kernel does not take is queued, or refused when the caller can do without.
Rule 3: memory is bounded by `MAX_FRAME` in and `MAX_BACKLOG` out.
Rule 4: frames that can wait until somebody asks for them wake nobody: the receiving side has the kernel gather them
        (`doze`), the sending side lets a pad follow every frame that cannot wait (`nudge`), and the pad makes the
        measure full.
Rule 5: the kernel gets no more than fits into the peer's window. Bytes that wait in the kernel for a peer that does not
        read make TCP_USER_TIMEOUT end the connection after two seconds: a stuck rank would look like a dead node.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import socket
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

from jitmpi.errors import WireError

MAX_FRAME = 64 << 20  # bytes of payload; a report with all its contexts is far below
MAX_BACKLOG = 4 * MAX_FRAME  # bytes queued for a peer that does not read; past it the link is given up
CHUNK = 64 << 10  # bytes asked of the kernel at a time; below malloc's threshold for mmap
DOZE = 32 << 10  # bytes that the kernel gathers before it wakes a dozing reader; half of the usual window
PAD = 0  # the kind of a frame that only wakes

HEADER = struct.Struct("!IQB")  # payload length, sequence number, kind
MAC_BYTES = 16
HEAD_BYTES = HEADER.size + MAC_BYTES

UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
USER_TIMEOUT_MS = 2000
# Where rule 5 does not hold (Linux before 5.4) a stuck peer ends in ETIMEDOUT too; its last acknowledgement is then
# younger than the timeout, that of a dead node never is.
ALIVE_MS = USER_TIMEOUT_MS - 100
TCP_INFO_ACK = 8 + 4 * 12  # offset of tcpi_last_ack_recv in Linux's struct tcp_info
TCP_INFO_WINDOW = 228  # offset of tcpi_snd_wnd, since Linux 5.4
TCP_INFO_BYTES = 232


Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """One frame as it came; `mac` is checked by `Opener.verify`."""

    kind: int
    header: bytes
    mac: bytes
    payload: bytes


def configure(sock: socket.socket) -> None:
    """Make a socket non-blocking and let the kernel find a dead peer node within about two seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def digest(parts: Sequence[Buffer]) -> bytes:
    """Hash a payload that lies in parts; made once for a payload that goes to several peers."""
    state = blake2b(parts[0], digest_size=32)
    for part in parts[1:]:
        state.update(part)
    return state.digest()


class Sealer:
    """Turn payloads into the frames of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, kind: int, size: int, hashed: bytes) -> bytes:
        """Return what comes before the payload of the next frame, of `size` bytes; `hashed` is its `digest`."""
        header = HEADER.pack(size, self._sequence, kind)
        self._sequence += 1
        return header + blake2b(header + hashed, key=self._key, digest_size=MAC_BYTES).digest()

    def pad(self) -> bytes:
        """Return a frame that only fills the measure of a dozing reader; not signed, for nobody looks at it."""
        header = HEADER.pack(DOZE, self._sequence, PAD)
        self._sequence += 1
        return header + bytes(MAC_BYTES + DOZE)


class Opener:
    """Cut the bytes of one direction of one connection into frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are now whole, in order, without pads; their MACs are not checked yet.

        Raises:
            WireError: a frame is too long or not the next one.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted():
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames, start, end = [], 0, len(data)
        while end - start >= HEAD_BYTES:
            length, sequence, kind = HEADER.unpack_from(data, start)
            self._expect(length, sequence)
            body = start + HEAD_BYTES
            if end - body < length:
                break
            header, mac = data[start : start + HEADER.size], data[start + HEADER.size : body]
            if kind != PAD:
                frames.append(Frame(kind, header, mac, data[body : body + length]))
            self._sequence += 1
            start = body + length
        if start < end:
            self._rest += data[start:]
        return frames

    def verify(self, frame: Frame) -> bool:
        """Tell whether the peer sealed this frame; costs a hash of the payload."""
        signed = frame.header + digest([frame.payload])
        return hmac.compare_digest(frame.mac, blake2b(signed, key=self._key, digest_size=MAC_BYTES).digest())

    def _wanted(self) -> int:
        if len(self._rest) < HEAD_BYTES:
            return HEAD_BYTES
        length, sequence, _ = HEADER.unpack_from(self._rest)
        self._expect(length, sequence)
        return HEAD_BYTES + int(length)

    def _expect(self, length: int, sequence: int) -> None:
        if length > MAX_FRAME or sequence != self._sequence:
            raise WireError(f"frame {sequence} of {length} bytes came instead of frame {self._sequence}")


class Link:
    """One authenticated connection to a peer rank, signed with one key to send and one to receive.

    `send` and `offer` may be called by any thread; `read`, `write` and `close` by the one that polls. `backlogged` is
    called with True when bytes begin to wait for `write`, with False when none do.
    """

    def __init__(
        self, sock: socket.socket, peer: int, keys: tuple[bytes, bytes], backlogged: Callable[[Link, bool], None]
    ) -> None:
        self.peer = peer
        self.fd = sock.fileno()
        self.opener = Opener(keys[1])
        self.nudge = False  # the peer dozes: what is sent and not just offered must wake it
        self.ended = False  # nothing more comes from the peer
        self.unreachable = False  # the peer's node does not answer, not just its process
        self._sealer = Sealer(keys[0])
        self._sock = sock
        self._closed = False
        self._broken = False  # nothing more can be sent
        self._backlogged = backlogged
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._credit = 0  # bytes for which the peer surely has room

    def doze(self) -> None:
        """Let nothing short of `DOZE` bytes, or the end of the connection, make this link readable."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, DOZE)

    def send(self, kind: int, payload: bytes) -> bool:
        """Send a frame now or, as far as the kernel does not take it, later; False when the link is broken.

        Raises:
            WireError: the payload is longer than `MAX_FRAME`.
        """
        if len(payload) > MAX_FRAME:
            raise WireError(f"a frame of {len(payload)} bytes is over the limit of {MAX_FRAME}; not sent")
        with self._lock:
            parts = [self._sealer.seal(kind, len(payload), digest([payload])), payload]
            if self.nudge:
                parts.append(self._sealer.pad())
            return self._send(parts, sum(map(len, parts)))

    def offer(self, kind: int, parts: Sequence[Buffer], size: int, hashed: bytes) -> bool:
        """Send a frame if the peer reads; False, and nothing sent, when earlier bytes wait or its window is full.

        `size` and `hashed` are the payload's length and `digest`. Made for the training thread: no error, no wait, not
        even for a lock, and few calls.
        """
        if self._queue or size > MAX_FRAME or not self._lock.acquire(False):
            return False
        try:
            if self._queue or self._broken or (self._credit < size + HEAD_BYTES and not self._has_room(1)):
                return False
            return self._send([self._sealer.seal(kind, size, hashed), *parts], size + HEAD_BYTES)
        finally:
            self._lock.release()

    def _send(self, parts: Sequence[Buffer], size: int) -> bool:
        if self._broken:
            return False
        sent = 0 if self._queue else self._give(parts, size)
        if sent < size and not self._broken:
            self._queue.append(memoryview(b"".join(parts))[sent:])
            self._queued += size - sent
            if self._queued > MAX_BACKLOG:
                self._break(errno.ENOBUFS)
            else:
                self._backlogged(self, True)
        return not self._broken

    def write(self) -> bool:
        """Hand queued bytes to the kernel as far as the peer has room; True when none are left."""
        with self._lock:
            while self._queue and not self._broken:
                sent = self._give([self._queue[0]], len(self._queue[0]))
                self._queued -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                    return False
                self._queue.popleft()
            self._backlogged(self, False)  # under the lock, or it could undo another thread's True
            return True

    def read(self) -> list[Frame]:
        """Return the frames that have come; sets `ended` at the end of the connection, whatever ended it.

        Raises:
            WireError: the bytes are not a peer's; close the link.
        """
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            self._judge(error.errno or errno.EIO)
            data = b""
        if not data:
            self.ended = True
            return []
        return self.opener.feed(data)

    def readable(self) -> int:
        """Count the bytes that wait in the kernel."""
        return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)

    def unsent(self) -> int:
        """Count the bytes that the peer's kernel has not acknowledged; 0 when the link is broken."""
        if self._broken or self._closed:
            return 0
        return self._queued + self._in_kernel()

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        with self._lock:
            self._broken = self._closed = True
            self._queue.clear()
            self._sock.close()

    def abandon(self) -> None:
        """Close the descriptor in a forked child, where the lock may be held for ever by a thread that is not there."""
        self._broken = self._closed = True
        abandon(self._sock)

    def _give(self, parts: Sequence[Buffer], size: int) -> int:
        try:
            if self._credit < size and not self._has_room(size):
                if self._credit <= 0:
                    return 0
                parts = [memoryview(b"".join(parts))[: self._credit]]
            sent = self._sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._break(error.errno or errno.EIO)
            return 0
        self._credit -= sent
        return sent

    def _has_room(self, wanted: int) -> bool:
        # The peer never takes back room that it has announced, so the kernel is asked only when that is used up.
        if self._credit < wanted and not self._closed:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            if len(info) < TCP_INFO_BYTES:
                self._credit = MAX_BACKLOG
            else:
                self._credit = int.from_bytes(info[TCP_INFO_WINDOW:], sys.byteorder) - self._in_kernel()
        return self._credit >= wanted

    def _in_kernel(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def _break(self, error: int) -> None:
        # The connection is left open: what the peer sent before its end can still be read.
        self._judge(error)
        self._broken = True
        self._queue.clear()
        self._queued = 0
        if error == errno.ENOBUFS:  # our own decision, of which the kernel knows nothing yet
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _judge(self, error: int) -> None:
        if error in UNREACHABLE:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            (silence,) = struct.unpack_from("I", info, TCP_INFO_ACK)
            self.unreachable = error != errno.ETIMEDOUT or silence >= ALIVE_MS


def abandon(sock: socket.socket) -> None:
    """Close a socket's descriptor in a forked child, telling neither the peer nor the parent."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)
