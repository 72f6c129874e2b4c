"""Turn tensors, wherever they live, into raw host bytes and back.

Rule 1: on the fault path the stream that the training used may never end (a collective waits for a dead peer in it),
so nothing here uses or waits for the default or current stream: CUDA tensors leave through pinned buffers on a stream
of our own.
Rule 2: a stream of our own does not wait for the kernels that wrote the tensor. Whoever reads has made sure of that
with `StreamClock`.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from jitmpi.errors import AttachError, SaveError

CPU = torch.device("cpu")
CHUNK = 32 << 20  # bytes of each of the two pinned buffers: large enough for full PCIe speed, small beside any model
READ_S = 60.0  # seconds that one chunk may take: a working device needs milliseconds, a lost one never answers


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return torch.float32 for "float32".

    Raises:
        AttributeError: this torch has no such dtype.
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise AttributeError(f"torch has no dtype {name!r}")
    return dtype


def check(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are not simply its bytes.

    Raises:
        AttachError: sparse, quantized, on no device, or a tensor subclass such as DTensor.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and type(tensor).__name__ != "Buffer":
        raise AttachError(f"a tensor of type {type(tensor).__name__} cannot be saved (only plain tensors can)")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise AttachError(
            f"a tensor of layout {tensor.layout} on {tensor.device} cannot be saved (only dense ones can)"
        )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as one flat uint8 tensor, without a copy where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def fill(tensor: torch.Tensor, raw: bytes | bytearray | memoryview) -> None:
    """Put raw bytes (C order, exactly `tensor.nbytes`) into a tensor in place.

    Raises:
        ValueError: another number of bytes.
    """
    size = memoryview(raw).nbytes
    if size != tensor.nbytes:
        raise ValueError(f"{size} bytes do not fill a tensor of {tensor.nbytes}")
    if size == 0:
        return
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # we only read from it
        source = torch.frombuffer(raw, dtype=torch.uint8)
        if source.data_ptr() % tensor.element_size():  # a slice of some larger buffer
            source = source.clone()
        put(tensor, source.view(tensor.dtype).reshape(tensor.shape))


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of the same shape into a tensor in place; an expanded one shows a value in many places."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def host_bytes(tensor: torch.Tensor) -> bytes:
    """Copy a small tensor's raw bytes; like `HostReader.read` for one value.

    Raises:
        AttachError: see `check`.
        SaveError: the device does not answer.
    """
    check(tensor)
    with _small_lock:
        return bytes(_small.read(tensor, 0, rows(tensor)))


def prepare(tensors: Iterable[torch.Tensor], reader: HostReader | None = None) -> None:
    """Make the pinned buffers for the devices of some tensors, for `host_bytes` or for a reader.

    Call it before training: making pinned memory waits for the device, and after a fault the device may be stuck.
    """
    for place in {tensor.device for tensor in tensors}:
        if place.type == "cuda":
            (reader or _small).prepare(place)


def rows(tensor: torch.Tensor) -> int:
    """Return the length of the first dimension; a scalar has one row."""
    return tensor.shape[0] if tensor.dim() else 1


class HostReader:
    """Reads tensors as raw bytes. One per thread: the views it gives share its two buffers."""

    def __init__(self, chunk: int = CHUNK, *, copy: bool = False, patience: float = READ_S) -> None:
        """Make a reader; `copy` sends CPU tensors through the buffers as well, `patience` is seconds a chunk."""
        self._chunk, self._copy, self._patience = chunk, copy, patience
        self._lanes: dict[torch.device, _Lane] = {}

    def prepare(self, place: torch.device) -> None:
        """Make the buffers for a device now rather than at the first read."""
        self._lane(place)

    def read(self, tensor: torch.Tensor, start: int, stop: int) -> memoryview:
        """Return rows [start, stop) as contiguous raw bytes.

        A contiguous CPU tensor is not copied: the view is the tensor. The view of a CUDA tensor that fits one buffer is
        good until the next call.

        Raises:
            SaveError: the device does not answer.
        """
        part = self._part(tensor, start, stop)
        if part.numel() == 0:
            return memoryview(b"")
        if part.device.type == "cpu" and not self._copy:
            return view(part)
        if part.numel() <= self._chunk:
            return next(self._through(part))
        whole = bytearray(part.numel())
        offset = 0
        for piece in self._through(part):
            whole[offset : offset + len(piece)] = piece
            offset += len(piece)
        return memoryview(whole)

    def chunks(self, tensor: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of rows [start, stop) in order; each view is good until the next but one is asked for.

        While the caller writes one chunk the next one is on its way.

        Raises:
            SaveError: the device does not answer.
        """
        part = self._part(tensor, start, stop)
        if part.numel() == 0:
            return
        if part.device.type == "cpu" and not self._copy:
            yield view(part)
        else:
            yield from self._through(part)

    def _part(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        with torch.no_grad():
            part = tensor.detach()
            part = part[start:stop] if part.dim() else part
            if part.device.type == "cpu":
                return flat_bytes(part)
            with self._lane(part.device).active():  # a strided tensor is made contiguous by a kernel, in our stream
                return flat_bytes(part)

    def _through(self, part: torch.Tensor) -> Iterator[memoryview]:
        lane = self._lane(part.device)
        offsets = range(0, part.numel(), self._chunk)
        sizes = []
        for turn, offset in enumerate(offsets):
            source = part[offset : offset + self._chunk]
            lane.start(turn % 2, source)
            sizes.append(source.numel())
            if turn:
                yield lane.finish((turn - 1) % 2, sizes[turn - 1], time.monotonic() + self._patience)
        last = len(sizes) - 1
        yield lane.finish(last % 2, sizes[last], time.monotonic() + self._patience)

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _CudaLane(device, self._chunk) if device.type == "cuda" else _HostLane(self._chunk)
        return self._lanes[device]


class StreamClock:
    """Keeps Python and the device together at the update: kernels run long after the calls that queued them.

    Without the fence Python could queue an update behind a collective that hangs for ever, and go on while the tensors
    are still those of before.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"  # else there is nothing to wait for, and no need to call
        self._device = device
        self._closed: Any = None

    def fence(self) -> None:
        """Training thread: wait until the device has done all that the update depends on (nothing on CPU).

        With a hung collective this never returns, and the tensors stay as they are. It costs the launch of the update's
        first kernels, which no longer overlaps the end of the backward pass.
        """
        if self.cuda:
            self._record().synchronize()
            self._closed = None

    def closed(self) -> None:
        """Training thread: the update is queued."""
        if self.cuda:
            self._closed = self._record()

    def done(self) -> bool:
        """Whether the device has done the last update; on a CPU it is done when the call returns."""
        return self._closed is None or bool(self._closed.query())

    def _record(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Lane(Protocol):
    def active(self) -> Any: ...
    def start(self, turn: int, source: torch.Tensor) -> None: ...
    def finish(self, turn: int, size: int, deadline: float) -> memoryview: ...


class _HostLane:
    def __init__(self, chunk: int) -> None:
        self._buffers = [torch.empty(chunk, dtype=torch.uint8) for _ in range(2)]

    def active(self) -> Any:
        return torch.no_grad()

    def start(self, turn: int, source: torch.Tensor) -> None:
        self._buffers[turn][: source.numel()].copy_(source)

    def finish(self, turn: int, size: int, deadline: float) -> memoryview:
        return view(self._buffers[turn][:size])


class _CudaLane:
    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def active(self) -> Any:
        return torch.cuda.stream(self._stream)

    def start(self, turn: int, source: torch.Tensor) -> None:
        with self.active():
            self._buffers[turn][: source.numel()].copy_(source, non_blocking=True)
            self._events[turn].record(self._stream)

    def finish(self, turn: int, size: int, deadline: float) -> memoryview:
        while not self._events[turn].query():  # synchronize() has no deadline
            if time.monotonic() > deadline:
                raise SaveError(f"{self._device} does not answer: a copy of {size} bytes to the host did not end")
            time.sleep(0.0001)
        return view(self._buffers[turn][:size])


_small = HostReader(1 << 16)  # for single values, which are read rarely and from any thread
_small_lock = threading.Lock()


def view(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat uint8 CPU tensor, without a copy."""
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array._keep = flat  # type: ignore[attr-defined]  # the view must not outlive the memory
    return memoryview(array).cast("B")
