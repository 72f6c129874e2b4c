"""Mounted file systems: whether they are there, and whether they answer."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from slurm_plugin.evidence import BAD, Finding
from slurm_plugin.mounts import begin, lock_name, points
from slurm_plugin.spool import Spool

TABLE = """\
22 27 0:21 / /proc rw,nosuid - proc proc rw
27 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
90 27 0:55 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw,flock
91 27 0:56 / /home\\040of\\011all rw - nfs4 server:/home rw
"""


def look(tmp_path: Path, *wanted: str, patience: float = 10.0, spool: Spool | None = None) -> list[Finding]:
    """Look at folders; those that exist count as mounted."""
    table = tmp_path / "mountinfo"
    there = [path for path in wanted if os.path.exists(path)]
    table.write_text("".join(f"1 1 0:1 / {path} rw - x x rw\n" for path in there))
    return begin(wanted, time.monotonic() + patience, spool, str(table))()


def test_mount_points_are_read() -> None:
    """With the characters that the table escapes."""
    assert points(TABLE) == {"/proc", "/", "/scratch", "/home of\tall"}
    assert points("") == points("damaged\n") == frozenset()


def test_one_that_answers_is_fine_and_one_that_is_missing_bad(tmp_path: Path) -> None:
    """A folder is no mount, whatever is in it."""
    assert look(tmp_path, str(tmp_path), "/") == []
    (found,) = look(tmp_path, str(tmp_path), "/no/such/mount")
    assert (found.grade, found.what) == (BAD, "/no/such/mount is not mounted")


@pytest.mark.parametrize("written", ["{}/", "/{}", "//{}//"])
def test_slashes_too_many_make_no_node_bad(tmp_path: Path, written: str) -> None:
    """An administrator's `mounts = /scratch/` would drain every node."""
    table = tmp_path / "mountinfo"
    table.write_text(f"1 1 0:1 / {tmp_path} rw - x x rw\n2 1 0:2 / / rw - x x rw\n")
    assert begin([written.format(tmp_path), "//"], time.monotonic() + 10, None, str(table))() == []


def test_each_file_system_has_its_own_lock() -> None:
    """Or a dead /a/b would be said of a healthy /a-b."""
    paths = ("/a/b", "/a-b", "/a%2Fb", "/a")
    assert len({lock_name(path) for path in paths}) == len(paths)
    assert not any("/" in lock_name(path) for path in paths)


def test_one_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """A look that hangs keeps a lock; later ones wait for that until their deadline, and leave no process behind."""
    spool = Spool(str(tmp_path / "spool"), os.geteuid())
    hanging = spool.open_lock(lock_name(str(tmp_path)))
    fcntl.flock(hanging, fcntl.LOCK_EX)  # as the child does that the kernel holds
    begun = time.monotonic()
    (found,) = look(tmp_path, str(tmp_path), patience=0.2, spool=spool)
    assert (found.grade, found.what) == (BAD, f"{tmp_path} does not answer")
    assert time.monotonic() - begun < 5
    os.close(hanging)
    assert look(tmp_path, str(tmp_path), spool=spool) == []
