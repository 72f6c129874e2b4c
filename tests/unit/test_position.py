"""position: what is written is read back, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi.position import Position


@given(st.builds(Position, st.integers(-1, 10**6), st.integers(0, 100), st.integers(0, 10**12), st.booleans()))
def test_a_position_survives_its_text(position: Position) -> None:
    """encode gives JSON that decode reads back."""
    assert Position.decode(position.encode()) == position
    assert json.loads(position.encode())["index"] == position.index


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"epoch":"a","feed":0,"index":0,"done":false}', b"nonsense"])
def test_anything_else_is_refused(text: bytes) -> None:
    """A damaged position is an error, not a position."""
    with pytest.raises((ValueError, TypeError)):
        Position.decode(text)
