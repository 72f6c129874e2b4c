"""jit-srun on a real cluster, with ranks that only pretend to train (pretend_rank.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed import Cluster
from testbed.plugin import REPO

RANK = Path(__file__).with_name("pretend_rank.py")
SCRIPT = """#!/bin/bash
export PYTHONPATH={repo}
exec /usr/bin/python3 -m slurm_plugin.relaunch {options} --mpi=none /usr/bin/python3 {rank} "$1"
"""


class Play:
    """One job of pretending ranks, and fate's hands on it."""

    def __init__(self, cluster: Cluster, folder: Path, *, nodes: int, options: str, settings: str = "") -> None:
        self.cluster, self.folder = cluster, folder
        script = SCRIPT.format(repo=REPO, rank=RANK, options=options)
        given = ["-N", str(nodes), "--ntasks-per-node=1", f"--jit-ckpt=dir={folder}/state{settings}"]
        (folder / "state").mkdir()
        (folder / "job.sh").write_text(script)
        self.job = cluster.sbatch(*given, "-o", f"{folder}/out", f"{folder}/job.sh", str(folder))

    def rank(self, rank: int, attempt: int, patience: float = 90.0) -> dict[str, Any]:
        """Wait for a rank of an attempt to be up; what it says of itself."""
        path = self.folder / f"rank{rank}-{attempt}"
        wait(path.exists, patience, f"rank {rank} of attempt {attempt}: {self.out()}")
        return dict(json.loads(path.read_text()))

    def ranks(self, attempt: int, size: int, patience: float = 90.0) -> list[str]:
        """Wait for all ranks of an attempt; their nodes."""
        return [self.rank(r, attempt, patience)["node"] for r in range(size)]

    def kill(self, rank: int, attempt: int) -> None:
        """SIGKILL one rank."""
        there = self.rank(rank, attempt)
        self.cluster.on(there["node"], "kill", "-9", str(there["pid"]))

    def fault(self, attempt: int, ranks: list[int], nodes: list[str], **more: Any) -> None:
        """Let the ranks notice what has happened."""
        away = more.pop("unreachable", [])
        kind = more.pop("kind", "death")
        detail = f"rank {ranks[0]} is gone"
        fault = {"kind": kind, "ranks": ranks, "unreachable": away, "minibatch": 10 * attempt + 5, "detail": detail}
        event = {"event": "fault", "fault": fault, "nodes": nodes, "phase": "training", **more}
        (self.folder / f".fault{attempt}").write_text(json.dumps(event))
        (self.folder / f".fault{attempt}").rename(self.folder / f"fault{attempt}.json")

    def finish(self, code: int = 0) -> dict[str, str]:
        """Let the ranks come to a good end, and wait for the job's."""
        (self.folder / ".finish").write_text(str(code))
        (self.folder / ".finish").rename(self.folder / "finish")
        return self.cluster.wait_state(self.job, {"COMPLETED", "FAILED"}, 90)

    def journal(self, entry: str) -> list[dict[str, Any]]:
        """The entries of one kind."""
        lines = (self.folder / "state" / self.job / "journal.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["entry"] == entry]

    def out(self) -> str:
        """What the job has written."""
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""


def wait(there: Callable[[], bool], patience: float, what: str) -> None:
    """Wait until it is so."""
    end = time.monotonic() + patience
    while not there():
        assert time.monotonic() < end, f"waited {patience:g} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def folder(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder on the shared file system."""
    path = cluster.pfs / request.node.name[:40]
    path.mkdir()
    return path


def test_a_killed_rank_is_started_again_on_the_same_nodes(cluster: Cluster, folder: Path) -> None:
    """A process that dies on a healthy node costs one launch on the same nodes, on a fresh port."""
    play = Play(cluster, folder, nodes=3, options="-N 2")
    nodes = play.ranks(0, 2)
    play.kill(1, 0)
    play.fault(0, [1], nodes)
    assert play.ranks(1, 2) == nodes
    assert play.rank(0, 1)["port"] != play.rank(0, 0)["port"]
    assert play.finish()["ExitCode"] == "0:0"
    assert [d["action"] for d in play.journal("decision")] == ["relaunch", "done"]
    assert len(play.journal("launch")[0]["spares"]) == 1


def test_signals_reach_the_ranks_and_a_planned_end_goes_through_the_queue(cluster: Cluster, folder: Path) -> None:
    """USR1 (the warning before the time limit) reaches every rank; they save, and the job comes back by itself."""
    play = Play(cluster, folder, nodes=2, options="")
    play.ranks(0, 2)
    cluster.on("head", "scancel", "-s", "USR1", play.job)
    play.ranks(1, 2, 60)
    assert play.journal("decision")[0]["action"] == "requeue"
    assert cluster.job(play.job)["Restarts"] == "1"
    assert play.finish()["ExitCode"] == "0:0"


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, folder: Path) -> None:
    """scancel means the end, although the ranks save when they are told to end."""
    play = Play(cluster, folder, nodes=2, options="")
    play.ranks(0, 2)
    cluster.on("head", "scancel", play.job)
    state = cluster.wait_state(play.job, "CANCELLED", 30)
    assert state["Restarts"] == "0"
    assert [d["action"] for d in play.journal("decision")] in (["stop"], [])
    assert not (folder / "rank0-1").exists()


