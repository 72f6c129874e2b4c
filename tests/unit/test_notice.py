"""Notices over real sockets on this machine."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin import notice
from slurm_plugin.notice import Listener

KEY = "ab" * 32
EVENT = {"event": "started", "minibatch": 3, "restored": "", "step": "0"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener on this machine."""
    made = Listener("127.0.0.1")
    yield made
    made.close()


def gather(listener: Listener, count: int, dropped: int = 0) -> list[dict[str, Any]]:
    """Receive until so many events and so many strangers have come."""
    events: list[dict[str, Any]] = []
    end = time.monotonic() + 10
    while (len(events) < count or listener.dropped < dropped) and time.monotonic() < end:
        events += listener.receive()
        time.sleep(0.005)
    return events


def speak(listener: Listener, data: bytes) -> socket.socket:
    """Send bytes as a stranger would."""
    connection = socket.create_connection(("127.0.0.1", listener.port))
    connection.sendall(data)
    return connection


def test_a_notice_arrives_and_is_confirmed(listener: Listener) -> None:
    """send() is True once jit-srun has the event."""
    told: list[bool] = []
    launcher = listener.launcher("127.0.0.1")
    thread = threading.Thread(target=lambda: told.append(notice.send(launcher, EVENT, 10.0)))
    thread.start()
    assert gather(listener, 1) == [EVENT]
    thread.join(10)
    assert told == [True]


def test_without_jit_srun_a_rank_is_told_so(listener: Listener) -> None:
    """send() is False, without raising, when nobody listens, nobody answers, or the address is none."""
    silent = listener.launcher("127.0.0.1")
    assert not notice.send(silent, EVENT, 0.2)  # accepted by the kernel, never answered
    listener.close()
    assert not notice.send(silent, EVENT, 1.0)
    assert not notice.send("nonsense", EVENT, 1.0)
    listener.__init__("127.0.0.1")  # type: ignore[misc]  # for the fixture to close


def test_jit_srun_that_stands_still_is_not_dead(listener: Listener) -> None:
    """Its journal's disk is busy with what the ranks wrote: the kernel takes the notice, the answer comes later."""
    told: list[bool] = []
    launcher = listener.launcher("127.0.0.1")
    thread = threading.Thread(target=lambda: told.append(notice.send(launcher, EVENT, 0.2, reply=60.0)))
    thread.start()
    time.sleep(1.0)
    assert gather(listener, 1) == [EVENT]
    thread.join(60)
    assert told == [True]
    assert not notice.send(launcher, EVENT, 0.1, reply=0.2)


def test_strangers_are_dropped_and_counted(listener: Listener) -> None:
    """Garbage, a wrong key and half a line never become an event."""
    wrong = notice.encode(EVENT, "cd" * 32)
    connections = [speak(listener, data) for data in (b"GET / HTTP/1.0\n\n", wrong, b"\n", b"\xff\n")]
    half = speak(listener, notice.encode(EVENT, listener.key)[:20])
    half.close()
    assert gather(listener, 0, dropped=5) == []
    assert listener.dropped == 5
    for connection in connections:
        connection.close()


def test_a_line_without_end_is_cut_off(listener: Listener) -> None:
    """Nobody can make jit-srun remember more than a line's limit."""
    connection = socket.create_connection(("127.0.0.1", listener.port))
    connection.settimeout(0.02)
    end = time.monotonic() + 20
    while listener.dropped == 0 and time.monotonic() < end:
        with contextlib.suppress(OSError):
            connection.send(b"x" * 65536)
        listener.receive()
    assert listener.dropped == 1
    connection.close()


def test_many_connections_do_not_keep_the_ranks_out() -> None:
    """Idle connections are bounded in number and in life; a rank is heard while they are there and afterwards."""
    now = [0.0]
    listener = Listener("127.0.0.1", clock=lambda: now[0])
    idle = []
    for _ in range(notice.CONNECTIONS + 5):
        idle.append(socket.create_connection(("127.0.0.1", listener.port), timeout=10))
        listener.receive()
    gather(listener, 0, dropped=5)
    assert listener.dropped == 5
    early = speak(listener, notice.encode(EVENT, listener.key))
    assert gather(listener, 1) == [EVENT]
    now[0] = notice.PATIENCE + 1
    listener.receive()
    assert listener.dropped == notice.CONNECTIONS + 5
    late = speak(listener, notice.encode(EVENT, listener.key))
    assert gather(listener, 1) == [EVENT]
    for connection in [*idle, early, late]:
        connection.close()
    listener.close()


