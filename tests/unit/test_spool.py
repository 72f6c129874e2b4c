"""Root's folder on a node: what is in it is ours, or it does not count."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_plugin.spool import LONGEST, Spool, SpoolError
from tests.unit.full_disk import full

ME = os.geteuid()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A new one."""
    return Spool(str(tmp_path / "spool"), ME)


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """And so is everything in it, from the first moment on."""
    old = os.umask(0)
    try:
        Spool(str(tmp_path / "spool"), ME).write("17/began", b"x")
    finally:
        os.umask(old)
    for path in (tmp_path / "spool", tmp_path / "spool" / "17", tmp_path / "spool" / "17" / "began"):
        assert path.stat().st_mode & 0o077 == 0


def test_two_hooks_may_make_it_at_once(tmp_path: Path) -> None:
    """The first jobs after a boot of a diskless node: none of them goes without it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed: list[SpoolError] = []
    try:
        for number in range(300):
            both = threading.Barrier(4)

            def make(path: str = str(tmp_path / str(number)), both: threading.Barrier = both) -> None:
                both.wait(20)
                try:
                    Spool(path, ME).close()
                except SpoolError as error:
                    failed.append(error)

            threads = [threading.Thread(target=make) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
    finally:
        sys.setswitchinterval(usual)
    assert failed == []


def test_what_is_written_is_read(spool: Spool) -> None:
    """A file is replaced as a whole; one that is not there is empty; nothing else stays behind."""
    assert spool.read("links") == spool.read("17/tasks") == b""
    for text in (b"one", b"", b"three"):
        spool.write("17/began", text)
        assert spool.read("17/began") == text
    assert [p.name for p in Path(spool.path, "17").iterdir()] == ["began"]


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_spool_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    """Somebody else may have put things there."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(mode)
    with pytest.raises(SpoolError, match="left alone"):
        Spool(str(tmp_path / "spool"), ME)


def test_a_spool_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """The owner must be root, or whoever tests."""
    (tmp_path / "spool").mkdir(mode=0o700)
    with pytest.raises(SpoolError, match="left alone"):
        Spool(str(tmp_path / "spool"), ME + 1)


def test_no_link_fifo_or_folder_is_taken_for_a_file(spool: Spool, tmp_path: Path) -> None:
    """Nobody steers where root reads and writes, and nobody holds it up."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("secret")
    (tmp_path / "precious" / "file").chmod(0o600)
    here = Path(spool.path)
    (here / "link").symlink_to(tmp_path / "precious" / "file")
    (here / "17").symlink_to(tmp_path / "precious")
    os.mkfifo(here / "fifo", 0o600)
    (here / "folder").mkdir(mode=0o700)
    for name in ("link", "17/file", "fifo", "folder"):
        with pytest.raises(SpoolError):
            spool.read(name)
    with pytest.raises(SpoolError):
        spool.write("17/file", b"overwritten")
    spool.write("link", b"mine")  # takes the link's place
    assert (tmp_path / "precious" / "file").read_text() == "secret"
    (tmp_path / "link").symlink_to(here)
    with pytest.raises(SpoolError):
        Spool(str(tmp_path / "link"), ME)


def test_a_huge_file_is_not_read(spool: Spool) -> None:
    """However it got there."""
    spool.write("tasks", b"x" * (LONGEST + 1))
    with pytest.raises(SpoolError, match="longer"):
        spool.read("tasks")


def test_what_cannot_be_made_or_written_is_said(tmp_path: Path) -> None:
    """A missing parent, a folder in place of the file."""
    with pytest.raises(FileNotFoundError):
        Spool(str(tmp_path / "spool"), ME, make=False)
    with pytest.raises(SpoolError, match="cannot make"):
        Spool(str(tmp_path / "no" / "spool"), ME)
    spool = Spool(str(tmp_path / "spool"), ME)
    (tmp_path / "spool" / "links" / "x").mkdir(parents=True)
    with pytest.raises(SpoolError, match="cannot write"):
        spool.write("links", b"x")
    assert [p.name for p in (tmp_path / "spool").iterdir()] == ["links"]


def test_a_full_disk_leaves_the_old_file(spool: Spool) -> None:
    """It takes the first part of what is written and says nothing: half a file would read as another one."""
    spool.write("kernel-log", b"boot 5\n")
    with full(4), pytest.raises(SpoolError, match="cannot write"):
        spool.write("kernel-log", b"boot 17\n")
    assert spool.read("kernel-log") == b"boot 5\n"
    assert os.listdir(spool.path) == ["kernel-log"]


def test_a_lock_keeps_others_out_for_a_while(spool: Spool) -> None:
    """Two epilogs that count suspicions at once count both; one that hangs hinders nobody for ever."""

    def locked() -> int:
        for _ in range(60):  # on a busy machine the others have it for longer than anybody waits
            with suppress(SpoolError):
                return spool.lock()
        raise AssertionError

    def count() -> None:
        for _ in range(50):
            lock = locked()
            spool.write("count", b"%d" % (int(spool.read("count") or b"0") + 1))
            os.close(lock)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert spool.read("count") == b"150"
    held = spool.lock()
    with pytest.raises(SpoolError, match="cannot lock"):
        spool.lock()
    os.close(held)
