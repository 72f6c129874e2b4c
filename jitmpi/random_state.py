"""Turn the random states of this process into named bytes and back.

Rule 1: reading disturbs nothing: no draw, no CUDA start, no import of NumPy.
Rule 2: the generators keep their states in plain memory; they are copied from there where a check finds it for certain,
else asked for through the public call. The hot path (`Taps`) asks for nothing that is found in memory.
"""

from __future__ import annotations

import array
import random
import struct
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from jitmpi import codec, memory
from jitmpi.errors import MismatchError

GAUSS = struct.Struct("<?d")  # behind Python's words: whether it holds a normal number back, and which
MTRAND = "numpy.random.mtrand"  # is there once NumPy's generators are in use
CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
MEMORY = "memory/"  # pieces as they lie in memory; `settled` makes those of `capture` of them
SMALL = 32  # items of a container that may hold transforms or data sets; more are data
LOOKED = 64  # objects looked into in search of generators, the nearest first; a worker does so for each batch
CLOSED = frozenset([type, ModuleType, FunctionType, MethodType, torch.Tensor, torch.nn.Parameter])  # hold none, or all
TORCH_ENGINE, PYTHON_WORDS, NUMPY_WORDS = "memory/torch", "memory/python", "memory/numpy"
PYTHON_GAUSS, NUMPY_GAUSS = "memory/python-gauss", "memory/numpy-gauss"


def capture() -> dict[str, bytes]:
    """Copy the states of Python, NumPy (once loaded), torch and every CUDA device (once started)."""
    pieces = {"random/python": _python_state(), "random/torch": memory.asked(torch.default_generator)}
    if MTRAND in sys.modules:
        pieces["random/numpy"] = _numpy_state(sys.modules[MTRAND]._rand)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pieces.update(_cuda_states())
    return pieces


class Taps:
    """The generators as `capture` would find them now, for captures that must not allocate.

    Attributes:
        large: piece -> the words of a generator, in memory.
        small: piece -> what else one keeps in memory, for each capture.
        python: Python's generator where its words are in `large`, for `gauss_next`; else None.
        asks: whether there can be states that are not in memory, see `others`.
    """

    def __init__(self) -> None:
        self.large: dict[str, memoryview] = {}
        self.small: dict[str, memoryview] = {}
        self.python: Any = None
        engine = memory.torch_engine(torch.default_generator)
        if engine is not None:
            self.large[TORCH_ENGINE] = engine
        if _PYTHON is not None:
            self.large[PYTHON_WORDS] = _PYTHON
            self.python = _PYTHON_SOURCE
        self._numpy: Any = None
        self._bits: Any = None
        if MTRAND in sys.modules:
            self._numpy = sys.modules[MTRAND]._rand
            self._bits = self._numpy._bit_generator
            places = memory.numpy(self._numpy)
            if places is not None:
                self.large[NUMPY_WORDS], self.small[NUMPY_GAUSS] = places
        self.asks = CUDA or len(self.large) < (2 if self._numpy is None else 3)

    def stale(self) -> bool:
        """Whether the generators have changed places: NumPy was loaded, or another one put under its functions."""
        return MTRAND in sys.modules if self._numpy is None else self._numpy._bit_generator is not self._bits

    def others(self) -> dict[str, bytes]:
        """Ask for the states that are not in `memory`."""
        pieces: dict[str, bytes] = {}
        if self.python is None:
            pieces["random/python"] = _python_state()
        if TORCH_ENGINE not in self.large:
            pieces["random/torch"] = memory.asked(torch.default_generator)
        if self._numpy is not None and NUMPY_WORDS not in self.large:
            pieces["random/numpy"] = _numpy_state(self._numpy)
        if CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            pieces.update(_cuda_states())
        return pieces


def settled(pieces: dict[str, bytes]) -> dict[str, bytes]:
    """Put what was copied from memory into the form that is kept; the rest is left alone.

    Raises:
        struct.error: it is malformed.
    """
    gauss, numpy_gauss = pieces.pop(PYTHON_GAUSS, b""), pieces.pop(NUMPY_GAUSS, b"")
    engine, words, numpy_words = (pieces.pop(name, b"") for name in (TORCH_ENGINE, PYTHON_WORDS, NUMPY_WORDS))
    if engine:
        pieces.setdefault("random/torch", memory.torch_state(engine))
    if words and gauss:
        pieces.setdefault("random/python", words + gauss)
    if numpy_words and numpy_gauss:
        pieces.setdefault("random/numpy", b"M" + numpy_words + numpy_gauss)
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
            generator.manual_seed(mix(*memory.asked(generator)))
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
    kinds = _kinds()
    for attribute, value in sorted(getattr(owner, "__dict__", {}).items()):
        if _has_state(value, kinds):
            yield f"{name}.{attribute}", value


