"""The node's epilog: what it makes of a job's end, and what it clears."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_plugin.contract import EXIT_NODE_BAD
from slurm_plugin.epilog import clear, end
from slurm_plugin.prolog import refuse
from tests.unit.hooks import Node

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."
REASON = "jit-ckpt: GPU 0000:c1:00 Xid 79: fallen off the bus job 17"
BUS = "0 3 7 1764444444"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A healthy node."""
    made = Node(tmp_path)
    yield made
    made.close()


def run(node: Node, job: str = "17", **changes: object) -> int:
    """End a job."""
    return end(node.occasion("epilog", job, **changes))


def test_a_healthy_node_asks_nobody_and_is_cleared(node: Node) -> None:
    """Killed and failed tasks are no evidence; nothing of the job stays in the spool."""
    refuse(node.occasion("prolog"))
    node.tasks("0 0 9 1764444444", "0 1 15 1764444444", "0 2 256 1764444444", "0 3 21248 1764444444")
    assert run(node) == 0
    assert (node.asked, node.log, node.jobs()) == (0, [], [])


def test_a_fatal_message_during_the_job_drains_the_node(node: Node) -> None:
    """With the job's number; a second job there finds nothing new."""
    refuse(node.occasion("prolog"))
    refuse(node.occasion("prolog", "18"))
    node.kernel(XID)
    assert run(node) == 0
    assert node.drained() == [REASON]
    node.slurm.known["n1"] = replace(node.slurm.known["n1"], state="IDLE", reason="")
    assert run(node, "18") == 0
    assert node.drained() == [REASON]


def test_what_came_before_the_job_is_not_its_evidence(node: Node) -> None:
    """Neither after maintenance, nor when nobody noted where the log stood."""
    node.kernel(XID)
    refuse(node.occasion("prolog"))
    assert run(node) == run(node, "18") == 0
    assert node.drained() == []


def test_an_administrators_drain_is_left_alone(node: Node) -> None:
    """Its reason stays."""
    refuse(node.occasion("prolog"))
    node.slurm.known["n1"] = replace(node.slurm.known["n1"], state="IDLE+DRAIN", reason="ticket 4711")
    node.kernel(XID)
    assert run(node) == 0
    assert (node.drained(), node.slurm.known["n1"].reason) == ([], "ticket 4711")


def test_a_bad_node_that_cannot_be_marked_is_drained_by_slurmd(node: Node) -> None:
    """By the exit code; the message is not counted as judged."""
    refuse(node.occasion("prolog"))
    refuse(node.occasion("prolog", "18"))
    node.kernel(XID)
    node.slurm.refuse = 1
    assert run(node) == EXIT_NODE_BAD
    assert node.jobs() == ["18"]
    assert run(node, "18") == 0
    assert node.drained() == [REASON.replace("17", "18")]


def test_a_user_who_kills_own_tasks_drains_nothing(node: Node) -> None:
    """With any signal and as often as wanted: by default never, and with a threshold of two not alone either."""
    for job in range(100, 150):
        node.tasks(BUS, "0 4 11 1764444444", "0 5 4 1764444444", job=str(job))
        assert run(node, str(job), suspect_threshold=0 if job < 125 else 2) == 0
    assert (node.asked, node.drained()) == (0, [])
    assert node.spool.read("suspicion").count(b"\n") == 1


def test_a_sites_threshold_counts_users(node: Node) -> None:
    """Two of them within the half-life drain a node; after that everything is forgotten."""
    for job, user in (("17", "1000"), ("18", "1001"), ("19", "1002")):
        node.tasks(BUS, job=job)
        assert end(replace(node.occasion("epilog", job, suspect_threshold=2), user=user)) == 0
    assert node.drained() == ["jit-ckpt: suspected 2 times, at last: rank 3 of step 0 died of SIGBUS job 18"]
    assert node.spool.read("suspicion").count(b"\n") == 1


def test_a_suspicion_is_told_in_the_log(node: Node) -> None:
    """So that an administrator can see it coming."""
    node.tasks(BUS)
    run(node)
    assert node.log == ["n1 is suspect: rank 3 of step 0 died of SIGBUS (job 17)"]


