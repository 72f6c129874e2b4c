"""leave: what is said and asked for when a rank's world has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitmpi import leave
from jitmpi.config import Settings
from jitmpi.events import Fault, Member
from jitmpi.round import Conclude
from slurm_plugin import notice
from slurm_plugin.contract import EXIT_LOST, Options
from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError
from tests.unit.fake_slurm import FakeSlurm

FAULT = Fault("death", (1,), (1,), 12, "rank 1 on n2 closed its connection", 1.0)
MEMBERS = [Member(0, "n1", "10.0.0.1", 1), Member(1, "n2", "10.0.0.2", 2)]


def settings(launcher: str = "", **options: int) -> Settings:
    return Settings(Options("/x", **options), "7", 0, 2, "n1", 0, launcher)  # type: ignore[arg-type]


def test_jit_srun_is_told_the_outcome(capfd: pytest.CaptureFixture[str]) -> None:
    """One notice with the checkpoint's folder; one line for the user."""
    import threading

    listener = notice.Listener("127.0.0.1")
    heard: list[dict[str, object]] = []

    def listen() -> None:
        import select

        while not heard:
            select.select([listener], [], [], 5)
            heard.extend(listener.receive())

    thread = threading.Thread(target=listen)
    thread.start()
    launcher = listener.launcher("127.0.0.1")
    action = Conclude(True, "/x/7/m12-r0", alone=True, minibatch=12)
    leave.conclude(settings(launcher), action, fault=FAULT, members=MEMBERS)
    thread.join(10)
    listener.close()
    assert heard == [{"event": "committed", "directory": "/x/7/m12-r0", "minibatch": 12}]
    assert "the state is saved: /x/7/m12-r0" in capfd.readouterr().err


def test_without_jit_srun_the_way_on_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Plain srun saves too; the user is told how to go on."""
    leave.conclude(settings(), Conclude(True, "/x/7/m12-r0", alone=True), fault=FAULT, members=MEMBERS)
    assert "resume=/x/7/m12-r0" in capfd.readouterr().err


def test_where_slurm_cannot_be_reached_the_job_is_left_to_the_plugin(capfd: pytest.CaptureFixture[str]) -> None:
    """As in a container: no program of Slurm's, and jit-srun dead with its node."""

    def nothing_there() -> Slurm:
        raise SlurmError("scontrol is not installed")

    leave.take_over(settings("127.0.0.1:1:ab"), ["n2"], nothing_there)
    assert "scontrol is not installed); leaving it to the plugin on this node" in capfd.readouterr().err


@pytest.mark.parametrize(("requeues", "done"), [(1, "requeue"), (0, "scancel")])
def test_the_limit_of_requeues_holds_for_ranks_too(requeues: int, done: str) -> None:
    """A job that keeps losing its batch host does not come back for ever, and does not hold its nodes either."""
    fake = FakeSlurm({"7": JobInfo("7", "RUNNING")}, [])
    leave.take_over(settings("127.0.0.1:1:ab", requeues=requeues), ["n2"], lambda: fake)
    assert fake.done[0] == (done, "7")


def test_the_end_takes_the_children_along(tmp_path: Path) -> None:
    """DataLoader workers would hold the step open for seconds."""
    program = (
        "import multiprocessing, time\n"
        "from jitmpi import leave\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True)\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        f"leave.end({EXIT_LOST})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == EXIT_LOST
    state, deadline = Path(f"/proc/{int(ended.stdout)}/stat"), time.monotonic() + 10
    while _lives(state):  # killed, but on a busy machine not gone at once
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_reads_keeps_no_rank_from_leaving(stream: str) -> None:
    """Its training thread is stuck in a print, as where srun is stopped or its output's disk hangs."""
    program = (
        "import sys, threading\n"
        "from jitmpi import leave\n"
        "from jitmpi.config import Settings\n"
        "from slurm_plugin.contract import Options\n"
        "settings = Settings(Options('/x'), '7', 0, 2, 'n1', 0, '')\n"
        "def agent():\n"
        "    leave.say(settings, 'rank 1 died')\n"
        f"    leave.end({EXIT_LOST})\n"
        "threading.Timer(1.0, agent).start()\n"
        f"while True: sys.{stream}.write('x' * 4095 + chr(10))\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, env=environ) as child:
        try:
            assert child.wait(60) == EXIT_LOST
        finally:
            child.kill()


def _lives(state: Path) -> bool:
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
