from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

import pytest

from jitmpi import preflight
from jitmpi.errors import ConfigError


def test_a_good_directory_gets_the_jobs_folder_and_nothing_else(tmp_path: Path) -> None:
    """The job's folder is made for its owner alone, missing parents too; the probe leaves no trace."""
    target = tmp_path / "new" / "7"
    for _ in range(2):
        preflight.check(str(target), 1_000_000)
        assert stat.S_IMODE(target.stat().st_mode) == 0o700
        assert os.listdir(target) == []


def test_too_little_space_is_said_with_numbers(tmp_path: Path) -> None:
    """The path, the bytes needed and the bytes free are in the message."""
    with pytest.raises(ConfigError, match=rf"{tmp_path}/7: a checkpoint needs {1 << 60} bytes, \d+ are free"):
        preflight.check(str(tmp_path / "7"), 1 << 60)
    assert os.listdir(tmp_path / "7") == []


@pytest.mark.parametrize("kind", ["file", "below a file", "link", "relative"])
def test_what_cannot_be_the_jobs_folder_is_refused(kind: str, tmp_path: Path) -> None:
    """Files, links and relative paths are named in one ConfigError; a link's target is not used."""
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    path = {"file": "file", "below a file": "file/7", "link": "link"}.get(kind)
    with pytest.raises(ConfigError, match="dir="):
        preflight.check(str(tmp_path / path) if path else "jobs/7", 10)
    assert os.listdir(tmp_path / "other") == []


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    """A directory that cannot be written is said before training, root or not."""
    if os.path.ismount("/proc"):
        with pytest.raises(ConfigError, match="cannot be created"):
            preflight.check("/proc/jit-ckpt/7", 10)


def test_space_that_statvfs_promises_and_the_disk_has_not(tmp_path: Path) -> None:
    """A limit that only an allocation meets (quota) is found by really allocating, and given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or libc.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, b"size=2m,mode=700") != 0:
        pytest.skip("a small file system can be mounted only by root")
    try:
        preflight.check(str(disk / "7"), 1_500_000)
        assert os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize > 1_900_000
        with pytest.raises(ConfigError, match="3000000 bytes"):
            preflight.check(str(disk / "7"), 3_000_000)
    finally:
        assert libc.umount2(bytes(disk), 2) == 0


def test_a_folder_that_others_can_write_is_closed_to_them(tmp_path: Path) -> None:
    """Mode 0777 on the job's own folder would let anybody plant or remove checkpoints."""
    folder = tmp_path / "7"
    folder.mkdir()
    folder.chmod(0o777)
    preflight.check(str(folder), 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
