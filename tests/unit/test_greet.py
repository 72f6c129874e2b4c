"""Only who holds the job's key gets in, on either side of a connection. (The door itself: test_control.py.)"""

from __future__ import annotations

import pytest

from jitmpi.errors import WireError
from jitmpi.greet import HELLO, Handshake

KEY = b"k" * 32


def hands(caller: Handshake, called: Handshake) -> None:
    answer = caller.hello()
    for side in (called, caller, called, caller):
        answer = side.receive(answer)


def test_both_sides_prove_themselves() -> None:
    """After the handshake each side sends with the key the other receives with; every connection has its own."""
    keys = set()
    for _ in range(2):
        caller, called = Handshake(KEY, 5, 2), Handshake(KEY, 2, None)
        hands(caller, called)
        assert called.peer == 5
        assert caller.keys is not None
        assert called.keys == caller.keys[::-1]
        keys |= set(caller.keys)
    assert len(keys) == 4


@pytest.mark.parametrize("wrong", ["caller", "called"])
def test_a_wrong_key_is_refused(wrong: str) -> None:
    """Neither side of a connection is believed without the job's key."""
    other = b"o" * 32
    caller = Handshake(other if wrong == "caller" else KEY, 5, 2)
    called = Handshake(other if wrong == "called" else KEY, 2, None)
    with pytest.raises(WireError, match="does not hold this job's key"):
        hands(caller, called)
    assert called.keys is None


def test_a_recorded_handshake_opens_nothing() -> None:
    """Playing back what a genuine caller once sent fails on the new nonce."""
    caller, called, again = Handshake(KEY, 5, 2), Handshake(KEY, 2, None), Handshake(KEY, 2, None)
    hello = caller.hello()
    proof = caller.receive(called.receive(hello))
    again.receive(hello)
    with pytest.raises(WireError):
        again.receive(proof)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", HELLO.pack(b"JIT1", 5, 3, bytes(32)), b"JIT1" + bytes(72)]
)
def test_strangers_are_refused(data: bytes) -> None:
    """What is no hello, or a hello to another rank or from an unexpected one, is refused at once."""
    with pytest.raises(WireError):
        Handshake(KEY, 2, None, lambda rank: rank == 5).receive(data)
