"""Run the example job once on the cluster: submit it, show its output while it runs, cut a node's power on the way.

Rule 1: every wait has a deadline, and a job that stands still is an error with the end of its output.
Rule 2: the files that a run leaves are copied to the build folder before the cluster, and its disk, are gone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from demo.record import DemoError, Record, read_journal, read_losses, read_record
from demo.story import Failure
from slurm_plugin import contract
from testbed import Cluster

RANKS: Final = 4
SPARES: Final = 1
FAILED_RANK: Final = 2  # neither the batch host, nor rank 0, nor the last one
PATIENCE: Final = 120.0  # seconds without a new line of output or loss; a start takes about ten on two cores
PAUSE: Final = 0.2  # seconds between two looks
REPO: Final = Path(__file__).resolve().parent.parent

TEMPLATE: Final = REPO / "sbatch_templates" / "ddp.sbatch"  # RANKS nodes and one to spare
EXAMPLE: Final = REPO / "examples" / "lm"
QUIET: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # or gloo tells at length that the addresses here have no names


@dataclass(frozen=True)
class Job:
    """A submitted job and where it writes; `folder` is its own checkpoint folder."""

    id: str
    log: Path
    out: Path
    folder: Path


def submit(cluster: Cluster, name: str, minibatches: int, sizes: str) -> Job:
    """Submit the example with the template that users copy; `sizes` are further options of train.py."""
    base = cluster.pfs / name
    log, out, checkpoints = base / "output.txt", base / "out", base / "checkpoints"
    for folder in (out, checkpoints):
        folder.mkdir(parents=True)
    options = [f"--{contract.OPTION}=dir={checkpoints}", f"--output={log}", f"--job-name={name}"]
    arguments = [f"--out={out}", f"--minibatches={minibatches}", *sizes.split()]
    job = cluster.sbatch(*options, str(TEMPLATE), *arguments, cwd=str(EXAMPLE), env=QUIET)
    return Job(job, log, out, checkpoints / job)


def follow(cluster: Cluster, job: Job, say: Callable[[str], None], look: Callable[[int], None]) -> None:
    """Show the job's output until it has ended; tell `look` the newest minibatch whenever there is one.

    Raises:
        DemoError: the job failed, or stood still for PATIENCE seconds.
    """
    shown, newest, moved = 0, -1, time.monotonic()
    while True:
        state = cluster.job(job.id).get("JobState", "")
        text = job.log.read_text(errors="replace") if job.log.exists() else ""
        whole = text[shown:].rpartition("\n")[0]
        for line in whole.splitlines():
            say(line)
        minibatch = newest_minibatch(job.out)
        if whole or minibatch != newest:
            moved, newest = time.monotonic(), minibatch
            shown += len(whole) + 1 if whole else 0
            look(minibatch)
        if state == "COMPLETED":
            return
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            raise DemoError(f"job {job.id} ended as {state}; its output ends with:\n{tail(text)}")
        if time.monotonic() - moved > PATIENCE:
            raise DemoError(f"job {job.id} ({state}) stood still for {PATIENCE:.0f} s; its output ends:\n{tail(text)}")
        time.sleep(PAUSE)


@dataclass
class PowerCut:
    """Cuts the power of FAILED_RANK's node once training has reached `minibatch`."""

    cluster: Cluster
    job: Job
    minibatch: int
    say: Callable[[str], None]
    failure: Failure | None = None

    def look(self, newest: int) -> None:
        """Act on the newest minibatch of the job."""
        if self.failure is not None or newest < self.minibatch:
            return
        node = launch_nodes(self.job)[FAILED_RANK]
        if node == self.cluster.job(self.job.id).get("BatchHost"):
            raise DemoError(f"rank {FAILED_RANK} runs on the batch host {node}; the demo is about another node")
        newest, when = newest_minibatch(self.job.out), time.time()
        self.cluster.off(node)
        self.failure = Failure("poweroff", node, FAILED_RANK, when)
        self.say(f"*** the power of {node}, where rank {FAILED_RANK} is, has been cut in minibatch {newest}")


def launch_nodes(job: Job, number: int = -1) -> tuple[str, ...]:
    """Return the node of every rank in one of the job's launches, the last one by default."""
    path = job.folder / contract.JOURNAL
    launches = [e for e in read_journal(path.read_text()) if e.kind == "launch"] if path.exists() else []
    if not launches:
        raise DemoError(f"{path} tells of no launch")
    return tuple(launches[number].data["nodes"])


def newest_minibatch(out: Path) -> int:
    """Return the newest minibatch that any rank has logged, -1 for none."""
    logs = [read_losses(path.read_text()) for path in out.glob("loss-rank*.jsonl")]
    return max((lines[-1].minibatch for lines in logs if lines), default=-1)


def keep(job: Job, target: Path) -> Record:
    """Copy what the run left, without the bulk of the checkpoints, to `target` and read it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in [*job.out.glob("*"), job.log, *job.folder.glob("*.json*"), *job.folder.glob(f"*/{contract.MANIFEST}")]:
        if path.is_file():
            shutil.copy(path, target / path.name)
    return read_record(job.out, job.folder)


def tail(text: str, lines: int = 25) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.splitlines()[-lines:])
