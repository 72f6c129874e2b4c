"""A real multi-node Slurm on one machine: every host is a set of namespaces. Try `python3 -m testbed up`."""

from testbed.cluster import Cluster
from testbed.commands import TestbedError

__all__ = ["Cluster", "TestbedError"]
