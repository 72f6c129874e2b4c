"""agent: the wiring of one rank, with a real control plane and state, in a process of its own: it ends that process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, threading, time
from types import SimpleNamespace

import torch

from jitmpi import commit, control
from jitmpi.agent import Agent
from jitmpi.buffers import BufferShadow
from jitmpi.config import Settings
from jitmpi.events import Context, Member
from jitmpi.settle import Place
from jitmpi.torch_state import TrainingState
from jitmpi.vault import Vault
from slurm_plugin.contract import Options

def noted(rank, minibatch):
    return SimpleNamespace(context=lambda: Context(rank, minibatch, True, {"feed": b"0.0"}))

folder, what = sys.argv[1:]
settings = Settings(Options(dir=folder), "7", 0, 2, "n0", 0, "")
planes = [control.ControlPlane(rank, b"k" * 32) for rank in range(2)]
members = [Member(rank, f"n{rank}", "127.0.0.1", plane.listen("127.0.0.1")) for rank, plane in enumerate(planes)]
until = time.monotonic() + 30
other = threading.Thread(target=planes[1].connect, args=(members, until))
other.start()
planes[0].connect(members, until)
other.join()
model = torch.nn.Linear(2, 1)
vault = Vault(TrainingState(model, torch.optim.SGD(model.parameters())), BufferShadow(model))
staging = commit.staging(settings.job_directory, 0)
agent = Agent(settings, members, planes[0], vault, staging=staging, versions={})
agent.start(set())
agent.began(0)
agent.gate.at(Place("between", 4, noted(0, 4)))
threading.Timer(60, os._exit, (99,)).start()
exec(what)
"""


def run(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Run rank 0 of two, at boundary 4; `what` is its script, `planes[1]` the other rank."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), what], capture_output=True, text=True, timeout=90
    )


def test_a_rank_at_its_end_saves_the_final_state_when_another_dies(tmp_path: Path) -> None:
    """Rank 0 waits for the others behind its loop; one that dies before its own end must not cost the whole run."""
    script = """
agent.gate.at(Place("idle", 4, noted(0, 4)))
threading.Timer(0.5, planes[1].close).start()
agent.finish(None)
os._exit(98)
"""
    ended = run(tmp_path, script)
    assert ended.returncode == 83, ended.stderr
    assert (tmp_path / "7" / "m4-r0" / "manifest.json").exists()


def test_a_rank_that_left_its_loop_ends_when_another_is_gone(tmp_path: Path) -> None:
    """It exits in the middle of its loop, by its own will: nothing is to be saved."""
    ended = run(tmp_path, "threading.Timer(0.5, planes[1].close).start(); agent.finish(50)")
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "7").exists()


def test_a_job_that_was_suspended_does_not_hang(tmp_path: Path) -> None:
    """Each time the process goes on (SIGCONT) the silence is counted anew; without that a hang would be called here."""
    script = """
import signal
from jitmpi import process
process.take_signals(planes[0].wakeup_fd)
agent.progress.floor = agent.progress.factor = 1.0
for _ in range(9):
    agent.progress.passed(time.monotonic())
agent.gate.at(Place("between", 5, noted(0, 5)))
planes[0].wake()
for _ in range(14):
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGCONT)
os._exit(8 if agent._round.active else 7)
"""
    assert run(tmp_path, script).returncode == 7
