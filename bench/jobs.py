"""Submit the timed job to the cluster, wait for what it does, and make it fail.

Rule 1: jobs run as the test bed's ordinary user: what needs more than an owner's rights would be measured wrongly.
Rule 2: every wait has a deadline, and its error shows the end of the job's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.children import REPO
from bench.moments import Update, read_updates
from bench.rows import BenchError
from slurm_plugin import contract
from testbed import Cluster
from testbed.settings import USER

RANKS: Final = 3
VICTIM: Final = 1  # neither rank 0 nor on the batch host
BEFORE: Final = 15  # minibatches before a failure: past the first ones, whose buckets and hang times differ
FOREVER: Final = 5_000  # minibatches of a job that is cancelled after a few hundred
PATIENCE: Final = 120.0  # seconds for a launch to do its first updates; on an idle machine it takes six
PAUSE: Final = 0.05
ASK: Final = 5.0  # seconds between two questions to Slurm, which cost the machine time
ENDED: Final = ("FAILED", "COMPLETED", "TIMEOUT", "BOOT_FAIL", "OUT_OF_MEMORY")

# The first line says when the batch script runs: seconds since the epoch, one line a start.
SCRIPT: Final = """#!/bin/bash
echo "$EPOCHREALTIME" >> {out}/starts
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=29500
exec {launcher} --nodes={ranks} --ntasks={ranks} --ntasks-per-node=1 python {train} --out {out} --minibatches {count}
"""


@dataclass(frozen=True)
class Job:
    """A submitted job; `out` is what its ranks write, `folder` the checkpoints of this job."""

    cluster: Cluster
    id: str
    out: Path
    folder: Path

    def updates(self, rank: int = 0) -> tuple[Update, ...]:
        """Return the updates that a rank has noted so far."""
        path = self.out / f"updates-{rank}.jsonl"
        return read_updates(path.read_text(encoding="utf-8")) if path.exists() else ()

    def starts(self) -> list[float]:
        """Return when its batch script began, every time."""
        path = self.out / "starts"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def manifests(self) -> list[dict[str, Any]]:
        """Return the manifests of the committed checkpoints."""
        return [json.loads(p.read_text(encoding="utf-8")) for p in self.folder.glob(f"m*-r*/{contract.MANIFEST}")]

    def launch_nodes(self, attempt: int) -> list[str]:
        """Return the node of every rank of a launch."""
        path = self.folder / contract.JOURNAL
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["entry"] == "launch" and entry["attempt"] == attempt:
                return [str(node) for node in entry["nodes"]]
        raise BenchError(f"{path} tells of no launch {attempt}")

    def wait(self, what: str, there: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait until `there()`.

        Raises:
            BenchError: not within `timeout` seconds, or the job ended before.
        """
        deadline, asked = time.monotonic() + timeout, time.monotonic()
        while not there():
            now = time.monotonic()
            state = ""
            if now > min(deadline, asked + ASK):
                state, asked = self.cluster.job(self.id).get("JobState", ""), now
            if now > deadline or state in ENDED:
                raise BenchError(f"job {self.id} ({state}): no {what} in {timeout:g} s; it said\n{self.said()}")
            time.sleep(PAUSE)

    def wait_training(self, attempt: int, minibatches: int = 1) -> None:
        """Wait until a launch has done so many updates on every rank."""

        def there() -> bool:
            done = [sum(u.attempt == attempt for u in self.updates(rank)) for rank in range(RANKS)]
            return min(done) >= minibatches

        self.wait(f"{minibatches} updates of launch {attempt}", there)

    def kill(self, attempt: int) -> float:
        """Kill the victim's process wherever it is and return when."""
        pid = [u.pid for u in self.updates(VICTIM) if u.attempt == attempt][-1]
        when = time.time()
        os.kill(pid, signal.SIGKILL)
        return when

    def power_off(self, attempt: int) -> float:
        """Cut the power of a node other than the batch host and rank 0's, and return when."""
        spared = self.cluster.job(self.id).get("BatchHost")
        node = next(n for n in reversed(self.launch_nodes(attempt)[1:]) if n != spared)
        when = time.time()
        self.cluster.off(node)
        return when

    def said(self) -> str:
        """Return the end of its output."""
        path = self.out / "slurm.out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def cancel(self) -> None:
        """End it and wait until its processes are gone, so that they do not slow down the next measurement."""
        self.cluster.on("head", "scancel", self.id, check=False)
        self.cluster.on("head", "scancel", "--full", "--signal=KILL", self.id, check=False)
        # nodes that are off end nothing: what counts is that no rank of this job computes any more
        pids = {u.pid for rank in range(RANKS) for u in self.updates(rank)}
        self.wait("the end of its ranks", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 45.0)


@contextlib.contextmanager
def cluster_of(nodes: int, *, controller_hook: bool = True) -> Iterator[Cluster]:
    """Bring up a cluster that schedules as an untouched Slurm does: its passes decide when a requeued job runs."""
    stock = ("SchedulerParameters=sched_interval=60,bf_interval=30",)
    cluster = Cluster("bench", nodes, conf=stock, plugin=True, controller_hook=controller_hook)
    if controller_hook and not cluster.settings.controller_hook:
        raise BenchError("this checkout has no controller hook to measure")
    with cluster:
        yield cluster


def submit(cluster: Cluster, name: str, *, nodes: int, options: str | None = "") -> Job:
    """Submit the job on `nodes` nodes; `options` of --jit-ckpt besides dir, None for a plain one with srun."""
    out = cluster.pfs / name
    checkpoints = out / "checkpoints"
    for folder in (out, checkpoints):
        folder.mkdir(mode=0o755)
        shutil.chown(folder, USER, USER)
    plain = options is None
    script = SCRIPT.format(
        out=out, launcher="srun" if plain else "jit-srun", ranks=RANKS, count=FOREVER,
        train=REPO / "bench" / "ranks" / "train.py",
    )  # fmt: skip
    chosen = ",".join(filter(None, [f"dir={checkpoints}", "hang=off", options]))
    args = [f"--nodes={nodes}", f"--output={out}/slurm.out", "--job-name=bench"]
    args += [] if plain else [f"--{contract.OPTION}={chosen}"]
    job = cluster.sbatch(*args, script=script, user=True, cwd=str(out))
    return Job(cluster, job, out, checkpoints / job)
