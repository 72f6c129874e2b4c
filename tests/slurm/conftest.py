"""The cluster that the tests of this folder share: five nodes, with the plugin and the hooks of this checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.commands import TestbedError
from tests.slurm.training import Training, submit

HERE = Path(__file__).parent
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=20",
    "PartitionName=high Nodes=ALL PriorityTier=10",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when this folder is named: `pytest tests/slurm --slurm-door=pyslurm`."""
    parser.addoption(
        "--slurm-door", choices=("scontrol", "pyslurm"), default="scontrol", help="how test_door asks Slurm"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder runs on a real cluster.

    The first test brings that up, too, and the clean-up of each counts: on a busy machine minutes.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster for the whole session; take `cluster` instead, which cleans up after each test."""
    # The name holds the process id: several test runs on one machine do not meet.
    with Cluster(f"test-{os.getpid()}", nodes=5, plugin=True, conf=PREEMPTION) as up:
        yield up


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, all of it idle; what the test leaves (jobs, dead nodes, drains) is put right after it."""
    try:
        shared_cluster.wait_idle(1)
    except TestbedError:  # the clean-up of the test before failed; that is no reason for this one to fail
        shared_cluster.heal()
    yield shared_cluster
    shared_cluster.heal()


@pytest.fixture(scope="session")
def reference(shared_cluster: Cluster) -> Training:
    """The trainee's run that never failed."""
    run = submit(shared_cluster, shared_cluster.pfs / "reference")
    assert run.end() == "COMPLETED", run.log
    assert not run.manifests(), "nothing failed, so nothing may be saved"
    assert run.replayed() == 0
    return run


@pytest.fixture
def out(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own on the shared file system."""
    return cluster.pfs / request.node.name.replace("[", "-").replace("]", "").replace(":", "-")