def test_a_damaged_count_hinders_nobody(node: Node) -> None:
    """It weighs nothing and is replaced; one that cannot be replaced is told."""
    node.spool.write("suspicion", b"\xff\x00" * 1000)
    node.tasks(BUS)
    assert run(node) == 0
    assert node.spool.read("suspicion").startswith(b"1")
    os.unlink(node.folder / "spool" / "suspicion")
    (node.folder / "spool" / "suspicion" / "x").mkdir(parents=True)
    node.tasks(BUS, job="18")
    assert run(node, "18") == 0
    assert any("suspicions cannot be counted" in line for line in node.log)


def test_planted_files_are_not_read_and_told(node: Node, tmp_path: Path) -> None:
    """A link, a FIFO or a huge file in place of the tasks' file; the job's folder goes all the same."""
    (tmp_path / "precious").write_text(BUS)
    (tmp_path / "precious").chmod(0o600)
    for job in ("17", "18", "19"):
        (node.folder / "spool" / job).mkdir(mode=0o700)
    (node.folder / "spool/17/tasks").symlink_to(tmp_path / "precious")
    os.mkfifo(node.folder / "spool/18/tasks", 0o600)
    node.tasks("0 0 7 1" * 200_000, job="19")
    for job in ("17", "18", "19"):
        assert run(node, job) == 0
    assert len(node.log) == 3
    assert (node.jobs(), node.spool.read("suspicion")) == ([], b"")
    assert (tmp_path / "precious").read_text() == BUS


def test_without_a_spool_the_checks_still_count(node: Node) -> None:
    """A bad node is bad."""
    node.program("fans", "exit 1")
    assert end(replace(node.occasion("epilog"), spool=None)) == 0
    assert node.drained() == ["jit-ckpt: fans job 17"]


def test_a_job_without_a_number_is_no_reason_to_fail(node: Node) -> None:
    """Nothing is read or removed for it."""
    node.tasks(BUS)
    assert run(node, "") == 0
    assert node.jobs() == ["17"]


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool with the folders of two jobs."""
    for job in ("7", "8"):
        (tmp_path / "spool" / job).mkdir(parents=True)
        (tmp_path / "spool" / job / "tasks").write_text("0 0 9 1.0\n")
    (tmp_path / "spool").chmod(0o700)
    return tmp_path / "spool"


def cleared(spool: Path, job: str) -> str:
    """Clear the spool of a job as the spool's owner."""
    return clear({"SLURM_JOB_ID": job}, str(spool), owner=os.geteuid())


def test_it_removes_what_was_kept_for_the_job_and_nothing_else(spool: Path) -> None:
    """The other job's folder stays; a second time there is nothing to do."""
    assert cleared(spool, "7") == ""
    assert sorted(p.name for p in spool.iterdir()) == ["8"]
    assert cleared(spool, "7") == ""


@pytest.mark.parametrize("job", ["", ".", "..", "7/../8", "7 8", "*", "٧"])
def test_what_is_no_number_is_no_folder(spool: Path, job: str) -> None:
    """Nothing but digits names a folder."""
    cleared(spool, job)
    assert sorted(p.name for p in spool.iterdir()) == ["7", "8"]


def test_no_link_is_followed(spool: Path, tmp_path: Path) -> None:
    """A link in place of the folder, inside it, or in place of the spool leads nowhere."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (spool / "9").symlink_to(precious)
    (spool / "7" / "link").symlink_to(precious)
    cleared(spool, "9")
    cleared(spool, "7")
    (tmp_path / "link").symlink_to(spool)
    assert "left alone" in cleared(tmp_path / "link", "8")
    assert (precious / "file").exists()
    assert sorted(p.name for p in spool.iterdir()) == ["8"]


def test_a_spool_that_others_can_write_is_left_alone(spool: Path) -> None:
    """Somebody else may have put things there."""
    spool.chmod(0o777)
    assert "left alone" in cleared(spool, "7")
    assert (spool / "7").exists()
    spool.chmod(0o700)
    assert "left alone" in clear({"SLURM_JOB_ID": "7"}, str(spool), owner=os.geteuid() + 1)
    assert clear({"SLURM_JOB_ID": "7"}, str(spool / "none"), owner=0) == ""
