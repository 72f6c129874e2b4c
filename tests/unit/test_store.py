from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest

from jitmpi import files, store
from jitmpi.errors import DamagedError, SaveError
from jitmpi.events import Context, Piece, TensorInfo, Written


def write(path: Path, parts: list[tuple[store.Part, bytes]]) -> None:
    image = store.Image()
    places = [(image.reserve(part), data) for part, data in parts]
    metadata, size = image.finish()
    whole = bytearray(size)
    for offset, data in [*metadata, *places]:
        whole[offset : offset + len(data)] = data
    image.close()
    path.write_bytes(whole)


def part(name: str = "model/w", dtype: str = "float32", rows: int = 6, columns: int = 2) -> store.Part:
    width = numpy.dtype(store.STORED[dtype]).itemsize
    return store.Part(TensorInfo(name, (rows, columns), dtype, rows * columns * width), 0, rows)


@pytest.mark.parametrize("dtype", store.STORED)
def test_every_dtype_comes_back_bit_for_bit_and_says_its_name(dtype: str, tmp_path: Path) -> None:
    """Every torch dtype is stored in full width and can be read with plain h5py, `torch_dtype` included."""
    one = part(dtype=dtype)
    data = random.Random(dtype).randbytes(one.tensor.nbytes)
    data = bytes(byte & 1 for byte in data) if dtype == "bool" else data
    write(tmp_path / "rank0.h5", [(one, data)])
    with h5py.File(tmp_path / "rank0.h5", "r") as file:
        dataset = file["model/w"]
        assert dataset.attrs["torch_dtype"] == dtype.encode()
        assert dataset[...].tobytes() == data


def test_a_part_of_a_tensor_says_where_it_begins(tmp_path: Path) -> None:
    """A rank file explains itself: a dataset that is not the whole tensor names its first row."""
    whole = part()
    write(tmp_path / "rank0.h5", [(store.Part(whole.tensor, 2, 5), bytes(24))])
    with h5py.File(tmp_path / "rank0.h5", "r") as file:
        assert file["model/w"].shape == (3, 2)
        assert file["model/w"].attrs["start_row"] == 2


def test_metadata_stay_small() -> None:
    """A dataset costs less than 400 bytes beside its data, so that small models are not blown up."""
    image = store.Image()
    parts = [part(f"optimizer/block.{n // 3}.weight/moment{n % 3}", rows=5000) for n in range(300)]
    for one in parts:
        image.reserve(one)
    metadata, size = image.finish()
    image.close()
    assert size - sum(one.tensor.nbytes for one in parts) == sum(len(data) for _, data in metadata) < 400 * 300


@pytest.mark.parametrize("name", ["model/w/inner", "model/w"])
def test_names_that_collide_are_refused(name: str) -> None:
    """A tensor name that HDF5 cannot hold beside another ends in one clear SaveError."""
    image = store.Image()
    image.reserve(part())
    with pytest.raises(SaveError, match="rename"):
        image.reserve(part(name))
    image.close()


def test_an_unknown_dtype_is_refused() -> None:
    """A dtype that no version of the table knows is named in a SaveError."""
    image = store.Image()
    with pytest.raises(SaveError, match="quint4x2"):
        image.reserve(store.Part(TensorInfo("model/w", (2,), "quint4x2", 1), 0, 2))
    image.close()


def unfit(**changes: Any) -> list[TensorInfo]:
    values = {"name": "model/w", "shape": (2,), "dtype": "int8", "nbytes": 2} | changes
    return [TensorInfo("model/a", (2,), "int8", 2), TensorInfo(**values)]


@pytest.mark.parametrize(
    "tensors",
    [unfit(dtype="uint4"), unfit(name="model/a/b"), unfit(name="model/../w"), unfit(name="model/"), unfit(name="a\0b")],
)
def test_what_could_not_be_stored_is_known_before_training(tensors: list[TensorInfo]) -> None:
    """Not found out at the failure, when nothing can be saved any more."""
    store.check(unfit())
    with pytest.raises(SaveError):
        store.check(tensors)


def test_the_index_shows_whole_tensors_wherever_the_folder_lies(tmp_path: Path) -> None:
    """checkpoint.h5 reads like one file with full tensors, also after the folder has been renamed."""
    tensor, scalar = part().tensor, TensorInfo("optimizer/w/step", (), "float32", 4)
    empty = TensorInfo("model/empty", (0, 3), "bfloat16", 0)
    data, step = random.Random(0).randbytes(48), numpy.float32(7).tobytes()
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "rank0.h5", [(store.Part(tensor, 0, 2), data[:16])])
    write(tmp_path / "a" / "rank3.h5", [(store.Part(tensor, 2, 6), data[16:]), (store.Part(scalar, 0, 1), step)])
    written = [
        Written(3, 1, "rank3.h5", 0, (Piece("model/w", 2, 6, 0), Piece("optimizer/w/step", 0, 1, 0))),
        Written(0, 1, "rank0.h5", 0, (Piece("model/w", 0, 2, 0),)),
    ]
    image = store.index_image([tensor, scalar, empty], written, [], b"text")
    (tmp_path / "a" / "checkpoint.h5").write_bytes(image)
    os.rename(tmp_path / "a", tmp_path / "b")
    with h5py.File(tmp_path / "b" / "checkpoint.h5", "r") as index:
        assert index["model/w"].is_virtual
        assert index["model/w"][...].tobytes() == data
        assert index["optimizer/w/step"][()] == 7
        assert index["model/empty"].shape == (0, 3)
        assert {index[name].attrs["torch_dtype"] for name in ("model/w", "model/empty")} == {b"float32", b"bfloat16"}
        assert bytes(index["scalars"][...]) == b"text"