def test_an_exit_code_of_the_script_passes(cluster: Cluster, folder: Path) -> None:
    """sys.exit(3) without any failure ends the job with 3, at once."""
    play = Play(cluster, folder, nodes=2, options="")
    play.ranks(0, 2)
    assert play.finish(3)["ExitCode"] == "3:0"
    assert play.journal("decision")[-1]["action"] == "stop"


def test_nothing_saved_and_nothing_to_go_back_to_ends_the_job(cluster: Cluster, folder: Path) -> None:
    """When all replicas are lost the job says so, with the original error, and does not start again."""
    play = Play(cluster, folder, nodes=2, options="")
    nodes = play.ranks(0, 2)
    play.fault(0, [1], nodes, lose=True)
    assert cluster.wait_state(play.job, "FAILED", 30)["ExitCode"] == "84:0"
    assert "all replicas lost" in play.out()
    assert "Traceback: pretended" in play.out()


def test_a_dead_node_is_replaced_by_a_spare_before_slurm_notices(cluster: Cluster, folder: Path) -> None:
    """With a spare node a power failure costs a relaunch in the allocation, while Slurm takes the node for alive."""
    play = Play(cluster, folder, nodes=4, options="-N 3")
    nodes = play.ranks(0, 3)
    off = time.monotonic()
    cluster.off(nodes[2])
    play.fault(0, [2], nodes, unreachable=[2])
    replaced = play.ranks(1, 3)
    if time.monotonic() - off < 10:  # SlurmdTimeout is 15, and this machine may be slower than that
        assert not cluster.nodes()[nodes[2]].startswith("down")
    assert nodes[2] not in replaced
    assert replaced[:2] == nodes[:2]
    cluster.boot(nodes[2])  # or the end of the job would wait for SlurmdTimeout
    assert play.finish()["ExitCode"] == "0:0"


def test_a_dead_node_without_a_spare_goes_through_the_queue(cluster: Cluster, folder: Path) -> None:
    """Without a spare the job is requeued with the dead node excluded, and runs again on the others."""
    play = Play(cluster, folder, nodes=3, options="")
    nodes = play.ranks(0, 3)
    cluster.off(nodes[1])
    play.fault(0, [1], nodes, unreachable=[1])
    again = play.ranks(1, 3, 90)
    assert nodes[1] not in again
    assert cluster.job(play.job)["ExcNodeList"] == nodes[1]
    assert play.finish()["ExitCode"] == "0:0"
