"""Many jobs fail at once, as when a file system or a switch goes: none is lost, and slurmctld stays in reach."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.plugin import REPO

JOBS = 100
PATIENCE = 500.0  # seconds for all of them to start, and again to come back; a tenth of it where nothing else runs
RANK = Path(__file__).with_name("crowd_rank.py")
SCRIPT = """#!/bin/bash
export PYTHONPATH={repo}
exec /usr/bin/python3 -m slurm_plugin.relaunch -n1 --mpi=none /usr/bin/python3 {rank} {folder}
"""


@pytest.fixture
def crowded() -> Iterator[Cluster]:
    """A cluster with room for all the jobs at once, and patience for a machine of few cores that starts them all."""
    speed = "SchedulerParameters=sched_interval=3,bf_interval=3,batch_sched_delay=1"
    conf = ["MaxArraySize=1001", "MessageTimeout=100", "MinJobAge=3600", speed]
    with Cluster(f"crowd-{os.getpid()}", nodes=4, cpus_per_node=64, plugin=True, conf=conf) as up:
        yield up


@pytest.mark.timeout(1200)
def test_a_hundred_jobs_fail_at_once(crowded: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Each goes back to the queue and ends well; no node is drained; squeue is answered all the while."""
    folder = crowded.pfs / "crowd"
    (folder / "state").mkdir(parents=True)
    script = SCRIPT.format(repo=REPO, rank=RANK, folder=folder)
    options = f"--jit-ckpt=dir={folder}/state,relaunch=off"
    job = crowded.sbatch(f"--array=1-{JOBS}", "-n1", options, f"--output={folder}/%a.out", script=script)
    _wait(lambda: _up(folder, 0) == JOBS, PATIENCE, lambda: f"{_up(folder, 0)} jobs are up")
    (folder / "strike").touch()
    struck, answers, states = time.monotonic(), list[float](), dict[str, int]()
    while _up(folder, 1) < JOBS or crowded.queue():
        begin = time.monotonic()
        left = crowded.on("head", "squeue", "-h", "-r", "-o", "%T:%r").stdout.split()
        answers.append(time.monotonic() - begin)
        states = {state: left.count(state) for state in left}
        assert time.monotonic() < struck + PATIENCE, f"{_up(folder, 1)} jobs came back; the others: {states}"
        time.sleep(0.2)
    took = time.monotonic() - struck
    shown = crowded.on("head", "scontrol", "show", "job", job).stdout
    assert shown.count("JobState=COMPLETED") == JOBS
    # Once more where Slurm's launch took longer than its MessageTimeout on a busy machine: it then holds the job, and
    # the controller hook lets it go.
    restarts = [int(n) for n in re.findall(r"Restarts=(\d+)", shown)]
    assert len(restarts) == JOBS
    assert min(restarts) >= 1
    assert set(crowded.nodes().values()) == {"idle"}
    worst, usual = max(answers), statistics.median(answers)
    with capsys.disabled():
        again = sum(n > 1 for n in restarts)
        print(
            f"\n{JOBS} jobs failed and had ended {took:.0f} s later, {again} of them started by Slurm more than twice;"
        )
        print(f"squeue took {usual:.2f} s, at worst {worst:.2f} s")
    assert usual < 1.0


def _up(folder: Path, attempt: int) -> int:
    return sum(1 for _ in folder.glob(f"up-*-{attempt}"))


def _wait(there: Callable[[], bool], patience: float, told: Callable[[], str]) -> None:
    end = time.monotonic() + patience
    while not there():
        assert time.monotonic() < end, told()
        time.sleep(0.5)
