"""guard: who watches a batch node, what the prolog notes of a job, and what a health check makes of the notes."""

from __future__ import annotations

import os
import pwd
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_plugin import guard, hold, kernel_log
from slurm_plugin.child import Child
from slurm_plugin.guard import Note
from slurm_plugin.spool import Spool, SpoolError

BOOT = "0f0e"
ENVIRON = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_UID": "1001",
    "SLURM_JOB_GID": "1002",
    "SLURM_JOB_RESTART_COUNT": "3",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SPANK_JIT_CKPT": "dir=/pfs/a b;$(x),requeues=3",
}
NOTE = Note("17", "1001", "1002", "3", "n1", "/etc/slurm/slurm.conf", "dir=/pfs/a b;$(x),requeues=3")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """The spool of a node."""
    return Spool(str(tmp_path / "spool"), os.geteuid())


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(0, []), (1, []), (2, [1]), (9, [*range(1, 9)]), (17, [1, 3, 5, 7, 9, 11, 13, 15])],
)
def test_a_few_of_the_other_nodes_watch_and_are_spread(count: int, chosen: list[int]) -> None:
    """A rack that fails takes neighbours along; the batch node itself is none of them."""
    nodes = [f"n{i}" for i in range(count)]
    assert guard.guards(nodes) == tuple(f"n{i}" for i in chosen)
    assert len(set(guard.guards([f"n{i}" for i in range(5000)]))) == guard.GUARDS


def test_the_prolog_notes_what_slurm_tells_it() -> None:
    """On the nodes that watch, under the name of both releases; a newer Slurm's word counts."""
    assert guard.note_of(ENVIRON, "n2") == NOTE
    assert guard.note_of({**ENVIRON, "SLURM_JOB_NODELIST": "n[2-3]"}, "n3") == replace(NOTE, batch="n2")
    for node in ("n1", "n5", ""):
        assert guard.note_of(ENVIRON, node) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SPANK_JIT_CKPT", ""),
        ("SPANK_JIT_CKPT", "keep=2"),
        ("SPANK_JIT_CKPT", "dir=/x\n0"),
        ("SPANK_JIT_CKPT", "dir=/x,evil=1"),
        ("SLURM_NODELIST", "n[1-"),
        ("SLURM_NODELIST", "n[1-9999999]"),
        ("SLURM_NODELIST", ""),
        ("SLURM_JOB_UID", "-1"),
        ("SLURM_JOB_UID", "0\n0"),
        ("SLURM_JOB_GID", ""),
        ("SLURM_JOB_ID", "../17"),
        ("SLURM_JOB_RESTART_COUNT", "٣"),
        ("SLURM_CONF", "/etc/x\n0"),
    ],
)
def test_words_that_are_none_of_slurms_leave_no_note(name: str, text: str) -> None:
    """The job runs all the same."""
    assert guard.note_of({**ENVIRON, name: text}, "n2") is None


def test_a_note_is_read_in_its_boot_only() -> None:
    """After a reboot nothing of the job is left here; the folder says which job it is."""
    text = guard.write(NOTE, BOOT)
    assert guard.read(text, "17", BOOT) == NOTE
    assert guard.read(text, "17", "ffff") is None
    odd = replace(NOTE, conf="", options="dir=/\udcff")
    assert guard.read(guard.write(odd, BOOT), "17", BOOT) == odd


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n" * 6,
        f"{BOOT}\n0\n0\n0\nn1\n/etc/x".encode(),
        f"{BOOT}\n--reuid=0\n0\n0\nn1\n\ndir=/x".encode(),
        f"{BOOT}\n1\n1\n0\n-n1\n\ndir=/x".encode(),
        f"{BOOT}\n1\n1\n0\nn1\nx=1\ndir=/x".encode(),
        f"{BOOT}\n1\n1\n0\nn1\n\ndir=/".encode() + b"x" * guard.LONGEST,
    ],
)
def test_what_is_no_note_is_none(text: bytes) -> None:
    """However it got there."""
    assert guard.read(text, "17", BOOT) is None


def test_orphan_gets_a_jobs_words_as_they_are() -> None:
    """As the owner, one word an argument, with nothing of slurmd's environment."""
    line, environ = guard.command(NOTE)
    owner = ["/usr/bin/setpriv", "--reuid=1001", "--regid=1002", "--clear-groups", "--"]
    assert line[:9] == [*owner, sys.executable, "-I", "-B", "-c"]
    assert line[-6:] == ["17", "3", "n1", "n1", "dir=/pfs/a b;$(x),requeues=3", "idle"]
    assert environ == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_CONF": "/etc/slurm/slurm.conf"}
    assert "SLURM_CONF" not in guard.command(replace(NOTE, conf=""))[1]


