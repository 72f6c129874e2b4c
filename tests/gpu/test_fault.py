"""Ranks that share one GPU lose one of them, or the GPU's stream, and go on from what the others wrote.

No Slurm is needed: the ranks are processes of this machine that meet through files, with the environment that Slurm and
the plugin would give them. What is compared is a run that never failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_plugin import contract

pytestmark = pytest.mark.timeout(200)

TRAINEE = Path(__file__).parent.parent / "slurm" / "trainee.py"
REPO = TRAINEE.parent.parent.parent
RANKS = 3
PATIENCE = 90.0  # seconds for a launch: importing torch on a cold machine takes long
DROP = ("SLURM_", "SLURMD_", "SPANK_", "JIT_CKPT", "PMIX_", "PMI_", "OMPI_")


@dataclass(frozen=True)
class Launch:
    """How the ranks of one launch ended: their exit codes, negative for a signal, and what all of them said."""

    codes: list[int]
    log: str


def launch(out: Path, attempt: int, *trainee: str, device: str = "cuda", ranks: int = RANKS) -> Launch:
    """Run the trainee once, to its end."""
    out.mkdir(exist_ok=True)
    line = [sys.executable, str(TRAINEE), f"--out={out}", f"--device={device}", *trainee]
    port = 20000 + (os.getpid() * 7 + attempt) % 20000
    children = []
    with open(out / f"log-{attempt}", "w+", encoding="utf-8") as log:
        try:
            for rank in range(ranks):
                env = environment(out, attempt, rank, ranks, port)
                children.append(subprocess.Popen(line, env=env, cwd=REPO, stdout=log, stderr=log))
            deadline = time.monotonic() + PATIENCE
            codes = [child.wait(max(0.1, deadline - time.monotonic())) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait(30)
        log.seek(0)
        return Launch(codes, log.read())


def environment(out: Path, attempt: int, rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what Slurm, the plugin and jit-srun would give to a rank that is alone on its node."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROP)}
    return {
        **{name: value for name, (value, _) in contract.NCCL.items()},
        **kept,
        contract.ENV_OPTIONS: f"dir={out / 'checkpoints'},hang=off,settle=4,save=60",
        contract.ENV_ATTEMPT: str(attempt),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": str(attempt),
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(ranks),
        "SLURMD_NODENAME": f"n{rank}",
        "SLURM_MPI_TYPE": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": str(REPO),
    }


def result(out: Path, ranks: int = RANKS) -> tuple[list[Any], dict[tuple[int, int], set[str]]]:
    """Return the ranks' final values, and (rank, minibatch) -> the different values its loss ever had."""
    finals = [json.loads((out / f"final-{rank}.json").read_text()) for rank in range(ranks)]
    losses: dict[tuple[int, int], set[str]] = {}
    for rank in range(ranks):
        for line in (out / f"loss-{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            losses.setdefault((rank, row["minibatch"]), set()).add(row["loss"])
    return finals, losses


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never failed."""
    out = tmp_path_factory.mktemp("reference")
    ended = launch(out, 0, "--amp")
    assert ended.codes == [0] * RANKS, ended.log
    return out


FAILURES = {
    "a rank dies in its backward pass": ["kill:backward:1:5"],
    "a rank dies in its update": ["kill:update:2:5"],
    "a peer dies and the GPU of the others hangs in a collective": [
        "kill:backward:1:5",
        "stick:backward:0:5",
        "stick:backward:2:5",
    ],
    "one rank's GPU fails": ["assert:forward:1:5"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("failures", FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_costs_no_bit(failures: list[str], reference: Path, tmp_path: Path) -> None:
    """The survivors save, a new launch goes on, and it ends as if nothing had happened, GradScaler included."""
    first = launch(tmp_path, 0, "--amp", *(f"--inject={failure}" for failure in failures))
    assert first.codes.count(contract.EXIT_COMMITTED) >= RANKS - 1, first.log
    second = launch(tmp_path, 1, "--amp")
    assert second.codes == [0] * RANKS, second.log
    assert result(tmp_path) == result(reference), first.log + second.log


@pytest.mark.gpu
def test_lost_statistics_are_not_called_exact(tmp_path: Path) -> None:
    """BatchNorm statistics on a GPU die with rank 0, whose copy counts under DDP: saved all the same, and said."""
    first = launch(tmp_path, 0, "--inject=kill:between:0:4")
    assert first.codes.count(contract.EXIT_COMMITTED) == RANKS - 1, first.log
    (manifest,) = (tmp_path / "checkpoints" / "1").glob("m*/manifest.json")
    assert json.loads(manifest.read_text())["exact"] is False
    assert "its buffers" in first.log
    second = launch(tmp_path, 1)
    assert second.codes == [0] * RANKS, second.log


def test_the_same_on_a_cpu(tmp_path: Path) -> None:
    """What needs no GPU of these tests runs everywhere: three launches without Slurm, one of them losing a rank."""
    undisturbed, out = tmp_path / "reference", tmp_path / "failing"
    ended = [launch(undisturbed, 0, device="cpu", ranks=2)]
    ended += [
        launch(out, 0, "--inject=kill:backward:1:5", device="cpu", ranks=2),
        launch(out, 1, device="cpu", ranks=2),
    ]
    assert [e.codes for e in ended] == [[0, 0], [contract.EXIT_COMMITTED, -9], [0, 0]], [e.log for e in ended]
    assert result(out, 2) == result(undisturbed, 2)
