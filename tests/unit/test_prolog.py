"""Prolog: a bad node is refused before the job starts, and nothing else ever is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_plugin.contract import EXIT_NODE_BAD
from slurm_plugin.occasion import Occasion
from slurm_plugin.prolog import refuse
from tests.unit.hooks import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A healthy node."""
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_healthy_node_takes_the_job_and_asks_nobody(node: Node) -> None:
    """No question to Slurm, no line in the log; where the kernel's log stands is noted for the epilog."""
    node.kernel("eth0: link becomes ready")
    assert refuse(node.occasion("prolog")) == 0
    assert (node.asked, node.log, node.drained()) == (0, [], [])
    assert node.spool.read("17/began").endswith(b" 1\n")


def test_a_bad_node_is_refused_and_says_why(node: Node) -> None:
    """Slurm drains it by the exit code; the reason goes through the door before, and into the log."""
    node.program("fans", "echo fan 3 stands still; exit 1")
    assert refuse(node.occasion("prolog")) == EXIT_NODE_BAD
    assert node.drained() == ["jit-ckpt: fans: fan 3 stands still job 17"]
    assert node.jobs() == []  # no epilog comes to clear it
    assert "fan 3 stands still" in node.log[0]


def test_it_is_refused_also_when_slurm_cannot_be_told(node: Node) -> None:
    """Then Slurm's own reason has to do."""
    node.program("fans", "exit 1")
    node.slurm.refuse = 9
    assert refuse(node.occasion("prolog")) == EXIT_NODE_BAD
    assert "cannot drain n1" in node.log[-1]


def test_a_site_that_only_watches_refuses_nothing(node: Node) -> None:
    """drain = off: the log tells, the job starts."""
    node.program("fans", "exit 1")
    assert refuse(node.occasion("prolog", drain=False)) == 0
    assert (node.asked, node.log[-1]) == (0, "not refused: drain = off")


def test_checks_that_are_off_are_not_run(node: Node) -> None:
    """All of them, or all but those that the site names; a name that is none is told."""
    node.program("fans", f"touch {node.folder}/ran; exit 1")
    assert refuse(node.occasion("prolog", checks=("off",))) == 0
    assert refuse(node.occasion("prolog", checks=("gpu", "links", "gpus"))) == 0
    assert not (node.folder / "ran").exists()
    assert node.log == ["gpus: there is no check gpus"]
    assert refuse(node.occasion("prolog", checks=("links", "site"))) == EXIT_NODE_BAD


def test_a_suspicion_refuses_nothing(node: Node) -> None:
    """And is not counted before the job has begun."""
    node.program("nvidia-smi", "exec sleep 300", "bin")
    assert refuse(node.occasion("prolog", check_patience=0.2)) == 0
    assert node.log == ["n1 is suspect: nvidia-smi does not answer (before job 17)"]
    assert node.spool.read("suspicion") == b""


def test_what_happened_before_the_job_is_not_held_against_the_node(node: Node) -> None:
    """A GPU that was reset leaves its errors in the kernel's log until the next boot."""
    node.kernel("NVRM: Xid (PCI:0000:c1:00): 95, pid=1, Uncontained")
    assert refuse(node.occasion("prolog")) == 0


WATCHED = {"SPANK_JIT_CKPT": "dir=/pfs", "SLURM_NODELIST": "n[0-2]"}
WATCHED |= {"SLURM_JOB_GID": "100", "SLURM_JOB_RESTART_COUNT": "0"}


def watched(node: Node) -> Occasion:
    """A job with the option, whose script runs on n0."""
    occasion = node.occasion("prolog")
    return replace(occasion, environ={**occasion.environ, **WATCHED})


def test_a_job_with_the_option_has_its_batch_node_watched(node: Node) -> None:
    """No other job has, and none that is refused; nobody is asked for it."""
    assert refuse(node.occasion("prolog")) == 0
    assert node.spool.read("17/guard") == b""
    assert refuse(watched(node)) == 0
    assert b"\nn0\n" in node.spool.read("17/guard")
    assert (node.asked, node.log) == (0, [])
    (node.folder / "spool/17/guard").unlink()
    node.program("fans", "exit 1")
    assert refuse(watched(node)) == EXIT_NODE_BAD
    assert node.spool.read("17/guard") == b""


def test_a_note_that_cannot_be_left_is_one_line_in_the_log(node: Node) -> None:
    """The job runs without being watched, and the node is as good as before."""
    (node.folder / "spool/17/guard").mkdir(parents=True, mode=0o700)
    assert refuse(watched(node)) == 0
    assert (node.asked, node.drained()) == (0, [])
    assert "does not watch the batch node of job 17" in node.log[-1]


def test_a_missing_gpu_is_found(node: Node) -> None:
    """slurm.conf says two; one answers."""
    node.program("nvidia-smi", "echo 'GPU 00000000:17:00.0'", "bin")
    assert refuse(node.occasion("prolog")) == EXIT_NODE_BAD
    assert node.drained() == ["jit-ckpt: 1 of 2 GPUs answer job 17"]


def test_a_file_system_that_is_not_mounted_is_found(node: Node) -> None:
    """The site's list names it."""
    assert refuse(node.occasion("prolog", mounts=("/", "/no/such/mount"))) == EXIT_NODE_BAD
    assert node.drained() == ["jit-ckpt: /no/such/mount is not mounted job 17"]


def test_a_link_that_went_down_is_found(node: Node) -> None:
    """Once it was seen up; a second look finds it still."""
    port = node.folder / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    assert refuse(node.occasion("prolog")) == 0
    (port / "state").write_text("1: DOWN\n")
    for _ in range(2):
        assert refuse(node.occasion("prolog")) == EXIT_NODE_BAD
    assert node.drained() == ["jit-ckpt: link mlx5_0/1 was up and is down job 17"]


def test_only_a_limit_of_the_sites_own_makes_a_full_spool_a_bad_node(node: Node) -> None:
    """By default it is a line in the log: a full disk of ours must not drain a node."""
    assert refuse(node.occasion("prolog", spool_free=1 << 40)) == 0
    assert "less than" in node.log[0]
    assert refuse(node.occasion("prolog", spool_free=1 << 40, given={"spool-free": None})) == EXIT_NODE_BAD


def test_a_spool_that_is_missing_or_broken_drains_nobody(node: Node) -> None:
    """The job starts without what is kept there, and the log says so."""
    assert refuse(replace(node.occasion("prolog"), spool=None)) == 0
    (node.folder / "spool" / "17").write_text("a file where the job's folder should be")
    assert refuse(node.occasion("prolog")) == 0
    assert "17" in node.log[0]
    (node.folder / "spool" / "links").mkdir()
    (node.folder / "sys/class/net/eno1/device").mkdir(parents=True)
    assert refuse(node.occasion("prolog")) == 0
    assert any(line.startswith("links: check links failed") for line in node.log)


def test_a_kernel_log_that_cannot_be_read_drains_nobody(node: Node) -> None:
    """As in many containers."""
    occasion = node.occasion("prolog")
    assert refuse(replace(occasion, given={**occasion.given, "kmsg": "/no/such/kmsg"})) == 0
    assert os.listdir(node.folder / "spool") == ["17"] or node.spool.read("17/began") == b""