def held_generators(owner: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield those in its attributes, and in what these hold: transforms, lists of them, wrapped data sets.

    The nearest come first, each once. Large containers are data and are not looked into.
    """
    kinds, seen, looked = _kinds(), {id(owner)}, 0
    waiting = deque([(name, owner)])
    while waiting and looked < LOOKED:
        path, one = waiting.popleft()
        looked += 1
        for step, value in _held(one):
            if id(value) in seen:
                continue
            if _has_state(value, kinds):
                seen.add(id(value))
                yield path + step, value
            elif isinstance(value, (list, tuple, dict)) or (hasattr(value, "__dict__") and type(value) not in CLOSED):
                seen.add(id(value))
                waiting.append((path + step, value))


def _held(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, dict):
        yield from ((f"[{key!r}]", value) for key, value in one.items()) if len(one) <= SMALL else ()
    elif isinstance(one, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(one)) if len(one) <= SMALL else ()
    else:
        yield from ((f".{key}", value) for key, value in sorted(getattr(one, "__dict__", {}).items()))
        if isinstance(one, partial):
            yield from ((".args", one.args), (".keywords", one.keywords))


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    more = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return (torch.Generator, random.Random, *more)


def _has_state(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # which is the system's, without any


def generator_state(generator: Any) -> bytes:
    """Copy the state of one generator of `own_generators`."""
    if isinstance(generator, torch.Generator):
        return memory.asked(generator)
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


def _cuda_states() -> dict[str, bytes]:
    return {f"random/cuda{i}": memory.asked(g) for i, g in enumerate(torch.cuda.default_generators)}


def _python_state() -> bytes:
    source: Any = random._inst
    gauss = source.gauss_next
    tail = GAUSS.pack(gauss is not None, gauss or 0.0)
    if _PYTHON is not None and source is _PYTHON_SOURCE:
        return bytes(_PYTHON) + tail
    words = source.getstate()[1]
    return array.array("I", (words[-1], *words[:-1])).tobytes() + tail


def _set_python(raw: bytes) -> None:
    cached, gauss = GAUSS.unpack(raw[memory.STATE_BYTES :])
    source: Any = random._inst
    if _PYTHON is not None and source is _PYTHON_SOURCE:
        _PYTHON[:] = raw[: memory.STATE_BYTES]
        source.gauss_next = gauss if cached else None
        return
    position, *words = array.array("I", raw[: memory.STATE_BYTES])
    random.setstate((3, (*words, position), gauss if cached else None))


def _numpy_state(source: Any) -> bytes:
    places = memory.numpy(source)
    if places is not None:
        return b"M" + bytes(places[0]) + bytes(places[1])
    return b"T" + codec.dumps(source.get_state(legacy=False))  # as text


def _set_numpy(raw: bytes) -> None:
    import numpy

    source = numpy.random.mtrand._rand
    name = type(source._bit_generator).__name__
    if raw[:1] == b"T":
        state = codec.loads(raw[1:])
        if state["bit_generator"] != name:
            raise MismatchError(f"NumPy's global generator is {name}, the checkpoint has {state['bit_generator']}")
        numpy.random.set_state(state)
        return
    places = memory.numpy(source)
    if places is not None:
        places[0][:] = raw[1 : 1 + memory.STATE_BYTES]
        places[1][:] = raw[1 + memory.STATE_BYTES :]
        return
    words = numpy.frombuffer(raw, numpy.uint32, memory.WORDS, offset=1)
    (position,) = struct.unpack_from("<i", raw, 1 + 4 * memory.WORDS)
    cached, gauss = struct.unpack_from("<i4xd", raw, 1 + memory.STATE_BYTES)
    numpy.random.set_state(("MT19937", words, position, cached, gauss))


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


_PYTHON_SOURCE: Any = random._inst  # kept, so that its memory stays
_PYTHON = memory.python(_PYTHON_SOURCE)
