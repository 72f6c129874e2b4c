from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmpi import restore
from jitmpi.errors import ConfigError, DamagedError
from jitmpi.events import Manifest, TensorInfo


def load(path: str, state: Any) -> list[bytes]:
    with restore.Source(path) as source:
        source.scalars()
        source.contexts()
        return [source.tensor_bytes(tensor).tobytes() for tensor in state.tensors]


def test_what_was_saved_comes_back(job: Any, state: Any) -> None:
    """Every tensor bit for bit, every context, the scalars, also after the folder was moved."""
    manifest = job.checkpoint(5, 0, state)
    moved = str(Path(job.directory).parent / "elsewhere")
    os.rename(manifest.directory, moved)
    assert load(moved, state) == state.data
    with restore.Source(moved) as source:
        assert source.manifest == replace(manifest, directory=moved)
        assert source.scalars() == b'{"lr": 0.1}'
        contexts = source.contexts()
        assert (contexts[0].exact, contexts[2].exact, contexts[1].minibatch) == (True, False, 5)
        assert contexts[1].pieces == {"random/torch": bytes([1]) * 50, "position": b"{}", "user": b""}
        buffer = source.tensor_bytes(manifest.tensors[0])
        buffer[0] = 1  # the caller may write to it
    assert restore.verify(moved) == []


def test_verify_reads_every_byte_of_the_state(job: Any, state: Any) -> None:
    """Progress adds up to the size of the state."""
    manifest = job.checkpoint(5, 0, state)
    read: list[int] = []
    assert restore.verify(manifest.directory, read.append) == []
    assert sum(read) == sum(tensor.nbytes for tensor in state.tensors)


def _missing(folder: Path) -> None:
    (folder / "rank2.h5").unlink()


def _truncated(folder: Path) -> None:
    os.truncate(folder / "rank2.h5", 700)


def _empty(folder: Path) -> None:
    os.truncate(folder / "rank2.h5", 0)


def _longer(folder: Path) -> None:
    with open(folder / "rank2.h5", "ab") as file:
        file.write(b"x")


def _swapped(folder: Path) -> None:
    shutil.copy(folder / "rank0.h5", folder / "rank2.h5")


def _zeroed(folder: Path) -> None:
    size = (folder / "rank2.h5").stat().st_size
    (folder / "rank2.h5").write_bytes(bytes(size))


def _linked(folder: Path) -> None:
    os.rename(folder / "rank2.h5", folder.parent / "copy.h5")
    (folder / "rank2.h5").symlink_to(folder.parent / "copy.h5")


def _pipe(folder: Path) -> None:
    (folder / "rank2.h5").unlink()
    os.mkfifo(folder / "rank2.h5")


def _index_missing(folder: Path) -> None:
    (folder / "checkpoint.h5").unlink()


def _index_bit(folder: Path) -> None:
    data = bytearray((folder / "checkpoint.h5").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "checkpoint.h5").write_bytes(data)


def _manifest_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _manifest_cut(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("damage", "file"),
    [(_missing, "rank2.h5"), (_truncated, "rank2.h5"), (_empty, "rank2.h5"), (_longer, "rank2.h5"),
     (_swapped, "rank2.h5"), (_zeroed, "rank2.h5"), (_linked, "rank2.h5"), (_pipe, "rank2.h5"),
     (_index_missing, "checkpoint.h5"), (_index_bit, "checkpoint.h5"),
     (_manifest_missing, "manifest.json"), (_manifest_cut, "manifest.json")],
)  # fmt: skip
def test_damage_is_named_and_never_loaded(damage: Callable[[Path], None], file: str, job: Any, state: Any) -> None:
    """Every kind of damage: verify names the file, loading is DamagedError, and nothing hangs."""
    manifest = job.checkpoint(5, 0, state)
    damage(Path(manifest.directory))
    assert {problem.file for problem in restore.verify(manifest.directory)} == {file}
    with pytest.raises(DamagedError):
        load(manifest.directory, state)


