"""sheet: a context captured without allocating says what the libraries' own calls say, and travels as it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import messages, random_state, sheet
from jitmpi.errors import WireError
from jitmpi.events import Context
from jitmpi.random_state import Taps
from jitmpi.sheet import Base, Sheet


@pytest.fixture(autouse=True)
def _own_states() -> Iterator[None]:
    np.random.random()  # NumPy loads its generators at the first use
    before = random_state.capture()
    random_state.seed(7)
    yield
    random_state.restore(before)


def draw() -> None:
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3), torch.randn(1, dtype=torch.float64)


def filled(page: Sheet, more: bytes = b"", base: Base | None = None) -> Context:
    page.fill(5, (1, 0, 17, False), base or Base(0, {}, Taps()), more)
    return page.context()


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_a_sheet_says_what_the_libraries_say(draws: int) -> None:
    """Whatever was drawn, the pieces are those of the public calls, with the position and its feed."""
    page = Sheet(3, Taps())
    for _ in range(draws):
        draw()
    position = {"position": b'{"epoch":1,"feed":0,"index":17,"done":false}'}
    assert filled(page) == Context(3, 5, False, {**random_state.capture(), **position})
    draw()
    assert filled(page).pieces == {**random_state.capture(), **position}


def test_a_sheet_keeps_its_moment() -> None:
    """What is drawn afterwards does not show in it; another sheet of the same moment says the same."""
    taps = Taps()
    early, same, late = Sheet(0, taps), Sheet(0, taps), Sheet(0, taps)
    told = filled(early)
    filled(same)
    draw()
    filled(late)
    assert early.context() == told
    assert same.confirm(early)
    assert not late.confirm(early)
    assert not late.confirm(None)
    assert same.context() == Context(0, 5, True, told.pieces)
    assert not filled(same).exact


def test_pieces_of_some_scripts_come_and_go() -> None:
    """Their length may change from one minibatch to the next; what is kept is not handed over."""
    page = Sheet(0, Taps())
    plain = filled(page).pieces
    for more in ({"user": b"{}"}, {"user": b"{}" * 500, "dataset/g": b"1"}, {}):
        encoded = messages.encode_pieces(more) if more else b""
        assert filled(page, more=encoded).pieces == {**plain, **more}
        assert sheet.read(b"".join(page.parts)).pieces.keys() >= more.keys()
    page.kept = {"buffer/x": b"large"}
    assert filled(page).pieces == {**plain, "buffer/x": b"large"}
    assert "buffer/x" not in sheet.read(b"".join(page.parts)).pieces


@pytest.mark.parametrize("draws", [0, 1, 700])
def test_what_nobody_drew_from_is_left_out(draws: int) -> None:
    """A buddy that has the feed's base puts the whole context together; only what was drawn from travels."""
    taps = Taps()
    base = Base(4, {"start/x": b"began"}, taps)
    page = Sheet(0, taps)
    for _ in range(draws):
        torch.rand(1)
    context = filled(page, base=base)
    told = sheet.read(b"".join(page.parts))
    assert {name for name in ("memory/torch", "memory/python", "memory/numpy") if name in told.pieces} == (
        {"memory/torch"} if draws else set()
    )
    assert sheet.whole(told, base.pieces) == context
    assert context.pieces.items() >= {**random_state.capture(), "start/x": b"began"}.items()


def test_a_generator_put_in_the_place_of_another_is_the_one_that_counts() -> None:
    """The base of the feed knows NumPy's old generator; the context has the new one's state."""
    base = Base(0, {}, Taps())
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        taps = Taps()
        base.align(taps)
        page = Sheet(0, taps)
        context = filled(page, messages.encode_pieces(taps.others()), base)
        assert context.pieces.items() >= random_state.capture().items()
    finally:
        np.random.set_bit_generator(old)


def test_generators_that_are_not_in_memory_are_asked() -> None:
    """Another one under NumPy's functions: the taps are stale, and new ones ask for its state."""
    taps = Taps()
    assert not taps.stale()
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert taps.stale()
        assert "memory/numpy" not in Taps().large
        assert Taps().asks
        assert Taps().others()["random/numpy"] == random_state.capture()["random/numpy"]
    finally:
        np.random.set_bit_generator(old)
    assert not taps.stale()


@given(st.data())
def test_damage_is_noticed_or_harmless(data: st.DataObject) -> None:
    """A payload with changed or missing bytes is a context or a WireError."""
    page = Sheet(0, Taps())
    page.fill(5, (0, 0, 0, False), Base(0, {}, Taps()), messages.encode_pieces({"user": b"{}"}))
    payload = bytearray(b"".join(page.parts))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    for damaged in (bytes(payload), cut):
        with suppress(WireError):
            assert isinstance(sheet.whole(sheet.read(damaged), {}), Context)
