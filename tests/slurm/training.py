"""Submit the trainee, wait for its end, and read what it left."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed import Cluster

HERE = Path(__file__).parent
QUICK = "hang=4,hang-floor=6,settle=4,save=60"  # deadlines short enough for a test
BATCH = "#!/bin/bash\nexec jit-srun {srun} {shape} {program}\n"
PATIENCE = 400.0  # seconds for a job that fails once and goes on; the machine may be busy


@dataclass
class Training:
    """One submitted job.

    Attributes:
        out: what the trainee writes; `checkpoints` is the job's own directory below the option's.
    """

    cluster: Cluster
    job: str
    out: Path
    directory: Path
    ranks: int
    states: list[str] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.directory / self.job

    @property
    def log(self) -> str:
        path = self.out / "slurm.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def losses(self) -> dict[tuple[int, int], set[str]]:
        """Return (rank, minibatch) -> the different values its loss ever had."""
        found: dict[tuple[int, int], set[str]] = {}
        for rank in range(self.ranks):
            for row in self.rows(rank):
                found.setdefault((rank, row["minibatch"]), set()).add(row["loss"])
        return found

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """Return the lines of a rank's loss log; a line torn by a kill is left out."""
        path = self.out / f"loss-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def replayed(self) -> int:
        """Return how many minibatches a rank ran more than once, at most over the ranks."""
        counts = []
        for rank in range(self.ranks):
            minibatches = [row["minibatch"] for row in self.rows(rank)]
            counts.append(len(minibatches) - len(set(minibatches)))
        return max(counts)

    def finals(self) -> list[dict[str, Any]]:
        return [json.loads((self.out / f"final-{rank}.json").read_text()) for rank in range(self.ranks)]

    def journal(self) -> list[dict[str, Any]]:
        path = self.checkpoints / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def manifests(self) -> list[dict[str, Any]]:
        """Return the manifests of the committed checkpoints, oldest first."""
        paths = sorted(self.checkpoints.glob("m*/manifest.json"), key=lambda p: p.stat().st_mtime)
        return [json.loads(path.read_text()) for path in paths]

    def wait_minibatch(self, minibatch: int, timeout: float = 240.0) -> None:
        """Wait until rank 0 or 1 has logged a minibatch."""
        self.wait(lambda: any(r["minibatch"] >= minibatch for k in (0, 1) for r in self.rows(k)), timeout)

    def go(self) -> None:
        """Let go of a trainee that waits (--wait): what was to happen before has happened."""
        (self.out / "go").touch()

    def wait(self, reached: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            assert time.monotonic() < deadline, f"not reached in {timeout} s; the job said:\n{self.log}"
            time.sleep(0.05)

    def end(self, timeout: float = PATIENCE) -> str:
        """Wait for the job's end and return its last state; a requeued job is not at its end."""
        deadline = time.monotonic() + timeout
        while True:
            state = self.cluster.job(self.job)["JobState"]
            if not self.states or self.states[-1] != state:
                self.states.append(state)
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") and not self.pending():
                return state
            assert time.monotonic() < deadline, f"the job did not end: {self.states}\n{self.log}"
            time.sleep(0.2)

    def pending(self) -> bool:
        return bool(self.cluster.on("head", "squeue", "-h", "-j", self.job, check=False).stdout.strip())


def submit(
    cluster: Cluster,
    out: Path,
    *inject: str,
    ranks: int = 3,
    nodes: int = 4,
    options: str = "",
    sbatch: tuple[str, ...] = (),
    trainee: tuple[str, ...] = (),
    srun: tuple[str, ...] = (),
    shape: str = "",
    user: bool = False,
    batch: str = BATCH,
) -> Training:
    """Submit the trainee on `ranks` nodes of an allocation of `nodes`.

    Args:
        shape: places several ranks on a node.
        user: as the unprivileged user, not as root.
        batch: the batch script, with {srun}, {shape} and {program} in it.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    out.chmod(0o777 if user else 0o755)
    directory = out / "checkpoints"
    chosen = ",".join(filter(None, [f"dir={directory}", QUICK, options]))
    shape = shape or f"--nodes={ranks} --ntasks-per-node=1"
    script = batch.format(srun=" ".join(srun), shape=shape, program=program(out, *inject, *trainee))
    output = out / "slurm.out"
    job = cluster.sbatch(
        f"--jit-ckpt={chosen}",
        f"--nodes={nodes}",
        f"--output={output}",
        "--job-name=fault",
        *sbatch,
        script=script,
        user=user,
    )
    return Training(cluster, job, out, directory, ranks)


def program(out: Path, *words: str) -> str:
    """Return the command that trains into `out`; words that are no options are failures to come."""
    more = [word if word.startswith("-") else f"--inject={word}" for word in words]
    return " ".join(["python", str(HERE / "trainee.py"), f"--out={out}", *more])


def decisions(run: Training) -> list[str]:
    """What jit-srun decided, in order."""
    return [entry["action"] for entry in run.journal() if entry["entry"] == "decision"]


def assert_equal(run: Training, reference: Training) -> None:
    """The run ended as the undisturbed one, bit for bit: parameters, all losses, random streams, the user's state."""
    assert run.finals() == reference.finals(), run.log
    assert run.losses() == reference.losses(), run.log
    assert all(len(values) == 1 for values in run.losses().values())