def test_a_flipped_bit_is_named_with_its_dataset(job: Any, state: Any) -> None:
    """A bit of a tensor: verify names the file and the dataset."""
    manifest = job.checkpoint(5, 0, state)
    path = Path(manifest.directory) / "rank0.h5"
    data = bytearray(path.read_bytes())
    at = data.index(state.data[0][:64])
    data[at + 20] ^= 64
    path.write_bytes(data)
    assert restore.verify(manifest.directory) == [
        restore.Problem("rank0.h5", "model/embed.weight", "differs from its checksum in the manifest")
    ]


def test_any_flipped_bit_is_reported_or_harmless(job: Any, state: Any) -> None:
    """Random bits anywhere in any file: verify reports them, or what is loaded is right all the same."""
    manifest = job.checkpoint(5, 0, state)
    source, folder = random.Random(3), Path(manifest.directory)
    for turn in range(250):
        path = folder / source.choice(sorted(os.listdir(folder)))
        whole = path.read_bytes()
        position, bit = source.randrange(len(whole)), source.randrange(8)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        if not restore.verify(manifest.directory):
            assert load(manifest.directory, state) == state.data, (turn, path.name, position, bit)
        path.write_bytes(whole)
    assert restore.verify(manifest.directory) == []


def test_candidates_are_newest_first_and_damaged_ones_left_out(job: Any, state: Any) -> None:
    """The newest whole checkpoint comes first; a damaged one is skipped, the one before it used."""
    for attempt in range(3):
        job.checkpoint(5 + attempt, attempt, state, keep=9)
    assert [path.rpartition("/")[2] for path in restore.candidates(job.directory)] == ["m7-r2", "m6-r1", "m5-r0"]
    _missing(Path(job.directory, "m7-r2"))
    assert [path.rpartition("/")[2] for path in restore.candidates(job.directory)] == ["m6-r1", "m5-r0"]


def test_candidates_order_attempts_before_minibatches(job: Any, state: Any) -> None:
    """A later attempt is newer, also when it had to begin further back."""
    job.checkpoint(90, 1, state)
    job.checkpoint(12, 2, state)
    assert restore.candidates(job.directory)[0].endswith("m12-r2")


def test_without_a_checkpoint_the_start_is_fresh(job: Any) -> None:
    """No checkpoint is no error."""
    assert restore.candidates(job.directory) == []
    assert restore.candidates(job.directory + "/none") == []


def test_checkpoints_that_are_all_damaged_are_a_stop(job: Any, state: Any) -> None:
    """A job that has saved never begins from nothing without a word."""
    manifest = job.checkpoint(5, 0, state)
    _manifest_missing(Path(manifest.directory))
    with pytest.raises(DamagedError, match="can be used"):
        restore.candidates(job.directory)


def test_resume_is_the_last_candidate(job: Any, state: Any, tmp_path: Path) -> None:
    """`resume=` begins a job, and its own checkpoints win later; one that cannot be used is said at once."""
    manifest = job.checkpoint(5, 0, state)
    own = str(tmp_path / "jobs" / "8")
    assert restore.candidates(own, manifest.directory) == [manifest.directory]
    assert restore.candidates(job.directory, manifest.directory)[-1] == manifest.directory
    with pytest.raises(ConfigError, match="resume="):
        restore.candidates(own, str(tmp_path / "nothing"))


def change(manifest: Manifest, which: str, **other: Any) -> list[TensorInfo]:
    return [replace(tensor, **other) if tensor.name == which else tensor for tensor in manifest.tensors]


def test_differences(job: Any, state: Any) -> None:
    """Another model or world is told by its first differences; missing optimizer state is none."""
    manifest = job.checkpoint(5, 0, state)
    same = list(manifest.tensors)
    fresh = [tensor for tensor in same if not tensor.name.startswith("optimizer/")]
    assert restore.differences(manifest, same, 3) == []
    assert restore.differences(manifest, fresh, 3) == []
    assert restore.differences(manifest, fresh, 4) == ["world size: saved by 3 ranks, this job has 4"]
    assert restore.differences(manifest, change(manifest, "model/mask", dtype="int8"), 3) == [
        "model/mask: saved as bool[9], here int8[9]"
    ]
    renamed = change(manifest, "model/embed.weight", name="model/tokens.weight")
    assert restore.differences(manifest, renamed[:8], 3) == [
        "model/embed.weight: saved, but not here",
        "model/tokens.weight: here, but not saved",
    ]
    assert restore.differences(manifest, [], 4)[-1] == "and 1 more"