def test_contexts_come_back_as_they_were() -> None:
    """Replay contexts keep every byte, their minibatch and whether they are exact; empty pieces too."""
    contexts = [
        Context(0, 12, True, {"random/torch": bytes(range(256)), "buffer/bn1.running_mean": b"\0\1", "user": b""}),
        Context(11, 12, False, {}),
    ]
    back, scalars = store.read_index(store.index_image([], [], contexts, b""))
    assert back == {0: contexts[0], 11: contexts[1]}
    assert scalars == b""


def opened(path: Path) -> store.RankFile:
    return store.RankFile(str(path), files.open_regular(str(path)))


def _external_link(file: Any, path: Path) -> None:
    file["model/w"] = h5py.ExternalLink(str(path), "/secret")


def _soft_link(file: Any, path: Path) -> None:
    file["secret"] = numpy.zeros((6, 2), "f4")
    file["model/w"] = h5py.SoftLink("/secret")


def _virtual(file: Any, path: Path) -> None:
    layout = h5py.VirtualLayout((6, 2), "f4")
    layout[...] = h5py.VirtualSource(str(path), "/secret", (6, 2), "f4")
    file.create_virtual_dataset("model/w", layout)


def _external_data(file: Any, path: Path) -> None:
    file.create_dataset("model/w", (6, 2), "f4", external=[(str(path), 0, 48)])


def _chunked(file: Any, path: Path) -> None:
    file.create_dataset("model/w", (6, 2), "f4", chunks=(1, 2), compression="gzip")


@pytest.mark.parametrize("trick", [_external_link, _soft_link, _virtual, _external_data, _chunked])
def test_no_dataset_leads_out_of_its_file(trick: Any, tmp_path: Path) -> None:
    """A rank file that points elsewhere, by any means HDF5 has, is damaged; the other file is not read."""
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["secret"] = numpy.ones((6, 2), "f4")
    with h5py.File(tmp_path / "rank0.h5", "w", libver="v110") as file:
        trick(file, secret)
        if isinstance(file.get("model/w", getlink=True), h5py.HardLink):
            file["model/w"].attrs["torch_dtype"] = numpy.bytes_("float32")
    source = opened(tmp_path / "rank0.h5")
    with pytest.raises(DamagedError, match="model/w"):
        source.locate(part())
    source.close()


@pytest.mark.parametrize("wanted", [part(rows=5), part(dtype="int32"), part("model/other")])
def test_another_shape_dtype_or_name_is_damage(wanted: store.Part, tmp_path: Path) -> None:
    """A dataset that is not what the manifest says is never handed out."""
    write(tmp_path / "rank0.h5", [(part(), bytes(48))])
    source = opened(tmp_path / "rank0.h5")
    with pytest.raises(DamagedError, match="rank0"):
        source.locate(wanted)
    source.close()


@pytest.mark.parametrize("make", ["folder", "pipe", "link", "nothing", "text"])
def test_what_is_no_hdf5_file_is_damage_and_never_a_hang(make: str, tmp_path: Path) -> None:
    """Folders, pipes, links and foreign files in place of a rank file end in DamagedError at once."""
    path = tmp_path / "rank0.h5"
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "link":
        write(tmp_path / "real.h5", [(part(), bytes(48))])
        path.symlink_to(tmp_path / "real.h5")
    elif make == "text":
        path.write_bytes(b"hello" * 100)
    with pytest.raises(DamagedError):
        opened(path)


FUZZ = """
import io, random, sys
sys.path.insert(0, sys.argv[2])
from jitmpi import store
from jitmpi.errors import DamagedError
from jitmpi.events import TensorInfo
import warnings; warnings.simplefilter("ignore")
whole, source = open(sys.argv[1], "rb").read(), random.Random(5)
for turn in range(300):
    bad = bytearray(whole)
    for _ in range(source.choice((1, 1, 3, 40))):
        bad[source.randrange(len(bad))] ^= 1 << source.randrange(8)
    open(sys.argv[1], "wb").write(bad[: source.choice((len(bad), len(bad), source.randrange(len(bad))))])
    try:
        file = store.RankFile("x", open(sys.argv[1], "rb"))
    except DamagedError:
        continue
    for n in range(40):
        try:
            file.locate(store.Part(TensorInfo(f"model/w{n}", (6, 2), "float32", 48), 0, 6))
        except DamagedError:
            pass
    file.close()
print("survived")
"""


def test_hdf5_survives_random_damage(tmp_path: Path) -> None:
    """300 files with flipped bits and cut ends give DamagedError or a place inside the file, never a crash."""
    write(tmp_path / "rank0.h5", [(part(f"model/w{n}"), bytes(48)) for n in range(40)])
    root = Path(store.__file__).parents[1]
    command = [sys.executable, "-c", FUZZ, str(tmp_path / "rank0.h5"), str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "survived\n"), run.stderr


def test_an_index_of_nonsense_is_damage() -> None:
    """Bytes that are no index end in DamagedError."""
    with pytest.raises(DamagedError):
        store.read_index(b"\x89HDF\r\n\x1a\n" + bytes(500))
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["scalars"] = h5py.ExternalLink("/etc/passwd", "/")
    with pytest.raises(DamagedError, match="elsewhere"):
        store.read_index(memory.getvalue())