def test_a_rank_that_is_turned_away_calls_again() -> None:
    """A jit-srun that hangs up without an answer is alive; it is not taken for dead."""
    told: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        launcher = f"127.0.0.1:{server.getsockname()[1]}:{KEY}"
        thread = threading.Thread(target=lambda: told.append(notice.send(launcher, EVENT, 10.0)))
        thread.start()
        for _ in range(3):
            server.accept()[0].close()
        caller = server.accept()[0]
        assert notice.decode(caller.recv(1 << 16), KEY) == EVENT
        caller.sendall(notice.REPLY)
        thread.join(10)
        caller.close()
    assert told == [True]


@given(st.binary())
def test_no_bytes_pass_for_a_notice(data: bytes) -> None:
    """Without the key no line is an event, and none raises."""
    assert notice.decode(data, KEY) is None


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())))
def test_a_notice_comes_back_as_it_was(values: dict[str, Any]) -> None:
    """Whatever JSON can hold survives the line."""
    event = {**values, "event": "fault"}
    assert notice.decode(notice.encode(event, KEY), KEY) == event


def test_only_nodes_that_take_a_connection_answer() -> None:
    """A closed port, and an address that is none, do not answer; and nobody waits longer than the patience."""
    with socket.create_server(("127.0.0.1", 0)) as open_one, socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
        other.close()
        addresses = {
            "n1": ("127.0.0.1", open_one.getsockname()[1]),
            "n2": ("127.0.0.1", closed),
            "n3": ("no such host", 1),
            "n4": ("127.0.0.1", 99999),
        }
        assert notice.answering(addresses) == {"n1"}
        assert notice.answering(addresses, patience=-1.0) == {"n1"}, "as where this process stood still meanwhile"
    assert notice.answering({}) == frozenset()


def test_a_job_of_more_nodes_than_files_loses_none() -> None:
    """A process may open 1024 files as a rule: a node for which there was none left would count as dead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        addresses = {f"n{i}": ("127.0.0.1", server.getsockname()[1]) for i in range(600)}
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        try:
            assert notice.answering(addresses) == set(addresses)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_is_reached_by_both_kinds_of_addresses(host: str) -> None:
    """A cluster may have only one of them."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    here = Listener()
    sender = threading.Thread(target=notice.send, args=(here.launcher(host), EVENT, 10.0))
    sender.start()
    assert gather(here, 1) == [EVENT]
    sender.join(20)
    here.close()


def test_a_name_service_that_is_out_makes_no_node_dead() -> None:
    """What cannot be found is left out, and not every node is waited for."""
    now = [0.0]

    def slow(host: str, *_: Any, **__: Any) -> list[Any]:
        now[0] += 4.0
        if host == "lost":
            raise socket.gaierror("Temporary failure in name resolution")
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.1", 0))]

    hosts = {"n1": "a", "n2": "lost", "n3": "b", "n4": "c", "n5": "d"}
    found = notice.resolve_all(hosts, slow, lambda: now[0])
    assert found == {"n1": "10.0.0.1", "n3": "10.0.0.1"}


def test_slurmd_is_asked_at_the_address_at_which_it_listens() -> None:
    """Where names have addresses of both kinds, Slurm uses the old one; all nodes would count as dead at the other."""
    new, old = ((f, 0, 0, "", (a, 0)) for f, a in ((socket.AF_INET6, "fd00::7"), (socket.AF_INET, "10.0.0.7")))
    assert notice.resolve("n7", lambda *_, **__: [new, old]) == "10.0.0.7"
    assert notice.resolve("n7", lambda *_, **__: [new]) == "fd00::7"
