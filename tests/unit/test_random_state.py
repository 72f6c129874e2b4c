"""Random states are read without disturbing them, and put back so that every later draw is the same."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from jitmpi import codec, random_state
from jitmpi.errors import MismatchError


@pytest.fixture(autouse=True)
def _own_states() -> Iterator[None]:
    np.random.random()  # NumPy loads its generators at the first use
    before = random_state.capture()
    random_state.seed(7)
    yield
    random_state.restore(before)


def draws() -> list[object]:
    gauss = random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()
    return [random.random(), random.getrandbits(70), np.random.random(5).tolist(), torch.rand(17).tolist(), gauss]


@pytest.mark.parametrize("position", [0, 1, 3, 623, 624, 1000])
def test_every_later_draw_is_the_same(position: int) -> None:
    """Wherever in its block a generator stands, and with a cached Gaussian or without, it goes on the same."""
    for _ in range(position):
        random.getrandbits(32), np.random.randint(2**32, dtype=np.uint32), torch.randint(9, ())
    for gauss in range(2):
        pieces = random_state.capture()
        wanted = [draws() for _ in range(200)]
        random_state.seed(1234)
        np.random.standard_normal()
        random_state.restore(pieces)
        assert [draws() for _ in range(200)] == wanted
        random_state.restore(pieces)
        random.gauss(0, 1), np.random.standard_normal(1), torch.randn(1), gauss


def test_the_states_are_those_of_the_libraries_own_calls() -> None:
    """What is copied from memory equals what getstate, get_state and get_rng_state say."""
    random.gauss(0, 1), np.random.standard_normal()
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    pieces = random_state.capture()
    random_state.seed(99)
    random_state.restore(pieces)
    assert random.getstate() == states[0]
    assert codec.dumps(np.random.get_state(legacy=False)) == codec.dumps(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_capturing_disturbs_nothing() -> None:
    """A run that captures all the time draws what one draws that never does."""
    pieces = random_state.capture()
    wanted = [draws() for _ in range(5)]
    random_state.restore(pieces)
    for want in wanted:
        random_state.capture()
        assert draws() == want


def test_another_numpy_generator_is_kept_too() -> None:
    """A script that put PCG64 under NumPy's global functions gets its state back."""
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        pieces = random_state.capture()
        wanted = np.random.random(4).tolist()
        random_state.restore(pieces)
        assert np.random.random(4).tolist() == wanted
    finally:
        np.random.set_bit_generator(old)
    with pytest.raises(MismatchError, match="PCG64"):
        random_state.restore(pieces)


def test_a_missing_cuda_device_is_said() -> None:
    """The state of a device that is not here is not dropped in silence."""
    with pytest.raises(MismatchError, match="CUDA device 99"):
        random_state.restore({"random/cuda99": b""})


def test_fork_leaves_two_different_streams() -> None:
    """The returned states are the old ones; the process goes on with others, which follow from the old."""
    start = random_state.capture()
    assert random_state.fork() == start
    after = draws()
    random_state.restore(start)
    assert draws() != after
    random_state.restore(start)
    random_state.fork()
    assert draws() == after


def test_own_generators_are_found_and_repeat() -> None:
    """Generators in an object's attributes can be saved, put back, and seeded."""

    class Owner:
        def __init__(self) -> None:
            self.a = torch.Generator()
            self.b = np.random.default_rng(1)
            self.c = np.random.RandomState(2)
            self.d = random.Random(3)
            self.e = "no generator"

    def draw(owner: Owner) -> list[object]:
        return [torch.rand(2, generator=owner.a).tolist(), owner.b.random(), owner.c.randn(), owner.d.gauss(0, 1)]

    owner = Owner()
    found = dict(random_state.own_generators(owner, "o"))
    assert list(found) == ["o.a", "o.b", "o.c", "o.d"]
    draw(owner)
    states = {name: random_state.generator_state(g) for name, g in found.items()}
    wanted = draw(owner)
    for name, generator in found.items():
        random_state.set_generator_state(generator, states[name])
    assert draw(owner) == wanted
    drawn = []
    for _ in range(2):
        for generator in found.values():
            random_state.seed_generator(generator, 2**63 + 5)
        drawn.append(draw(owner))
    assert drawn[0] == drawn[1] != wanted


def test_mix_gives_distinct_seeds() -> None:
    """Neighbouring passes and batches share no seed, nor its lower half, which is what torch uses on the CPU."""
    seeds = {random_state.mix(seed, index) & 0xFFFFFFFF for seed in range(40) for index in range(40)}
    assert len(seeds) == 1600


def test_numpy_is_not_loaded_for_its_state() -> None:
    """Reading goes through what is loaded already."""
    code = """
import sys
from jitmpi import random_state
loaded = 'numpy.random.mtrand' in sys.modules
assert ('random/numpy' in random_state.capture()) == loaded
assert ('numpy.random.mtrand' in sys.modules) == loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
