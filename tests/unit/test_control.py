"""Ranks find each other, know at once who is gone, and nobody else gets in or in the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jitmpi import control, messages, wire
from jitmpi.control import ControlPlane, Event, Gone, Received, Signalled, Woken
from jitmpi.errors import BootstrapError
from jitmpi.events import Context, Member
from jitmpi.greet import HELLO

KEY = b"k" * 32
WAIT = 20.0  # seconds within which everything here must happen; it takes milliseconds
ROOT = Path(__file__).resolve().parents[2]


def together(planes: list[ControlPlane], members: list[Member], seconds: float = WAIT) -> list[BaseException | None]:
    """Connect all planes at once; return what each raised."""
    errors: list[BaseException | None] = [None] * len(planes)

    def work(place: int) -> None:
        try:
            planes[place].connect(members, time.monotonic() + seconds)
        except BootstrapError as error:
            errors[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(planes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT + seconds)
    return errors


def until(plane: ControlPlane, done: Callable[[list[Event]], bool]) -> list[Event]:
    """Poll until the events so far are what is waited for."""
    events: list[Event] = []
    deadline = time.monotonic() + WAIT
    while not done(events):
        assert time.monotonic() < deadline, f"still waiting after {events}"
        events += plane.poll(0.5)
    return events


class World:
    """Connected planes on this machine, each on a node of its own."""

    def __init__(self) -> None:
        self.planes: list[ControlPlane] = []

    def add(self, rank: int, key: bytes = KEY) -> tuple[ControlPlane, Member]:
        plane = ControlPlane(rank, key)
        self.planes.append(plane)
        return plane, Member(rank, f"n{rank}", "127.0.0.1", plane.listen("127.0.0.1"))

    def connected(self, size: int) -> list[ControlPlane]:
        members = [self.add(rank)[1] for rank in range(size)]
        assert together(self.planes, members) == [None] * size
        return self.planes


@pytest.fixture
def ranks() -> Iterator[World]:
    made = World()
    yield made
    for plane in made.planes:
        plane.close()


def test_all_edges_are_built_and_the_doors_closed(ranks: World) -> None:
    """After `connect` every edge is a link, and no port of the job accepts a connection any more."""
    members = [ranks.add(rank)[1] for rank in range(7)]
    assert together(ranks.planes, members) == [None] * 7
    for plane in ranks.planes:
        assert plane.peers == {a + b - plane.rank for a, b in control.edges(members) if plane.rank in (a, b)}
    for member in members:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((member.host, member.port), timeout=WAIT).close()


def test_frames_arrive_in_order(ranks: World) -> None:
    """What is sent and broadcast arrives once, in order, with its sender and kind."""
    a, b, c = ranks.connected(3)
    assert a.send(1, messages.FAULT, b"one")
    a.broadcast(messages.PLAN, b"two" * 100_000)
    assert not a.send(7, messages.FAULT, b"nobody")
    reader = threading.Thread(target=a.flush, args=(time.monotonic() + WAIT,))
    reader.start()
    got = until(b, lambda events: len(events) == 2)
    assert got == [Received(0, messages.FAULT, b"one"), Received(0, messages.PLAN, b"two" * 100_000)]
    assert until(c, lambda events: len(events) == 1) == [Received(0, messages.PLAN, b"two" * 100_000)]
    reader.join(WAIT)


def test_the_last_contexts_are_kept_also_of_the_dead(ranks: World) -> None:
    """Contexts make no events; the newest can be asked for, oldest first, after their sender is gone."""
    a, b = ranks.connected(2)
    for number in range(control.KEPT + 3):
        assert a.offer((1,), messages.CONTEXT, [b"%d" % number])
    a.close()
    assert until(b, bool) == [Gone(0, unreachable=False, said_goodbye=False)]
    assert b.contexts(0) == [b"%d" % number for number in range(3, control.KEPT + 3)]
    assert b.contexts(5) == []
    assert not b.offer((0,), messages.CONTEXT, [b"late"])


def test_forecasts_of_many_micro_batches_take_one_place(ranks: World) -> None:
    """The exact context of the running minibatch stays known, however many micro-batches it has."""
    a, b = ranks.connected(2)
    exact = messages.encode_context(Context(0, 4, True, {}))
    forecasts = [messages.encode_context(Context(0, 5, False, {"n": b"%d" % n})) for n in range(3 * control.KEPT)]
    for payload in (exact, *forecasts):
        assert a.offer((1,), messages.CONTEXT, [payload])
    a.close()
    assert until(b, bool) == [Gone(0, unreachable=False, said_goodbye=False)]
    assert b.contexts(0) == [exact, forecasts[-1]]


def test_contexts_wake_nobody_and_words_do(ranks: World) -> None:
    """A buddy sleeps while it is handed contexts, has them when it is asked, and hears at once what cannot wait."""
    a, b, c, d = ranks.connected(4)
    assert a.offer((1,), messages.CONTEXT, [b"quiet"])
    assert b._turn(0.3) == []
    assert b.gather() == []
    assert b.contexts(0) == [b"quiet"]
    assert a.offer((1,), messages.CONTEXT, [b"quieter"])
    a.broadcast(messages.FAULT, b"loud")
    for peer in (b, c, d):
        assert until(peer, bool) == [Received(0, messages.FAULT, b"loud")]
    assert b.gather() == []
    assert b.contexts(0) == [b"quiet", b"quieter"]


def test_goodbye_is_told_from_a_death(ranks: World) -> None:
    """A rank that says goodbye before it leaves is not taken for a dead one, also if it never read what it was told."""
    a, b = ranks.connected(2)
    assert b.offer((0,), messages.CONTEXT, [b"unread: its end resets the connection"])
    a.broadcast(messages.GOODBYE, b"")
    assert a.flush(time.monotonic() + WAIT)
    a.close()
    got = until(b, lambda events: len(events) == 2)
    assert got == [Received(0, messages.GOODBYE, b""), Gone(0, unreachable=False, said_goodbye=True)]


def test_poll_sleeps_until_it_is_woken(ranks: World) -> None:
    """`wake` ends a `poll` from another thread; many wakes are one event; signals come with their numbers."""
    (plane,) = ranks.connected(1)
    assert plane.poll(0) == []
    timer = threading.Timer(0.05, lambda: [plane.wake() for _ in range(10_000)])
    timer.start()
    assert until(plane, bool) == [Woken()]
    timer.join()
    while plane.poll(0.01):
        pass
    os.write(plane.wakeup_fd, bytes([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]))
    assert until(plane, bool) == [Signalled(signal.SIGUSR1), Signalled(signal.SIGTERM)]


def test_a_real_signal_arrives(ranks: World) -> None:
    """The descriptor serves signal.set_wakeup_fd, also while the main thread does something else."""
    (plane,) = ranks.connected(1)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    old = signal.set_wakeup_fd(plane.wakeup_fd)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(plane, bool) == [Signalled(signal.SIGUSR1)]
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGUSR1, before)


def test_the_missing_are_named(ranks: World) -> None:
    """At the deadline the error says which ranks are missing, where they should be, and what was tried."""
    plane, member = ranks.add(1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        lower = Member(0, "n0", "127.0.0.1", deaf.getsockname()[1])
        higher = Member(2, "n2", "127.0.0.1", 9)
        with pytest.raises(BootstrapError) as caught:
            plane.connect([lower, member, higher], time.monotonic() + 0.3)
    assert f"rank 0 on n0 (127.0.0.1:{lower.port}): it did not answer" in str(caught.value)
    assert "rank 2 on n2 (127.0.0.1:9): it did not connect" in str(caught.value)


def test_a_wrong_key_gets_nowhere(ranks: World) -> None:
    """A rank of another launch is kept out and both sides say why."""
    members = [ranks.add(0)[1], ranks.add(1, b"o" * 32)[1]]
    errors = together(ranks.planes, members, 3)
    assert "does not hold this job's key" in str(errors[1])
    assert "rank 1 on n1" in str(errors[0])
    assert ranks.planes[0].refused > 0


def test_a_rank_that_dies_at_the_start_ends_the_wait(ranks: World) -> None:
    """If a connected peer ends while others are missing, nobody waits for the deadline."""
    (a, first), (b, second) = ranks.add(0), ranks.add(1)
    members = [first, second, Member(2, "n2", "127.0.0.1", 9)]
    errors: list[str] = []

    def work() -> None:
        try:
            a.connect(members, time.monotonic() + 10 * WAIT)
        except BootstrapError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    b.connect(members[:2], time.monotonic() + WAIT)  # it waits for nobody else, and has connected when it returns
    b.close()
    thread.join(WAIT)
    assert errors == ["rank 1 ended while rank 0 waited for others to connect"]


def flood(port: int, count: int, words: bytes) -> list[socket.socket]:
    """Open connections that say something, or nothing, and stay."""
    socks = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        socks.append(sock)
    for sock in socks:
        try:
            sock.send(words)
        except OSError:
            continue
    return socks


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", HELLO.pack(b"JIT1", 1, 0, bytes(32))])
def test_a_flood_of_strangers_is_survived(ranks: World, words: bytes) -> None:
    """2,000 silent, chatty or hello-saying strangers keep no peer out and leave nothing behind."""
    members = [ranks.add(rank)[1] for rank in range(3)]
    strangers = flood(members[0].port, 2000, words)
    try:
        assert together(ranks.planes, members) == [None] * 3
    finally:
        for sock in strangers:
            sock.close()
    assert ranks.planes[0].peers == {1, 2}
    ranks.planes[0].broadcast(messages.FAULT, b"still here")
    assert until(ranks.planes[2], bool) == [Received(0, messages.FAULT, b"still here")]


def test_a_slow_peer_is_waited_for(ranks: World) -> None:
    """A peer that comes late is let in although strangers hold connections all the while."""
    (a, first), (b, second) = ranks.add(0), ranks.add(1)
    strangers = flood(first.port, 10, b"JIT1")
    late = threading.Timer(0.5, b.connect, ([first, second], time.monotonic() + WAIT))
    late.start()
    a.connect([first, second], time.monotonic() + WAIT)
    late.join(WAIT)
    for sock in strangers:
        sock.close()
    assert b.peers == {0}


class Tap:
    """A relay between two ranks that records, and can add to what it passes on."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._target = port
        self.recorded = b""  # what the caller sent
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        self._server.settimeout(WAIT)
        self.caller, _ = self._server.accept()
        self.called = socket.create_connection(("127.0.0.1", self._target))
        back = threading.Thread(target=self._pass, args=(self.called, self.caller))
        self._threads.append(back)
        back.start()
        self._pass(self.caller, self.called)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.recorded += data if source is self.caller else b""
                sink.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        for sock in (self._server, self.caller, self.called):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(WAIT)


