from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from jitmpi import files
from jitmpi.errors import DamagedError

MS_BIND = 4096


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Path]:
    """A folder out of which no hard link leads: mounted over itself, as EXDEV is answered between two mounts."""
    path, libc = tmp_path / "island", ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    if os.geteuid() != 0 or libc.mount(bytes(path), bytes(path), None, MS_BIND, None) != 0:
        pytest.skip("a folder can be mounted only by root")
    yield path
    assert libc.umount2(bytes(path), 2) == 0


def test_the_first_link_wins(tmp_path: Path) -> None:
    """One file gets the name, also when it asks twice (NFS repeats requests); another file does not."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    target = str(tmp_path / "claim")
    assert files.link_exclusively(str(tmp_path / "one"), target)
    assert files.link_exclusively(str(tmp_path / "one"), target)
    assert not files.link_exclusively(str(tmp_path / "two"), target)
    assert Path(target).read_text() == "one"


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST, errno.ETIMEDOUT])
def test_a_link_whose_answer_was_lost_is_a_link(tmp_path: Path, number: int) -> None:
    """Or its files would be removed while the claim on them stands."""

    def link(source: str, target: str, *, follow_symlinks: bool, carried_out: bool = True) -> None:
        if carried_out:
            os.link(source, target, follow_symlinks=follow_symlinks)
        raise OSError(number, os.strerror(number))

    (tmp_path / "one").write_text("one")
    with pytest.raises(OSError, match="No such file" if number == errno.EEXIST else os.strerror(number)):
        files._link(str(tmp_path / "one"), str(tmp_path / "none"), partial(link, carried_out=False))
    assert files._link(str(tmp_path / "one"), str(tmp_path / "target"), link)


def test_links_between_folders_are_not_needed(island: Path) -> None:
    """Where a link cannot leave its folder, the claim is as exclusive, whole, and leaves nothing beside it."""
    target = str(island.parent / "claim")
    for name, won in (("one", True), ("two", False)):
        (island / name).write_text(name)
        assert files.link_exclusively(str(island / name), target) is won
    assert Path(target).read_text() == "one"
    assert set(os.listdir(island.parent)) == {"island", "claim"}


def test_a_durable_write_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """A file written durably is 0600, replaces what was there, and a failed one leaves no trace."""
    path = str(tmp_path / "manifest.json")
    for text in (b"one", b"two"):
        files.write_durably(path, text)
        assert Path(path).read_bytes() == text
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_durably(str(tmp_path / "folder"), b"x")
    assert set(os.listdir(tmp_path)) == {"manifest.json", "folder"}


def test_create_follows_no_link(tmp_path: Path) -> None:
    """A link laid in the way of a new file is an error, not a door."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        files.create(str(tmp_path / "link"))
    assert not (tmp_path / "target").exists()


def test_reading_has_a_limit(tmp_path: Path) -> None:
    """A file larger than can be right is not read into memory."""
    (tmp_path / "big").write_bytes(bytes(100))
    assert files.read(str(tmp_path / "big"), 100) == bytes(100)
    with pytest.raises(DamagedError, match="100 bytes"):
        files.read(str(tmp_path / "big"), 99)


@pytest.mark.parametrize(("number", "word"), [(errno.EDQUOT, "quota"), (errno.EIO, "administrator")])
def test_errors_say_what_to_do(number: int, word: str, tmp_path: Path) -> None:
    """Quota and I/O errors come with the numbers and a way out."""
    text = files.explain(str(tmp_path / "rank0.h5"), OSError(number, os.strerror(number)), 123)
    assert "123 bytes needed" in text
    assert word in text
