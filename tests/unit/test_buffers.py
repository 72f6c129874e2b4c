"""Buffers that change outside the update are kept as of the last boundary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jitmpi.buffers import BufferShadow, names, unwrapped
from jitmpi.errors import MismatchError


class Model(nn.Module):
    """A batch norm (whose statistics change without a version), an instance norm, a constant, and a counter."""

    def __init__(self, constant: int = 8) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.inner = nn.InstanceNorm1d(3, track_running_stats=True)
        self.mask = nn.Module()
        self.mask.register_buffer("constant", torch.ones(constant), persistent=False)
        self.own = nn.Module()
        self.own.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.seen = self.own.seen + 1  # a new tensor in its place, every time
        return self.inner(self.bn(x).unsqueeze(2).expand(-1, -1, 2))


def live(model: nn.Module) -> dict[str, bytes]:
    return {f"buffer/{name}": b.contiguous().numpy().tobytes() for name, b in model.named_buffers()}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_pieces_are_those_of_the_boundary(model: Model) -> None:
    """A forward after the boundary changes the live values and not the copies."""
    shadow = BufferShadow(model)
    for _ in range(6):
        shadow.capture()
        boundary = live(model)
        pieces = shadow.pieces()
        model(torch.randn(4, 3))
        assert shadow.pieces() == pieces == {name: boundary[name] for name in pieces}
        assert shadow.live_pieces() == {name: raw for name, raw in live(model).items() if name in pieces}
        assert live(model) != boundary
    assert {"buffer/bn.running_var", "buffer/inner.running_mean", "buffer/own.seen"} <= set(pieces)


def test_a_forecast_leaves_out_what_changes_behind_the_update(model: Model) -> None:
    """An averaged copy's buffers are part of what was at the boundary, and of no forecast made before its update."""
    both = nn.ModuleList([model, nn.BatchNorm1d(3)])
    shadow = BufferShadow(both, [both[1]])
    for _ in range(2):
        shadow.capture()
        both[1](model(torch.randn(4, 3))[:, :, 0])
    assert {"buffer/0.bn.running_mean", "buffer/1.running_mean"} <= set(shadow.pieces())
    assert {name[:9] for name in shadow.live_pieces()} == {"buffer/0."}


def test_constants_are_dropped(model: Model) -> None:
    """What never changes is not handed over for long; what changes stays."""
    shadow = BufferShadow(model)
    for _ in range(5):
        shadow.capture()
        model(torch.randn(4, 3))
    assert "buffer/mask.constant" not in shadow.pieces()
    model.mask.constant.add_(1)
    shadow.capture()
    assert shadow.pieces()["buffer/mask.constant"] == live(model)["buffer/mask.constant"]


def test_large_constants_do_not_keep_the_rest_from_travelling() -> None:
    """Above the limit only what changes counts; above it with that too, nothing travels."""
    model = Model(constant=1000)
    shadow = BufferShadow(model, limit=100)
    shadow.capture()
    assert shadow.travels
    assert "buffer/mask.constant" not in shadow.pieces()
    assert "buffer/bn.running_mean" in shadow.pieces()
    small = BufferShadow(model, limit=10)
    small.capture()
    assert not small.travels


def test_restore_puts_them_back_in_place(model: Model) -> None:
    """The tensors stay the same objects; other pieces are left alone; a foreign buffer is refused."""
    shadow = BufferShadow(model)
    shadow.capture()
    wanted, mean = live(model), model.bn.running_mean
    pieces = {**shadow.pieces(), "random/torch": b"x"}
    model.bn(torch.randn(4, 3))
    shadow.restore(pieces)
    assert live(model) == wanted
    assert model.bn.running_mean is mean
    with pytest.raises(MismatchError, match="no such buffer"):
        shadow.restore({"buffer/other": b""})


def test_an_evaluating_norm_is_quiet(model: Model) -> None:
    """In evaluation the statistics stand still, and nothing is copied."""
    model.eval()
    shadow = BufferShadow(model)
    for _ in range(5):
        shadow.capture()
    assert shadow.pieces() == {}


def test_wrappers_leave_no_trace_in_names() -> None:
    """Compiled and wrapped modules give the names of the plain model, wherever the wrapper is."""

    class OptimizedModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    plain = Model()
    outer = nn.DataParallel(OptimizedModule(plain))
    assert unwrapped(outer) is plain
    plain.bn = OptimizedModule(plain.bn)
    clean = names(plain)
    assert [clean(name) for name, _ in plain.named_buffers()] == [name for name, _ in Model().named_buffers()]

    class Honest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.BatchNorm1d(2)

    assert names(Honest())("module.running_mean") == "module.running_mean"
