"""Tensors come off nested state and go back to where they were, shared ones once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from jitmpi.errors import AttachError
from jitmpi.skeleton import Tensors, plant, strip


def there_and_back(value: Any, like: torch.Tensor | None = None) -> tuple[Any, list[str]]:
    found = Tensors()
    skeleton = json.loads(json.dumps(strip(value, "s", found, like=like)))
    loaded = {name: tensor.clone() for name, tensor in found.items()}
    return plant(skeleton, loaded, like), list(loaded)


def test_nested_state_comes_back() -> None:
    """Lists, tuples and dictionaries keep their shape, whatever their keys; plain parts go through the codec."""
    value = {"a": [torch.ones(2), None], 3: (torch.zeros(()), {"x": (1, 2.5)}), "plain": {1: {2}}}
    back, names = there_and_back(value)
    assert str(back) == str(value)
    assert names == ["s/a/0", "s/3/0"]


def test_a_shared_tensor_is_in_the_list_once() -> None:
    """Two places that hold one tensor hold one tensor again."""
    tensor = torch.ones(3)
    back, names = there_and_back({"a": tensor, "b": [tensor]})
    assert names == ["s/a"]
    assert back["a"] is back["b"][0]


def test_a_tensor_takes_the_strides_of_its_parameter() -> None:
    """State of a channels-last parameter is channels-last again; other state is as it was."""
    param = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    value = {"moment": torch.randn_like(param), "step": torch.tensor(3.0)}
    skeleton = strip(value, "s", found := Tensors(), like=param)
    loaded = {name: tensor.contiguous() for name, tensor in found.items()}
    back = plant(skeleton, loaded, param)
    assert back["moment"].stride() == param.stride()
    assert torch.equal(back["moment"], value["moment"])
    assert back["step"].item() == 3.0


def test_the_path_to_what_cannot_be_saved_is_named() -> None:
    """Name and keys lead to the value."""
    with pytest.raises(AttachError, match=r"^s/b\.f: a builtins\.function"):
        strip({"a": torch.ones(1), "b": {"f": lambda: None}}, "s", Tensors())
