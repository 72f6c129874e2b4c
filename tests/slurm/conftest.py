"""The cluster that the tests of this folder share: five nodes, with the plugin and the hooks of this checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder runs on a real cluster."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster for the whole session; take `cluster` instead, which cleans up after each test."""
    # The name holds the process id: several test runs on one machine do not meet.
    with Cluster(f"test-{os.getpid()}", nodes=5, plugin=True) as up:
        yield up


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, all of it idle; what the test leaves (jobs, dead nodes, drains) is put right after it."""
    yield shared_cluster
    shared_cluster.heal()