def test_a_job_needs_somebody_from_the_first_silence_of_its_batch_node_on() -> None:
    """A node that boots again answers, without the script; another life, and a job that has left, are forgotten."""
    first, second = replace(NOTE, job="1", batch="n1"), replace(NOTE, job="2", batch="n2")
    assert guard.in_need([first, second], {"n1", "n2"}, b"") == ([], b"")
    found, known = guard.in_need([first, second], {"n1"}, b"")
    assert (found, known) == ([second], b"2 3\n")
    assert guard.in_need([first, second], {"n1", "n2"}, known) == ([second], known)
    assert guard.in_need([first], {"n1", "n2"}, known) == ([], b"")
    assert guard.in_need([replace(second, restarts="4")], {"n2"}, known) == ([], b"")
    assert guard.in_need([first, second], {"n1", "n2"}, b"\xff\n1\n\n2 3 4") == ([], b"")


def test_a_note_is_left_for_root_alone_and_an_overlong_one_not_at_all(spool: Spool) -> None:
    """A prolog that runs twice leaves it as it was; the next life's takes the last one's place."""
    for restarts in ("3", "3", "4"):
        guard.leave_note(spool, {**ENVIRON, "SLURM_JOB_RESTART_COUNT": restarts}, "n2")
    note = Path(spool.path, "17", "guard")
    assert note.stat().st_mode & 0o777 == 0o600
    assert guard.read(note.read_bytes(), "17", kernel_log.boot_id()) == replace(NOTE, restarts="4")
    long = {**ENVIRON, "SLURM_JOB_ID": "18", "SPANK_JIT_CKPT": "dir=/" + "x" * guard.LONGEST}
    guard.leave_note(spool, long, "n2")
    assert spool.names() == ["17"]


def looked(spool: Spool, tmp_path: Path, *answering: str) -> list[str]:
    """Look, where some nodes answer; the jobs for which somebody was started."""
    for old in tmp_path.glob("asked-*"):
        old.unlink()
    child = guard.look(spool, lambda note: (tmp_path / f"asked-{note.job}").touch(), lambda node, _: node in answering)
    assert child is not None
    assert child.end(time.monotonic() + 60).code == 0
    return sorted(path.name.removeprefix("asked-") for path in tmp_path.glob("asked-*"))


def test_a_look_starts_what_is_needed(spool: Spool, tmp_path: Path) -> None:
    """Among thousands of folders, and whatever lies in the spool beside the notes; it remembers, and forgets."""
    assert guard.look(spool) is None
    boot = kernel_log.boot_id()
    for number in range(3000):
        spool.write(f"{number}/began", b"x")
    for number, batch, when in ((5, "n1", boot), (6, "n2", boot), (7, "n1", BOOT)):
        spool.write(f"{number}/guard", guard.write(replace(NOTE, batch=batch), when))
    Path(spool.path, "8", "guard").symlink_to("/etc/passwd")
    Path(spool.path, "nonsense").mkdir(mode=0o700)
    Path(spool.path, "9000").write_text("a file")
    assert looked(spool, tmp_path, "n1", "n2") == []
    assert looked(spool, tmp_path, "n2") == ["5"]
    assert looked(spool, tmp_path, "n1", "n2") == ["5"]
    Path(spool.path, "5", "guard").unlink()
    assert looked(spool, tmp_path, "n1") == ["6"]
    assert spool.read("silent") == b"6 3\n"


def test_a_look_without_a_memory_starts_what_is_silent_now(spool: Spool, tmp_path: Path) -> None:
    """As on a full disk; and a crowd is not started all at once."""
    Path(spool.path, "silent").mkdir(mode=0o700)
    for number in range(100):
        spool.write(f"{number}/guard", guard.write(NOTE, kernel_log.boot_id()))
    assert len(looked(spool, tmp_path)) == guard.MOST
    assert looked(spool, tmp_path, "n1") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
def test_orphan_is_started_as_the_owner() -> None:
    """With that one's rights and no others; it runs, and where another one is at it already it just ends."""
    nobody = pwd.getpwnam("nobody")
    line, environ = guard.command(replace(NOTE, uid=str(nobody.pw_uid), gid=str(nobody.pw_gid)))
    probe = (
        "import os; print(os.getresuid(), os.getresgid(), os.getgroups(), 'PATH' in os.environ, len(os.environ) < 4)"
    )
    told = Child.start([*line[:5], sys.executable, "-I", "-c", probe], environ).end(time.monotonic() + 30)
    assert told.text == f"{(nobody.pw_uid,) * 3} {(nobody.pw_gid,) * 3} [] True True\n"
    line, environ = guard.command(replace(NOTE, uid="0", gid="0", job=str(os.getpid())))
    held = hold.take(str(os.getpid()), "guard")
    done = Child.start(line, environ).end(time.monotonic() + 30)
    assert held is not None
    held.release()
    assert (done.code, done.text) == (0, "")


def test_a_spool_that_cannot_be_written_is_said(spool: Spool) -> None:
    """The prolog puts it into its log, and the job starts."""
    Path(spool.path, "17").write_text("a file where the job's folder should be")
    with pytest.raises(SpoolError):
        guard.leave_note(spool, ENVIRON, "n2")
