"""Jobs whose steps are managed on their first node (Slurm 24.05 and later): failures end as in any other job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from testbed import Cluster
from testbed.machine import slurm_version
from tests.slurm.training import decisions, submit

WAITS = ("--pause=0.1", "--wait=30")


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    """Five nodes; `sbatch --stepmgr` is allowed."""
    version = slurm_version()
    if tuple(map(int, version.split(".")[:2])) < (24, 5):
        pytest.skip(f"Slurm {version} has no step manager: it came with 24.05")
    conf = ("SlurmctldParameters=enable_stepmgr", "PrologFlags=Alloc,Contain")
    with Cluster(f"stepmgr-{os.getpid()}", nodes=5, plugin=True, conf=conf) as up:
        yield up


@pytest.fixture
def delegating(five: Cluster) -> Iterator[Cluster]:
    """Those, whole again after each test."""
    yield five
    five.heal()


def test_a_node_lost_under_a_step_manager(delegating: Cluster) -> None:
    """The spare node takes over, in a step that the first node's step manager makes."""
    run = submit(delegating, delegating.pfs / "spare", sbatch=("--stepmgr",), trainee=WAITS)
    run.wait_minibatch(12)
    job = delegating.job(run.job)
    assert job["StepMgrEnabled"] == "Yes"
    delegating.off(next(node for node in run.journal()[0]["nodes"] if node != job["BatchHost"]))
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["relaunch", "done"]
    assert run.replayed() <= 1
    assert all(len(losses) == 1 for losses in run.losses().values()), "what was replayed had other bits"


def test_the_step_manager_lost_with_its_node(delegating: Cluster) -> None:
    """The survivors save, and the job goes through the queue without that node."""
    run = submit(delegating, delegating.pfs / "manager", nodes=3, sbatch=("--stepmgr",), trainee=WAITS)
    run.wait_minibatch(12)
    host = delegating.job(run.job)["BatchHost"]
    delegating.off(host)
    run.go()
    assert run.end() == "COMPLETED", run.log
    job = delegating.job(run.job)
    assert (job["Restarts"], job["ExcNodeList"]) == ("1", host)
    assert len(run.manifests()) == 1
    assert run.replayed() <= 1
    assert all(len(losses) == 1 for losses in run.losses().values()), "what was replayed had other bits"