@pytest.mark.parametrize("kind", [messages.FAULT, messages.CONTEXT])
def test_a_replayed_frame_ends_the_link(ranks: World, kind: messages.Kind) -> None:
    """A frame recorded on the way and sent again is refused; the link it came on is not believed any more."""
    (a, first), (b, second) = ranks.add(0), ranks.add(1)
    tap = Tap(first.port)
    try:
        thread = threading.Thread(target=a.connect, args=([first, second], time.monotonic() + WAIT))
        thread.start()
        b.connect([Member(0, "n0", "127.0.0.1", tap.port), second], time.monotonic() + WAIT)
        thread.join(WAIT)
        b.send(0, kind, b"once")
        until(a, lambda events: bool(events or a.gather()) or a.contexts(1) != [])
        frame = tap.recorded[tap.recorded.find(wire.HEADER.pack(4, 0, kind)) :][: wire.HEAD_BYTES + 4]
        tap.called.sendall(frame + bytes(wire.DOZE))
        assert until(a, bool) == [Gone(1, unreachable=False, said_goodbye=False)]
    finally:
        tap.close()
    assert a.refused == 1


def test_a_forged_context_is_left_out(ranks: World) -> None:
    """A context that the peer did not seal is not handed on when it is asked for."""
    (a, first), (b, second) = ranks.add(0), ranks.add(1)
    tap = Tap(first.port)
    try:
        thread = threading.Thread(target=a.connect, args=([first, second], time.monotonic() + WAIT))
        thread.start()
        b.connect([Member(0, "n0", "127.0.0.1", tap.port), second], time.monotonic() + WAIT)
        thread.join(WAIT)
        b.offer((0,), messages.CONTEXT, [b"true"])
        until(a, lambda events: a.gather() == [] and a.contexts(1) == [b"true"])
        tap.called.sendall(wire.HEADER.pack(5, 1, messages.CONTEXT) + bytes(wire.MAC_BYTES) + b"false")
        deadline = time.monotonic() + WAIT
        while a.refused == 0 and time.monotonic() < deadline:
            a.poll(0.01)
            assert a.gather() == []
            assert a.contexts(1) == [b"true"]
    finally:
        tap.close()
    assert a.refused > 0


