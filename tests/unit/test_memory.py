"""memory: what lies where a generator keeps its state is what the library says."""

from __future__ import annotations

import random

import numpy as np
import torch

from jitmpi import memory


def test_torchs_engine_is_its_state() -> None:
    """Through reseeding, new blocks of words and cached normals of both widths."""
    generator = torch.Generator()
    engine = memory.torch_engine(generator)
    assert engine is not None, "not found in this build of torch: the hot path pays for it"
    for seed in range(3):
        generator.manual_seed(2**40 + seed)
        for width in (torch.float32, torch.float64, torch.float32):
            for count in (1, 3, 1000):
                torch.randn(count, dtype=width, generator=generator)
                torch.randint(9, (count,), generator=generator)
                assert memory.torch_state(engine) == generator.get_state().numpy().tobytes()


def test_each_generator_has_a_place_of_its_own() -> None:
    """A view shows its own generator and nothing else."""
    first, second = random.Random(1), random.Random(2)
    one, two = memory.python(first), memory.python(second)
    assert one is not None
    assert two is not None
    before = bytes(two)
    first.random()
    assert bytes(two) == before != bytes(one)
    two[:] = one
    assert first.random() == second.random()


def test_numpys_words_and_gauss() -> None:
    """A drawn normal leaves its twin behind; another kind of generator is not taken for the one that is known."""
    source = np.random.RandomState(1)
    places = memory.numpy(source)
    assert places is not None
    assert not any(places[1])
    source.standard_normal()
    assert np.frombuffer(places[1], np.float64)[1] == source.get_state(legacy=False)["gauss"]
    assert np.array_equal(np.frombuffer(places[0], np.uint32)[:-1], source.get_state()[1])
    assert memory.numpy(np.random.RandomState(np.random.PCG64(1))) is None
