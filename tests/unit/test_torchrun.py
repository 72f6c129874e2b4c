"""torchrun: the process above the ranks is found by what it does not have, stopped and let go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmpi import torchrun

RANK = "import sys; from jitmpi import torchrun; torchrun.stop(); sys.stdin.read(1); torchrun.go_on()"
AGENT = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
sys.exit(rank.wait())
"""


def tree(tmp_path: Path, marked: dict[int, bool]) -> Path:
    """A /proc in which each process is the child of the one with the next lower number."""
    for pid, mark in marked.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(b"A=1\0TORCHELASTIC_RUN_ID=none\0" if mark else b"A=1\0")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S {pid - 1} 7 7")
    return tmp_path


@pytest.mark.parametrize(
    ("marked", "found"),
    [
        ({10: False, 11: True}, 10),
        ({10: False, 11: True, 12: True, 13: True}, 10),
        ({2: True, 3: True}, 0),
        ({10: True}, 0),
    ],
)
def test_it_is_the_first_process_without_the_mark(tmp_path: Path, marked: dict[int, bool], found: int) -> None:
    """Also through wrappers between the two; a rank whose torchrun is gone has none."""
    assert torchrun.find(max(marked), tree(tmp_path, marked)) == found


def test_it_is_stopped_and_goes_on() -> None:
    """Between the fault and the end of its ranks it does nothing; afterwards it ends with their code."""
    environ = {n: v for n, v in os.environ.items() if n != "TORCHELASTIC_RUN_ID"}
    command = [sys.executable, "-c", AGENT, RANK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as agent:
        assert agent.stdin is not None
        wait(lambda: state(agent.pid) == "T")
        agent.stdin.write(b"x")
        agent.stdin.close()
        assert agent.wait(120) == 0


def state(pid: int) -> str:
    """The letter that ps shows."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait(reached: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)
