"""Frames arrive whole, in order and from the peer, or the link ends."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import wire
from jitmpi.errors import WireError

UP, DOWN = b"u" * 32, b"d" * 32


class Pair:
    """Two ends of one link over a real TCP connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            first = socket.create_connection(server.getsockname())
            second, _ = server.accept()
        for sock in (first, second):
            wire.configure(sock)
        self.waiting: list[bool] = []
        self.raw = second
        self.a = wire.Link(first, 0, (UP, DOWN), lambda _, waiting: self.waiting.append(waiting))
        self.b = wire.Link(second, 1, (DOWN, UP), lambda _, waiting: None)

    def receive(self, count: int) -> list[wire.Frame]:
        frames: list[wire.Frame] = []
        deadline = time.monotonic() + 60
        while len(frames) < count and time.monotonic() < deadline and not self.b.ended:
            self.a.write()
            frames += self.b.read()
        return frames


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.a.close()
    pair.b.close()


def seal(sealer: wire.Sealer, kind: int, payload: bytes) -> bytes:
    return sealer.seal(kind, len(payload), wire.digest([payload])) + payload


@given(st.lists(st.tuples(st.integers(1, 255), st.binary(max_size=50)), max_size=6), st.data())
def test_frames_survive_any_cut_of_the_stream(sent: list[tuple[int, bytes]], data: st.DataObject) -> None:
    """However the network cuts the bytes, the same frames come out and verify; pads leave no trace."""
    sealer, opener = wire.Sealer(UP), wire.Opener(UP)
    stream = b"".join(seal(sealer, kind, payload) + (b"" if kind % 8 else sealer.pad()) for kind, payload in sent)
    got: list[wire.Frame] = []
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8))), len(stream)]
    for start, end in pairwise(cuts):
        got += opener.feed(stream[start:end])
    assert [(frame.kind, frame.payload) for frame in got] == sent
    assert all(opener.verify(frame) for frame in got)


@given(st.integers(0, 2**16))
def test_a_changed_bit_is_noticed(place: int) -> None:
    """A frame with any one bit changed is refused."""
    frame = bytearray(seal(wire.Sealer(UP), 3, b"payload"))
    frame[place // 8 % len(frame)] ^= 1 << place % 8
    opener = wire.Opener(UP)
    try:
        frames = opener.feed(bytes(frame))
    except WireError:
        return
    assert not any(opener.verify(got) for got in frames)


def test_replayed_frames_are_refused() -> None:
    """A frame recorded on the same connection, another direction or another connection is not taken."""
    recorded = seal(wire.Sealer(UP), 3, b"pay")
    opener = wire.Opener(UP)
    assert opener.verify(opener.feed(recorded)[0])
    with pytest.raises(WireError, match="instead of frame 1"):
        opener.feed(recorded)
    back = wire.Opener(DOWN)
    assert not back.verify(back.feed(recorded)[0])


def test_an_impossible_length_is_refused_before_memory_is_taken() -> None:
    """A header that announces more than the limit ends the link at once."""
    with pytest.raises(WireError):
        wire.Opener(UP).feed(wire.HEADER.pack(wire.MAX_FRAME + 1, 0, 1) + bytes(wire.MAC_BYTES))


def test_what_the_kernel_does_not_take_is_queued(pair: Pair) -> None:
    """A peer that does not read never blocks the sender, and gets every byte once it reads."""
    payload = os.urandom(8 << 20)
    assert pair.a.send(2, payload)
    assert pair.a.send(3, b"after")
    assert True in pair.waiting
    frames = pair.receive(2)
    assert [frame.payload for frame in frames] == [payload, b"after"]
    assert all(pair.b.opener.verify(frame) for frame in frames)
    assert pair.waiting[-1] is False


def test_a_dozing_reader_wakes_for_words(pair: Pair) -> None:
    """Offers alone do not make it readable; a word does, whole, however large it and what lies before it is."""
    pair.b.doze()
    pair.a.nudge = True
    small = b"context"
    assert pair.a.offer(1, [small], len(small), wire.digest([small]))
    assert select.select([pair.raw], [], [], 0.2)[0] == []
    for size in (5, wire.DOZE, 3 * wire.CHUNK):
        assert pair.a.send(2, bytes(size))
        got: list[wire.Frame] = []
        while not any(frame.kind == 2 for frame in got):
            pair.a.write()
            assert select.select([pair.raw], [], [], 10)[0]
            got += pair.b.read()
        assert len(got[-1].payload) == size
        assert pair.a.offer(1, [small], len(small), wire.digest([small]))


def test_an_offer_is_dropped_while_bytes_wait(pair: Pair) -> None:
    """`offer` sends a whole frame or nothing; it never queues behind others and never splits the stream."""
    payload = bytes(1 << 20)
    hashed = wire.digest([payload])
    taken = 0
    while pair.a.offer(1, [payload], len(payload), hashed):
        taken += 1
        assert taken < 100
    frames = pair.receive(taken)
    assert len(frames) == taken
    assert all(pair.b.opener.verify(frame) for frame in frames)
    while not pair.a.write():
        pair.b.read()
    assert pair.a.offer(1, [payload], len(payload), hashed)


def test_threads_do_not_mix_frames(pair: Pair) -> None:
    """Frames sent by several threads at once arrive whole."""

    def work(mark: int) -> None:
        for _ in range(50):
            pair.a.send(2, bytes([mark]) * 3000)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    frames = pair.receive(200)
    for thread in threads:
        thread.join(60)
    assert len(frames) == 200
    assert all(pair.b.opener.verify(frame) and len(set(frame.payload)) == 1 for frame in frames)


def test_the_backlog_of_a_stuck_peer_is_bounded(pair: Pair) -> None:
    """Past the limit the link is given up instead of growing, and says so by ending."""
    payload = bytes(wire.MAX_FRAME)
    sent = 0
    while pair.a.send(2, payload):
        sent += 1
        assert sent < 10
    assert pair.a.unsent() == 0
    pair.a.read()
    assert pair.a.ended
    assert not pair.a.unreachable


def test_words_before_the_end_are_still_read(pair: Pair) -> None:
    """What a peer said before it closed is read, even after our own send to it failed."""
    pair.b.send(9, b"goodbye")
    pair.b.close()
    deadline = time.monotonic() + 60
    while pair.a.send(2, b"x" * 1000) and time.monotonic() < deadline:
        time.sleep(0.001)
    frames = []
    while not pair.a.ended and time.monotonic() < deadline:
        frames += pair.a.read()
    assert [frame.payload for frame in frames] == [b"goodbye"]
    assert not pair.a.unreachable


def test_too_long_a_frame_is_refused_by_the_sender(pair: Pair) -> None:
    """A payload over the limit raises where it was made, not at the peer."""
    with pytest.raises(WireError, match="over the limit"):
        pair.a.send(2, bytes(wire.MAX_FRAME + 1))


def test_a_full_window_is_not_an_unreachable_node(pair: Pair) -> None:
    """Where the kernel gives a stuck peer up because its window is full, its node is still not called unreachable."""
    with socket.socket(fileno=os.dup(pair.a.fd)) as behind:  # past the link, which would not overfill the window
        behind.setblocking(False)
        with suppress(BlockingIOError):
            while behind.send(bytes(1 << 20)):
                pass
    deadline = time.monotonic() + 60
    while not pair.a.ended and time.monotonic() < deadline:
        pair.a.read()
        time.sleep(0.05)
    assert pair.a.ended
    assert not pair.a.unreachable
