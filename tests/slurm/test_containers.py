"""Ranks in a root file system of their own, in which there is nothing of Slurm."""

from __future__ import annotations

from pathlib import Path

from testbed import Cluster
from tests.slurm.test_templates import small, submit
from tests.slurm.training import decisions


def test_a_node_lost_under_ranks_in_a_container(cluster: Cluster, out: Path) -> None:
    """Relaunch on the spare node needs no Slurm command inside: jit-srun is outside."""
    run = submit(cluster, small("container.sbatch", out), "--pause=0.2", "--wait=25")
    run.wait_minibatch(5)
    host = cluster.job(run.job)["BatchHost"]
    cluster.off(next(node for node in run.journal()[0]["nodes"] if node != host))
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["relaunch", "done"]
    assert run.manifests()[0]["fault"]["unreachable"] == [1]


def test_the_batch_host_lost_under_ranks_in_a_container(cluster: Cluster, out: Path) -> None:
    """jit-srun dies with its node and no rank can call Slurm: the plugin on the rank's node does, as the owner."""
    run = submit(cluster, small("container.sbatch", out), "--pause=0.2", "--wait=25")
    run.wait_minibatch(5)
    host = cluster.job(run.job)["BatchHost"]
    cluster.off(host)
    run.go()
    assert run.end() == "COMPLETED", run.log
    job = cluster.job(run.job)
    assert (job["Restarts"], job["ExcNodeList"]) == ("1", host)
    assert decisions(run) == ["done"]
    assert len(run.manifests()) == 1
    assert run.replayed() <= 1
    assert "launch 0 ended unseen" in run.log


def test_the_queue_from_a_container(cluster: Cluster, out: Path) -> None:
    """relaunch=off: the way through the queue needs none either."""
    run = submit(cluster, small("container.sbatch", out), "--inject=kill:backward:1:5", options=",relaunch=off")
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["requeue", "done"]
