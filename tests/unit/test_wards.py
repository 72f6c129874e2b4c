"""wards: a dead rank's context is put together from what it handed over."""

from __future__ import annotations

from jitmpi import messages
from jitmpi.events import Context
from jitmpi.wards import Wards


def frames(*contexts: Context) -> list[bytes]:
    return [messages.encode_context(c) for c in contexts]


def test_a_context_is_whole_with_what_its_feed_began_with() -> None:
    """Pieces that come once a feed are part of every context of that feed, and only of that."""
    handed = frames(
        Context(5, 1, True, {"began": b"0"}),
        Context(5, 7, True, {"began": b"0"}),
        Context(5, 8, False, {"began": b"1"}),
    )
    wards = Wards([5], {5: handed}.__getitem__)
    wards.began(5, messages.encode_context(Context(5, -1, True, {"began": b"0", "start/x": b"old"})))
    wards.began(5, messages.encode_context(Context(5, -1, True, {"began": b"1", "start/x": b"new"})))
    found = {c.minibatch: c for c in wards.contexts(7)}
    assert set(found) == {7, 8}
    assert (found[7].pieces["start/x"], found[8].pieces["start/x"]) == (b"old", b"new")


def test_what_cannot_be_read_or_belongs_to_another_is_left_out() -> None:
    """A damaged frame, a foreign rank's context and an unknown feed give nothing."""
    handed = [b"damaged", *frames(Context(6, 7, True, {"began": b"0"}), Context(5, 7, True, {"began": b"9"}))]
    wards = Wards([5], {5: handed}.__getitem__)
    wards.began(5, messages.encode_context(Context(5, -1, True, {"began": b"0"})))
    wards.began(4, messages.encode_context(Context(4, -1, True, {"began": b"0"})))
    assert wards.contexts(7) == ()
