"""demo.draw: both pictures are drawn from plain values."""

from __future__ import annotations

from pathlib import Path

from demo.draw import draw_loss, draw_timeline, mean_losses
from demo.record import Loss
from demo.timeline import Marks, Places, lanes, stages

MARKS = Marks(1.0, 5.0, 20.0, 21.1, 21.14, 21.2, 21.22, 21.5, 28.0, 28.9, 40.0)
PLACES = Places(("n1", "n2", "n3", "n4"), ("n1", "n2", "n4", "n5"), "n3", ("n5",))


def losses(*order: int) -> dict[int, tuple[Loss, ...]]:
    return {
        rank: tuple(Loss(m, (5.5 / (1 + m / 9) + rank).hex(), 5.0 + m) for m in order) for rank in range(2)
    }  # fmt: skip


def test_both_pictures_are_png_files(tmp_path: Path) -> None:
    """What a person will look at is there and is a picture."""
    draw_timeline(
        tmp_path / "new" / "timeline.png", MARKS, lanes(MARKS, PLACES, losses(*range(30))), stages(MARKS), 6.4
    )
    draw_loss(tmp_path / "loss.png", losses(*range(30)), losses(*range(15), *range(14, 30)), 14, True)
    for name in ("new/timeline.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_mean_is_over_ranks_and_the_last_try_counts() -> None:
    """Two ranks, one minibatch run twice: one point a minibatch."""
    lines = {0: (Loss(0, "0x1p+1", 0.0), Loss(0, "0x1p+2", 1.0)), 1: (Loss(0, "0x1p+1", 0.0),)}
    assert mean_losses(lines) == ([0], [3.0])
