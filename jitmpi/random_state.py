"""Turn the random states of this process into named bytes and back.

Rule 1: reading disturbs nothing: no draw, no CUDA start, no import of NumPy.
Rule 2: it is on the hot path. The generators of Python and NumPy keep their state in plain memory; it is copied from
there (about 1 us) where a check finds it for certain, else asked for through the public call (10 and 40 us).
"""

from __future__ import annotations

import array
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jitmpi import codec
from jitmpi.errors import MismatchError

_WORDS = 624  # of the Mersenne twister, in all three libraries
_GAUSS = struct.Struct("<?d")


def capture() -> dict[str, bytes]:
    """Copy the states of Python, NumPy (once loaded), torch and every CUDA device (once started)."""
    pieces = {"random/python": _python_state(), "random/torch": _torch_state(torch.default_generator)}
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        pieces["random/numpy"] = _numpy_state(numpy._rand)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            pieces[f"random/cuda{index}"] = _torch_state(generator)
    return pieces


def restore(pieces: Mapping[str, bytes]) -> None:
    """Put captured states back; names that are not random states are left alone.

    Raises:
        MismatchError: a piece of a CUDA device that this process does not have.
    """
    for name, raw in pieces.items():
        if name == "random/python":
            _set_python(raw)
        elif name == "random/torch":
            torch.default_generator.set_state(_as_tensor(raw))
        elif name == "random/numpy":
            _set_numpy(raw)
        elif name.startswith("random/cuda"):
            index = int(name.removeprefix("random/cuda"))
            if index >= torch.cuda.device_count():
                raise MismatchError(f"the checkpoint holds the random state of CUDA device {index}, which is not here")
            torch.cuda.set_rng_state(_as_tensor(raw), index)


def fork() -> dict[str, bytes]:
    """Return the states and go on with new ones, each derived from its own old one.

    For code that is to draw from streams of its own. Ranks that agree in one library's stream, and not in another's,
    still agree in it afterwards, on both sides.
    """
    pieces = capture()
    random.seed(random.getrandbits(64))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        words = numpy.randint(0, 1 << 32, size=2, dtype="uint64").tolist()
        seed_generator(numpy.mtrand._rand, words[0] | words[1] << 32)
    torch.default_generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(mix(*_torch_state(generator)))
    return pieces


def seed(value: int) -> None:
    """Seed Python, NumPy (once loaded), torch and CUDA (once started) from one number of 64 bits.

    torch.manual_seed is not used: until CUDA is started it takes a stack trace with every call.
    """
    random.seed(value)
    torch.default_generator.manual_seed(value)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        seed_generator(numpy.mtrand._rand, value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def mix(*numbers: int) -> int:
    """Hash numbers to 64 well-mixed bits (the finalizer of SplitMix64), so that neighbours share no seed."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value


def own_generators(owner: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the random generators that an object keeps in its attributes, as ("<name>.<attribute>", generator)."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    for attribute, value in sorted(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, kinds):
            yield f"{name}.{attribute}", value


def generator_state(generator: Any) -> bytes:
    """Copy the state of one generator of `own_generators`."""
    if isinstance(generator, torch.Generator):
        return _torch_state(generator)
    if isinstance(generator, random.Random):
        return codec.dumps(generator.getstate())
    bits = getattr(generator, "bit_generator", None)
    return codec.dumps(bits.state if bits is not None else generator.get_state(legacy=False))


def set_generator_state(generator: Any, raw: bytes) -> None:
    """Put back what `generator_state` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_as_tensor(raw))
    elif isinstance(generator, random.Random):
        generator.setstate(codec.loads(raw))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = codec.loads(raw)
    else:
        generator.set_state(codec.loads(raw))


