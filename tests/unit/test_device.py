"""Raw bytes of tensors: the CPU twin of what tests/gpu checks on a device."""

from __future__ import annotations

import pytest
import torch

from jitmpi import device
from jitmpi.errors import AttachError

TENSORS = {
    "plain": torch.arange(60, dtype=torch.float32).reshape(10, 6),
    "strided": torch.arange(60, dtype=torch.int16).reshape(6, 10).t(),
    "bfloat16": torch.randn(7, 5).to(torch.bfloat16),
    "float8": torch.randn(7, 5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_rows_come_out_as_their_bytes(name: str, copy: bool, chunk: int) -> None:
    """Any range of rows, through the two buffers or straight from memory, in chunks of any size."""
    tensor, reader = TENSORS[name], device.HostReader(chunk, copy=copy)
    count = device.rows(tensor)
    for start, stop in [(0, count), (0, count // 2), (count // 2, count)]:
        wanted = raw(tensor[start:stop] if tensor.dim() else tensor)
        if tensor.dim() == 0 and (start, stop) != (0, 1):
            continue
        assert bytes(reader.read(tensor, start, stop)) == wanted
        assert b"".join(bytes(piece) for piece in reader.chunks(tensor, start, stop)) == wanted


def test_a_contiguous_cpu_tensor_is_not_copied() -> None:
    """The view is the tensor's own memory, and keeps it alive."""
    tensor = torch.zeros(4, dtype=torch.int32)
    view = device.HostReader().read(tensor, 1, 3)
    tensor[1] = 0x01020304
    assert bytes(view)[:4] in (b"\x04\x03\x02\x01", b"\x01\x02\x03\x04")
    del tensor
    assert len(bytes(view)) == 8


def test_fill_puts_bytes_back() -> None:
    """From read-only and unaligned memory, into strided tensors, with no dtype in between; a wrong size is refused."""
    for tensor in TENSORS.values():
        target = torch.empty_like(tensor)
        device.fill(target, raw(tensor))
        assert raw(target) == raw(tensor)
        device.fill(target, memoryview(b"x" + raw(tensor))[1:])
        assert raw(target) == raw(tensor)
    with pytest.raises(ValueError, match="3 bytes do not fill"):
        device.fill(torch.empty(1), b"abc")


def test_an_expanded_tensor_is_filled() -> None:
    """Masks and position ids are often one row that is shown many times: torch refuses to copy into such a tensor."""
    expanded = torch.arange(3.0).expand(4, 3)
    raw = device.host_bytes(expanded)
    fresh = torch.zeros(3).expand(4, 3)
    device.fill(fresh, raw)
    assert torch.equal(fresh, expanded)
    device.put(fresh, torch.ones(4, 3))
    assert torch.equal(fresh, torch.ones(4, 3))


def test_nan_payloads_survive() -> None:
    """A float's bits are moved, not its value."""
    tensor = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    target = torch.empty(2)
    device.fill(target, device.host_bytes(tensor))
    assert target.view(torch.int32).tolist() == [0x7FC00001, 0x7F800001]


def test_dtypes_have_names() -> None:
    """Names lead back to their dtype; other attributes of torch do not pass for one."""
    assert device.dtype_of(device.dtype_name(torch.float8_e5m2)) is torch.float8_e5m2
    with pytest.raises(AttributeError):
        device.dtype_of("nn")


def test_what_is_not_its_bytes_is_refused() -> None:
    """Sparse and meta tensors are refused, not saved as something else."""
    for tensor in (torch.ones(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(AttachError, match="cannot be saved"):
            device.check(tensor)


def test_the_cpu_is_always_done() -> None:
    """On the CPU an update is over when the call returns."""
    clock = device.StreamClock(torch.device("cpu"))
    clock.fence()
    assert clock.done()
    clock.closed()
    assert clock.done()
