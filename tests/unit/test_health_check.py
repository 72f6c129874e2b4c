"""HealthCheckProgram: the same checks without a job; each message of the kernel's counts once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_plugin.health_check import check
from slurm_plugin.spool import Spool
from tests.unit.hooks import Node

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."
REASON = "jit-ckpt: GPU 0000:c1:00 Xid 79: fallen off the bus"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A healthy node."""
    made = Node(tmp_path)
    yield made
    made.close()


def run(node: Node, **changes: object) -> None:
    """Run it once; Slurm makes nothing of its exit code."""
    assert check(node.occasion("health-check", "", **changes)) == 0


def test_a_healthy_node_asks_nobody(node: Node) -> None:
    """Nothing in the log either."""
    run(node)
    run(node)
    assert (node.asked, node.log) == (0, [])


def test_a_bad_node_is_drained_once(node: Node) -> None:
    """And left alone from then on, although it stays bad."""
    node.program("fans", "echo fan 3 stands still; exit 1")
    run(node)
    run(node)
    assert node.drained() == ["jit-ckpt: fans: fan 3 stands still"]
    assert "left as it is" in node.log[-1]


def test_it_never_puts_a_node_back(node: Node) -> None:
    """Also when the fault is gone: somebody has to look at it first."""
    node.program("fans", "exit 1")
    run(node)
    (node.folder / "checks.d" / "fans").unlink()
    run(node)
    assert [done[0] for done in node.slurm.done] == ["drain"]


def test_what_was_in_the_kernels_log_before_us_does_not_count(node: Node) -> None:
    """The first look in a boot notes where the log stands."""
    node.kernel(XID)
    run(node)
    assert node.drained() == []
    node.kernel("NVRM: Xid (PCI:0000:0b:00): 48, pid=1, DBE")
    run(node)
    assert node.drained() == ["jit-ckpt: GPU 0000:0b:00 Xid 48: uncorrectable memory error"]


def test_a_message_counts_once(node: Node) -> None:
    """Whoever repaired the node and ended the drain is not overruled by what the log still holds."""
    run(node)
    node.kernel(XID)
    run(node)
    assert node.drained() == [REASON]
    node.slurm.known["n1"] = node.slurm.known["n1"].__class__("n1", "IDLE", "", "n1", 6818)
    run(node)
    assert node.drained() == [REASON]


def test_a_message_that_slurm_could_not_be_told_of_is_told_later(node: Node) -> None:
    """slurmctld is restarted now and then."""
    run(node)
    node.kernel(XID)
    node.slurm.refuse = 1
    run(node)
    assert node.drained() == []
    run(node)
    assert node.drained() == [REASON]


def test_a_site_that_only_watches_is_told_once(node: Node) -> None:
    """drain = off: the log has it, and has it once."""
    run(node)
    node.kernel(XID)
    run(node, drain=False)
    run(node, drain=False)
    assert (node.asked, node.log) == (
        0,
        [f"n1 is bad: {REASON.removeprefix('jit-ckpt: ')}", "not drained: drain = off"],
    )


class Unlistable(Spool):
    """One whose names cannot be read."""

    def names(self) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_batch_nodes_that_cannot_be_watched_are_one_line_in_the_log(node: Node) -> None:
    """What was found of the node counts as ever."""
    node.program("fans", "exit 1")
    node.spool = Unlistable(node.spool.path, node.spool.owner)
    run(node)
    assert node.drained() == ["jit-ckpt: fans"]
    assert "are not watched" in node.log[-1]
