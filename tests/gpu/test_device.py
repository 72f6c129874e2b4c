"""On a CUDA device: tensors leave through pinned buffers on a stream of our own, past a stream that hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from jitmpi import device, random_state
from jitmpi.buffers import BufferShadow
from jitmpi.torch_state import TrainingState

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000_000  # of the GPU's clock: some ten seconds in which the default stream does nothing else


@pytest.fixture
def reader() -> device.HostReader:
    """A reader whose pinned buffers were made in time."""
    made = device.HostReader(1 << 16)
    made.prepare(torch.device("cuda", torch.cuda.current_device()))
    return made


@pytest.fixture
def busy() -> Iterator[torch.Tensor]:
    """A tensor whose kernels are done, and behind them a default stream that is stuck for long."""
    tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    tensor.view(1 << 10, 1 << 10).t()[3:9].contiguous()  # so that memory for a strided read is there
    device.prepare([tensor])
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    yield tensor
    torch.cuda.synchronize()


def test_reading_does_not_wait_for_the_training_stream(reader: device.HostReader, busy: torch.Tensor) -> None:
    """With the default stream stuck all bytes come out, in chunks and strided as well, and it is still stuck after."""
    wanted = torch.arange(1 << 20, dtype=torch.float32)
    assert bytes(reader.read(busy, 0, 1 << 20)) == wanted.numpy().tobytes()
    strided = busy.view(1 << 10, 1 << 10).t()
    assert bytes(reader.read(strided, 3, 9)) == wanted.view(1 << 10, 1 << 10).t()[3:9].contiguous().numpy().tobytes()
    assert b"".join(bytes(c) for c in reader.chunks(busy, 5, 70_000)) == wanted[5:70_000].numpy().tobytes()
    assert not torch.cuda.default_stream().query()


def test_the_clock_tells_where_the_device_is(busy: torch.Tensor) -> None:
    """Python is past the update; the device, stuck before it, is not."""
    clock = device.StreamClock(busy.device)
    busy.add_(1)
    clock.closed()
    assert not clock.done()
    clock.fence()
    assert torch.cuda.default_stream().query()
    assert clock.done()


def test_scalars_do_not_wait_for_the_training_stream() -> None:
    """Neither a tensor learning rate nor the scale of a GradScaler is asked for on the training's stream."""
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.1, device="cuda"), capturable=True, foreach=True
    )
    scaler = torch.amp.GradScaler("cuda")
    state = TrainingState(model, optimizer, None, scaler)
    state.check()
    scaler.scale(model(torch.ones(2, 4, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    names = {info.name for info, _ in state.tensors()}
    assert {"scaler/_scale", "optimizer/@group0/lr", "optimizer/weight/step"} <= names
    assert state.scalars()
    assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()


def test_state_goes_back_to_the_device() -> None:
    """Optimizer state is made where it was, and the next update has the same bits."""
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(8, 8).cuda()
        states.append((model, torch.optim.AdamW(model.parameters())))
    for _ in range(2):
        update(*states[0])
    source, target = (TrainingState(*state) for state in states)
    raw = {info.name: device.host_bytes(tensor) for info, tensor in source.tensors()}
    target.load(lambda info: raw[info.name], [info for info, _ in source.tensors()], source.scalars())
    for state in states:
        update(*state)
    assert torch.equal(states[0][0].weight, states[1][0].weight)
    moment = states[1][1].state[states[1][0].weight]
    assert (moment["exp_avg"].device.type, moment["step"].device.type) == ("cuda", "cpu")


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8, device="cuda")).square().sum().backward()
    optimizer.step()


def test_the_device_random_state_comes_back() -> None:
    """Dropout masks after a restore are the same."""
    torch.rand(1, device="cuda")
    pieces = random_state.capture()
    wanted = torch.rand(100, device="cuda")
    torch.rand(7, device="cuda")
    random_state.restore(pieces)
    assert torch.equal(torch.rand(100, device="cuda"), wanted)


def test_statistics_are_read_past_the_training_stream() -> None:
    """The copies of a boundary come out while the next minibatch is stuck; nothing of them is handed over before."""
    model = nn.BatchNorm1d(4).cuda()
    device.prepare(model.buffers())
    shadow = BufferShadow(model)
    model(torch.randn(8, 4, device="cuda"))
    shadow.capture()
    torch.cuda.synchronize()
    wanted = model.running_mean.cpu().numpy().tobytes()
    torch.cuda._sleep(CYCLES)
    model(torch.randn(8, 4, device="cuda"))
    assert shadow.pieces() == {}
    assert shadow.device_pieces(live=False)["buffer/running_mean"] == wanted
    assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