PEER = """
import os, sys, time
from jitmpi import messages
from jitmpi.control import ControlPlane
from jitmpi.events import Member
plane = ControlPlane(1, b"k" * 32)
port = plane.listen("127.0.0.1")
members = [Member(0, "n0", "127.0.0.1", int(sys.argv[1])), Member(1, "n1", "127.0.0.1", port)]
plane.connect(members, time.monotonic() + 60)
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        left = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in left]
        bad = [name for name in names if name.startswith("socket:") or "eventpoll" in name]
        assert plane.offer((0,), messages.CONTEXT, [b"of a child"]) is False
        os.write(1, b"inherited %d\\n" % len(bad))
        time.sleep(60)
        os._exit(0)
os.write(1, b"ready %d\\n" % child)
while True:
    plane.poll(60)
"""


@pytest.fixture
def peer(ranks: World) -> Iterator[Callable[[str], tuple[ControlPlane, subprocess.Popen[str]]]]:
    """Start rank 1 in a process of its own, linked to a rank 0 in this one."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[ControlPlane, subprocess.Popen[str]]:
        plane, member = ranks.add(0)
        command = [sys.executable, "-c", PEER, str(member.port), how]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        plane.connect([member, Member(1, "n1", "127.0.0.1", 9)], time.monotonic() + WAIT)
        return plane, process

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(WAIT)
        assert process.stdout is not None
        process.stdout.close()


Peer = Callable[[str], tuple[ControlPlane, "subprocess.Popen[str]"]]


def test_a_killed_process_is_known_at_once(peer: Peer) -> None:
    """SIGKILL of a peer gives `Gone`, closed and not unreachable, long before any timer of the kernel's."""
    plane, process = peer("plain")
    assert plane.offer((1,), messages.CONTEXT, [b"unread"])
    process.kill()
    killed = time.monotonic()
    assert until(plane, bool) == [Gone(1, unreachable=False, said_goodbye=False)]
    assert time.monotonic() - killed < wire.USER_TIMEOUT_MS / 1000