def seed_generator(generator: Any, value: int) -> None:
    """Start one generator of `own_generators` anew from 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, random.Random):
        generator.seed(value)
    elif hasattr(generator, "seed") and type(generator._bit_generator).__name__ == "MT19937":
        generator.seed([value & 0xFFFFFFFF, value >> 32])
    else:
        bits = getattr(generator, "bit_generator", None) or generator._bit_generator
        bits.state = type(bits)(value).state


def _python_state() -> bytes:
    source: Any = random._inst
    gauss = source.gauss_next
    tail = _GAUSS.pack(gauss is not None, gauss or 0.0)
    if _PYTHON_OFFSET and source is _PYTHON_SOURCE:
        return bytes(_PYTHON_WORDS.raw) + tail
    words = source.getstate()[1]
    return array.array("I", (words[-1], *words[:-1])).tobytes() + tail


def _set_python(raw: bytes) -> None:
    cached, gauss = _GAUSS.unpack(raw[4 * (_WORDS + 1) :])
    source: Any = random._inst
    if _PYTHON_OFFSET and source is _PYTHON_SOURCE:
        ctypes.memmove(id(source) + _PYTHON_OFFSET, raw, 4 * (_WORDS + 1))
        source.gauss_next = gauss if cached else None
        return
    position, *words = array.array("I", raw[: 4 * (_WORDS + 1)])
    random.setstate((3, (*words, position), gauss if cached else None))


def _numpy_state(source: Any) -> bytes:
    global _numpy_seen
    seen = _numpy_seen
    if seen is None or seen.source is not source or seen.bits is not source._bit_generator:
        seen = _numpy_seen = _NumpyMemory(source)
    if seen.words is not None:
        return b"M" + bytes(seen.words.raw) + bytes(seen.gauss.raw)
    return b"T" + codec.dumps(source.get_state(legacy=False))  # as text


def _set_numpy(raw: bytes) -> None:
    import numpy

    bits = numpy.random.mtrand._rand._bit_generator
    name = type(bits).__name__
    if raw[:1] == b"T":
        state = codec.loads(raw[1:])
        if state["bit_generator"] != name:
            raise MismatchError(f"NumPy's global generator is {name}, the checkpoint has {state['bit_generator']}")
        numpy.random.set_state(state)
        return
    offset = _numpy_offset()
    if offset and name == "MT19937":
        ctypes.memmove(bits.ctypes.state_address, raw[1:], 4 * (_WORDS + 1))
        ctypes.memmove(id(numpy.random.mtrand._rand) + offset, raw[1 + 4 * (_WORDS + 1) :], 16)
        return
    words = numpy.frombuffer(raw, numpy.uint32, _WORDS, offset=1)
    (position,) = struct.unpack_from("<i", raw, 1 + 4 * _WORDS)
    cached, gauss = struct.unpack_from("<i4xd", raw, 1 + 4 * (_WORDS + 1))
    numpy.random.set_state(("MT19937", words, position, cached, gauss))


def _torch_state(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return bytes(_bytes_at(state.numel()).from_address(state.data_ptr()).raw)


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _find_python() -> int:
    """Return where a Random object keeps (position, words); 0 where this interpreter keeps it elsewhere."""
    offset = object.__basicsize__
    for probe in (random.Random(1), random.Random(2)):
        probe.random()
        words = probe.getstate()[1]
        if random.Random.__basicsize__ < offset + 4 * (_WORDS + 1):
            return 0
        wanted = array.array("I", (words[-1], *words[:-1])).tobytes()
        if ctypes.string_at(id(probe) + offset, len(wanted)) != wanted:
            return 0
    other = random.Random(3)
    ctypes.memmove(id(other) + offset, wanted, len(wanted))
    return offset if other.getstate() == probe.getstate() else 0


@functools.cache  # not at import: NumPy may be loaded later
def _numpy_offset() -> int:
    """Return where a RandomState keeps (has_gauss: int, gauss: double); 0 where it is not found for certain."""
    from numpy.random import MT19937, RandomState

    offsets = set(range(16, RandomState.__basicsize__ - 15, 8))
    for value in (1, 2, 3):
        probe = RandomState(MT19937(value))
        for draws in range(2):
            if draws:
                probe.standard_normal()
            state = probe.get_state(legacy=False)
            wanted = struct.pack("<i", state["has_gauss"]), struct.pack("<d", state["gauss"])
            for offset in tuple(offsets):
                found = ctypes.string_at(id(probe) + offset, 16)
                if (found[:4], found[8:]) != wanted:
                    offsets.discard(offset)
    return offsets.pop() if len(offsets) == 1 else 0


@functools.cache
def _bytes_at(count: int) -> Any:
    """Return a type of `count` bytes at an address; in a cold cache it costs a fifth of ctypes.string_at."""
    return ctypes.c_char * count


class _NumpyMemory:
    """Where NumPy's global generator keeps its state; `words` is None where that is not known for certain."""

    def __init__(self, source: Any) -> None:
        self.source, self.bits = source, source._bit_generator
        self.words: Any = None
        offset = _numpy_offset()
        if offset and type(self.bits).__name__ == "MT19937":
            self.words = _bytes_at(4 * (_WORDS + 1)).from_address(self.bits.ctypes.state_address)
            self.gauss = _bytes_at(16).from_address(id(source) + offset)


_numpy_seen: _NumpyMemory | None = None
_PYTHON_OFFSET = _find_python()
_PYTHON_SOURCE: Any = random._inst  # kept, so that its memory stays
_PYTHON_WORDS = _bytes_at(4 * (_WORDS + 1)).from_address(id(_PYTHON_SOURCE) + _PYTHON_OFFSET)
