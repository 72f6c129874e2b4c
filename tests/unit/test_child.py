"""Children: their answers, and their deadlines."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from slurm_plugin.child import Child

SH = "/bin/sh"


def soon(seconds: float = 20.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def test_what_a_program_prints_and_how_it_ends_is_told() -> None:
    """Both of its outputs, in order; it gets no input, and nothing of our environment."""
    os.environ["SECRET_OF_OURS"] = "x"
    answer = Child.start([SH, "-c", "cat; echo out; echo err >&2; echo $SECRET_OF_OURS.; exit 3"]).end(soon())
    assert (answer.code, answer.text) == (3, "out\nerr\n.\n")
    assert Child.start([SH, "-c", "kill -9 $$"]).end(soon()).code == 137


def test_a_program_that_is_not_there_is_an_error() -> None:
    """The caller decides what that means."""
    with pytest.raises(FileNotFoundError):
        Child.start(["/no/such/program"])


def test_what_hangs_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    """At its deadline; and nobody waits for what keeps its output open."""
    pids = tmp_path / "pids"
    child = Child.start([SH, "-c", f"echo begun; sleep 300 & echo $! >{pids}.new; mv {pids}.new {pids}; wait"])
    while not pids.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    answer = child.end(soon(0.2))
    assert (answer.code, answer.text) == (None, "begun\n")
    assert time.monotonic() - begin < 5
    for _ in range(500):  # the grandchild is gone too; it is not ours to wait for
        try:
            state = Path(f"/proc/{pids.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    pytest.fail("the grandchild lives on")


def test_a_daemon_left_behind_holds_nobody_up() -> None:
    """A child that ends counts as done although its own child still has its output."""
    begin = time.monotonic()
    assert Child.start([SH, "-c", "sleep 5 & exit 0"]).end(soon()).code == 0
    assert time.monotonic() - begin < 4


def test_a_forked_function_answers_with_its_errno() -> None:
    """0 when all is well; it holds none of our files but those it is given."""
    reader, writer = os.pipe()

    def missing() -> None:
        os.stat("/no/such/file")

    def wrong() -> None:
        raise ValueError

    assert Child.fork(lambda: None).end(soon()).code == 0
    assert Child.fork(missing).end(soon()).code == errno.ENOENT
    assert Child.fork(wrong).end(soon()).code == 255
    assert Child.fork(lambda: os.fstat(reader), keep=(reader,)).end(soon()).code is not None
    assert Child.fork(lambda: os.close(writer)).end(soon()).code == errno.EBADF
    os.close(reader)
    os.close(writer)


def test_a_forked_function_that_hangs_is_left_behind() -> None:
    """Also one that takes no notice of signals it can catch."""

    def hang() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)

    begin = time.monotonic()
    assert Child.fork(hang).end(soon(0.1)).code is None
    assert time.monotonic() - begin < 5