def test_a_forked_child_keeps_no_link_alive(peer: Peer) -> None:
    """A rank that dies while its forked workers live on is known to be gone; the workers hold none of its sockets."""
    plane, process = peer("fork")
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().split() for _ in range(2))
    assert lines[0] == ["inherited", "0"]
    child = int(lines[1][1])
    try:
        assert plane.poll(0.1) == []  # the child's closing told nobody
        process.kill()
        assert until(plane, bool) == [Gone(1, unreachable=False, said_goodbye=False)]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_peer_raises_no_alarm_and_never_blocks(peer: Peer) -> None:
    """A SIGSTOPped peer is a hang, not a death: no `Gone`, and sending to it does not wait."""
    plane, process = peer("plain")
    process.send_signal(signal.SIGSTOP)
    taken = [plane.offer((1,), messages.CONTEXT, [bytes(8192)]) for _ in range(100)]
    assert taken[0]
    assert not taken[-1]  # its window is full; what does not fit is dropped
    assert plane.send(1, messages.REPORT, bytes(32 << 20))
    assert plane.poll(2.5 * wire.USER_TIMEOUT_MS / 1000) == []
    assert plane.peers == {1}
    assert not plane.flush(time.monotonic() + 0.1)
    process.send_signal(signal.SIGCONT)
    assert plane.flush(time.monotonic() + WAIT)


def test_own_address_is_an_address() -> None:
    """The address found for this host is one it can listen on."""
    with socket.create_server((control.own_address("", "no.such.host.invalid"), 0)):
        pass
