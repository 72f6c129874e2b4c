from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmpi import manifests
from jitmpi.errors import DamagedError


def forge(text: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Change a manifest and give it a checksum that fits."""
    body = json.loads(text)
    del body[manifests.CHECKSUM]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(body | {manifests.CHECKSUM: zlib.crc32(canonical)}).encode()


def test_text_comes_back_as_the_manifest(job: Any) -> None:
    """What is written is what is read, times to the last bit."""
    manifest = job.checkpoint(5, 0, times={"fault": 1764435189.1234567, "saved": 1764435190.7654321})
    assert manifests.from_text(manifests.to_text(manifest), "x") == manifest


def test_any_flipped_bit_is_found(job: Any) -> None:
    """The manifest's own checksum covers every byte that means something."""
    manifest = job.checkpoint(5, 0)
    text = manifests.to_text(manifest)
    for position in range(len(text)):
        bad = bytearray(text)
        bad[position] ^= 1 << position % 8
        try:
            assert manifests.from_text(bytes(bad), "x") == manifest, position
        except DamagedError:
            continue


FORGERIES: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: m["files"][0].update(file="../rank0.h5"),
    lambda m: m["files"][0].update(file="/etc/passwd"),
    lambda m: m["files"][0].update(file="rank00.h5"),
    lambda m: m["files"][0].update(rank=2),
    lambda m: m["files"][0].update(rank=99, file="rank99.h5"),
    lambda m: m["files"].append(m["files"][0]),
    lambda m: m["files"].pop(),
    lambda m: m["files"][0].update(nbytes=0),
    lambda m: m["files"][0].update(nbytes=-1),
    lambda m: m["files"][0]["pieces"][0].update(start=1),
    lambda m: m["files"][0]["pieces"][0].update(crc32="0"),
    lambda m: m["tensors"][0].update(nbytes=1 << 61),
    lambda m: m["tensors"][0].update(shape=[-3, -5]),
    lambda m: m["tensors"][0].update(shape=[1.5]),
    lambda m: m["tensors"][0].update(shape="12"),
    lambda m: m["tensors"][0].update(dtype="object"),
    lambda m: m["tensors"][0].update(name="model/../../x"),
    lambda m: m["tensors"][0].update(name="/model/embed.weight"),
    lambda m: m["tensors"].append(m["tensors"][0]),
    lambda m: m.update(world_size=4),
    lambda m: m.update(world_size=True),
    lambda m: m.update(minibatch=-1),
    lambda m: m.update(minibatch="5"),
    lambda m: m.update(format=2),
    lambda m: m.update(surprise=1),
    lambda m: m.pop("nodes"),
    lambda m: m.update(files=None),
    lambda m: m.update(fault=[]),
    lambda m: m["fault"].update(ranks=["x"]),
    lambda m: m.update(times={"fault": "now"}),
]


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_what_does_not_fit_together_is_not_believed(number: int, job: Any) -> None:
    """A manifest with a right checksum and a wrong content is DamagedError, and nothing else."""
    text = manifests.to_text(job.checkpoint(5, 0))
    with pytest.raises(DamagedError, match="here: "):
        manifests.from_text(forge(text, FORGERIES[number]), "here")


@given(st.binary(max_size=200) | st.sampled_from([b"[]", b"1", b"{}", b"[" * 100_000, b'{"manifest_crc32": 1}']))
def test_other_text_is_damage(text: bytes) -> None:
    """Whatever lies under the manifest's name, DamagedError is the only answer."""
    with pytest.raises(DamagedError):
        manifests.from_text(text, "x")
