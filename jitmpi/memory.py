"""Find where the global random generators keep their states in this process's memory: a generator in, a view out.

Rule 1: a place counts only once a check against the library's own answer has found it for certain, in several states;
        else there is None, and the caller asks the library.
Rule 2: nothing is disturbed: no draw from a generator that is not ours, no import of NumPy.
"""

from __future__ import annotations

import array
import ctypes
import functools
import random
import struct
from typing import Any

import torch

WORDS = 624  # of the Mersenne twister, in all three libraries
STATE_BYTES = 4 * (WORDS + 1)  # those and the position among them
GAUSS_BYTES = 16  # NumPy's: has_gauss, gauss
SCANNED = 256  # bytes from a generator's begin in which its first word must lie
# at::mt19937 and the two cached normals behind it: seed, left, seeded, next, words; float, valid; double, valid
_ENGINE = struct.Struct("=Qi?3xI2496s4xf?3xd?7x")
# what Generator.get_state gives: seed, left, seeded, next, words of 8 bytes; x, y, rho, valid; float, valid
_LEGACY = struct.Struct("=Qi?3xQ4992sdddi4xf?3x")
_BEFORE_WORDS = 20  # bytes of the engine


def view(address: int, size: int) -> memoryview:
    """Return a part of this process's memory; whoever holds it keeps its owner alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def python(source: random.Random) -> memoryview | None:
    """Return (position, words) of a Random object."""
    return view(id(source) + _PYTHON_OFFSET, STATE_BYTES) if _PYTHON_OFFSET else None


def numpy(source: Any) -> tuple[memoryview, memoryview] | None:
    """Return (words, position) and (has_gauss, gauss) of a RandomState."""
    offset = _numpy_offset()
    bits = source._bit_generator
    if not offset or type(bits).__name__ != "MT19937":
        return None
    return view(bits.ctypes.state_address, STATE_BYTES), view(id(source) + offset, GAUSS_BYTES)


def torch_engine(generator: torch.Generator) -> memoryview | None:
    """Return the engine of a generator on the CPU; `torch_state` reads it."""
    offset = _torch_offset()
    if not offset or generator.device.type != "cpu":
        return None
    found = view(_address(generator) + offset, _ENGINE.size)
    return found if torch_state(found) == asked(generator) else None


def torch_state(engine: bytes | memoryview) -> bytes:
    """Turn an engine's memory into what `Generator.get_state` gives."""
    seed, left, seeded, position, words, small, has_small, large, has_large = _ENGINE.unpack(engine)
    wide = array.array("Q", array.array("I", words)).tobytes()
    return _LEGACY.pack(
        seed, left, seeded, position, wide, 0.0, large if has_large else 0.0, 0.0, has_large,
        small if has_small else 0.0, has_small,
    )  # fmt: skip


def asked(generator: torch.Generator) -> bytes:
    """Return what `Generator.get_state` gives."""
    state = generator.get_state()
    return bytes(bytes_at(state.numel()).from_address(state.data_ptr()).raw)


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


@functools.cache
def bytes_at(count: int) -> Any:
    """Return a type of `count` bytes at an address; in a cold cache it costs a fifth of ctypes.string_at."""
    return ctypes.c_char * count


def _find_python() -> int:
    """Return where a Random object keeps (position, words); 0 where this interpreter keeps it elsewhere."""
    offset = object.__basicsize__
    for probe in (random.Random(1), random.Random(2)):
        probe.random()
        words = probe.getstate()[1]
        if random.Random.__basicsize__ < offset + STATE_BYTES:
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
def _torch_offset() -> int:
    """Return where a CPU generator keeps its engine, seen from `_cdata`; 0 where it is not found for certain."""
    probe = torch.Generator()
    if _ENGINE.size != 2544 or probe.get_state().numel() != _LEGACY.size:
        return 0
    probe.manual_seed(0x1234567887654321)
    words = array.array("I", array.array("Q", _LEGACY.unpack(asked(probe))[4])).tobytes()[:8]
    places = range(_BEFORE_WORDS + 4, SCANNED, 4)
    offset = next((p for p in places if ctypes.string_at(_address(probe) + p, 8) == words), 0) - _BEFORE_WORDS
    if offset <= 0:
        return 0
    for value in (1, 2, 3):
        probe.manual_seed(value)
        for draw in (None, torch.float64, torch.float32, None):
            if draw is not None:
                torch.randn(1, dtype=draw, generator=probe)
            else:
                torch.rand(700, generator=probe)
            if torch_state(view(_address(probe) + offset, _ENGINE.size)) != asked(probe):
                return 0
    return offset


_PYTHON_OFFSET = _find_python()
