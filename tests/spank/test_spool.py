"""The node's spool: one line a task, in places that only its owner can have made."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_plugin.evidence import of_tasks
from slurm_plugin.spool import LONGEST, Spool

Note = Callable[..., str]


def test_lines_and_modes(note: Note, tmp_path: Path) -> None:
    """Folders are made 0700 and the file 0600; lines are appended as step, rank, status and time."""
    spool = tmp_path / "spool"
    assert note(spool, 12, 0, 3, 9, 1700000000) == ""
    assert note(spool, 12, 0xFFFFFFFB, 0, 256, 1700000001) == ""
    assert (spool / "12" / "tasks").read_text() == "0 3 9 1700000000\n4294967291 0 256 1700000001\n"
    assert [oct(p.stat().st_mode & 0o7777) for p in (spool, spool / "12", spool / "12" / "tasks")] == ["0o700"] * 2 + [
        "0o600"
    ]


def test_made_private_whatever_the_umask(note: Note, tmp_path: Path) -> None:
    """A host with umask 0 makes nothing that others can read."""
    before = os.umask(0)
    try:
        assert note(tmp_path / "spool", 1, 0, 0, 0, 1) == ""
    finally:
        os.umask(before)
    assert (tmp_path / "spool" / "1" / "tasks").stat().st_mode & 0o7777 == 0o600


def test_a_job_of_very_many_tasks_keeps_the_first_ones(note: Note, tmp_path: Path) -> None:
    """The epilog reads no file that is longer than a MiB, and would know nothing of the job."""
    spool = tmp_path / "spool"
    assert note(spool, 1, 0, 0, 11, 1) == ""
    tasks = spool / "1" / "tasks"
    with tasks.open("a") as file:
        file.write("0 1 0 1\n" * (LONGEST // 8 - 600))
    for rank in range(1000):
        assert note(spool, 1, 0, rank, 0, 1700000000) == ""
    assert LONGEST - 4096 <= tasks.stat().st_size <= LONGEST
    text = Spool(str(spool), os.geteuid()).read("1/tasks")
    assert [f.what for f in of_tasks(text)] == ["rank 0 of step 0 died of SIGSEGV"]


def test_lines_do_not_mix(note: Note, tmp_path: Path) -> None:
    """Tasks that end at the same moment leave whole lines."""
    spool = tmp_path / "spool"
    threads = [threading.Thread(target=lambda r=r: [note(spool, 1, 0, r, 9, n) for n in range(50)]) for r in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    lines = (spool / "1" / "tasks").read_text().splitlines()
    assert sorted(lines) == sorted(f"0 {r} 9 {n}" for r in range(8) for n in range(50))


def _link_spool(spool: Path, victim: Path) -> None:
    (victim / "d").mkdir(mode=0o700)
    spool.symlink_to(victim / "d")


def _link_parent(spool: Path, victim: Path) -> None:
    spool.parent.rmdir()
    spool.parent.symlink_to(victim)


def _link_job(spool: Path, victim: Path) -> None:
    spool.mkdir(mode=0o700)
    (spool / "7").symlink_to(victim)


def _link_tasks(spool: Path, victim: Path) -> None:
    (spool / "7").mkdir(mode=0o700, parents=True)
    spool.chmod(0o700)
    (spool / "7" / "tasks").symlink_to(victim / "file")


def _link_tasks_to_nothing(spool: Path, victim: Path) -> None:
    (spool / "7").mkdir(mode=0o700, parents=True)
    spool.chmod(0o700)
    (spool / "7" / "tasks").symlink_to(victim / "new")


def _fifo(spool: Path, victim: Path) -> None:
    (spool / "7").mkdir(mode=0o700, parents=True)
    spool.chmod(0o700)
    os.mkfifo(spool / "7" / "tasks", 0o600)


def _open_to_all(spool: Path, victim: Path) -> None:
    spool.mkdir()
    spool.chmod(0o755)


def _foreign(spool: Path, victim: Path) -> None:
    spool.mkdir(mode=0o700)
    (spool / "7").mkdir(mode=0o700)
    os.chown(spool / "7", 65534, 65534)


TRAPS = [_link_spool, _link_parent, _link_job, _link_tasks, _link_tasks_to_nothing, _fifo, _open_to_all]


@pytest.mark.parametrize("trap", [*TRAPS, _foreign])
def test_traps(note: Note, tmp_path: Path, trap: Callable[[Path, Path], None]) -> None:
    """A link, a FIFO, a folder of somebody else or open to others: refused at once, nothing written through it."""
    if trap is _foreign and os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("as it was")
    (victim / "file").chmod(0o600)
    spool = tmp_path / "var" / "spool"
    spool.parent.mkdir()
    trap(spool, victim)
    before = sorted(p.relative_to(tmp_path) for p in victim.rglob("*"))
    assert note(spool, 7, 0, 0, 9, 1).startswith(f"cannot open '{spool}/7/tasks': ")
    assert sorted(p.relative_to(tmp_path) for p in victim.rglob("*")) == before
    assert (victim / "file").read_text() == "as it was"


def test_no_descriptor_is_left(note: Note, tmp_path: Path) -> None:
    """Neither a note nor a refusal leaves a file open in the host process."""
    (tmp_path / "open").mkdir()
    before = sorted(os.listdir("/proc/self/fd"))
    for n in range(20):
        assert note(tmp_path / "spool", n, 0, 0, 0, 1) == ""
        assert note(tmp_path / "open", n, 0, 0, 0, 1) != ""
        assert note(tmp_path / "no" / "such", n, 0, 0, 0, 1) != ""
    assert sorted(os.listdir("/proc/self/fd")) == before
