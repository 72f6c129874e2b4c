"""slurmctld and slurmd die under a job: the training goes on, and what needs Slurm is done when it is back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.commands import wait_for
from tests.slurm.training import Training, assert_equal, decisions, submit


def running(cluster: Cluster, out: Path, *inject: str, nodes: int = 4, trainee: tuple[str, ...] = ()) -> Training:
    """A job in the middle of its training, known to the disk of slurmctld; minibatch 8 is its last until `go`."""
    run = submit(cluster, out, *inject, nodes=nodes, options="hang=off", trainee=("--wait=8", *trainee))
    run.wait_minibatch(3)
    cluster.wait_kept(run.job)  # else slurmctld, killed, would start the job anew
    return run


def node_of(run: Training, rank: int) -> str:
    """The node that a rank of the running launch is on."""
    return str([entry for entry in run.journal() if entry["entry"] == "launch"][-1]["nodes"][rank])


def listens(cluster: Cluster, node: str) -> bool:
    """Whether slurmd takes connections there, as jit-srun asks before a relaunch."""
    return cluster.on("head", "bash", "-c", f"exec 3<>/dev/tcp/{node}/6818", check=False).returncode == 0


def test_slurmctld_killed_and_restarted_in_the_middle_of_training(
    cluster: Cluster, reference: Training, out: Path
) -> None:
    """Nobody notices, and a failure afterwards is survived as ever."""
    run = running(cluster, out, "kill:backward:1:38")
    cluster.crash("head")
    cluster.boot("head")
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert set(decisions(run)[:-1]) == {"relaunch"}  # once more if slurmctld has not heard all nodes yet
    assert decisions(run)[-1] == "done"


def test_slurmctld_is_away_when_the_ranks_save_and_jit_srun_decides(
    cluster: Cluster, reference: Training, out: Path
) -> None:
    """The save needs no Slurm; the relaunch waits for it, longer than any of Slurm's commands does."""
    run = running(cluster, out, "kill:backward:1:20")
    cluster.crash("head")
    run.go()
    run.wait(lambda: "saved: minibatch" in run.log, 120)
    time.sleep(25)
    assert decisions(run) == []
    cluster.boot("head")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert set(decisions(run)[:-1]) == {"relaunch"}
    assert "slurmctld does not answer; waiting for it" in run.log


def test_a_requeue_waits_for_slurmctld(cluster: Cluster, reference: Training, out: Path) -> None:
    """A node and slurmctld are lost at once, and there is no spare: requeued when slurmctld is back."""
    run = running(cluster, out, nodes=3)
    cluster.crash("head")
    cluster.off(node_of(run, 1))
    run.go()
    run.wait(lambda: "saved: minibatch" in run.log, 120)
    time.sleep(5)
    cluster.boot("head")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["requeue", "done"]


def test_the_batch_host_and_slurmctld_are_lost_at_once(cluster: Cluster, reference: Training, out: Path) -> None:
    """A survivor asks for the requeue until slurmctld is there to hear it."""
    run = running(cluster, out, nodes=3)
    cluster.crash("head")
    cluster.off(node_of(run, 0))
    run.go()
    run.wait(lambda: bool(run.manifests()), 120)
    time.sleep(5)
    cluster.boot("head")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)


def test_slurmd_restarted_under_a_running_step(cluster: Cluster, reference: Training, out: Path) -> None:
    """The ranks there go on; a rank lost while slurmd is away goes to the spare node."""
    run = running(cluster, out, "kill:backward:2:20")
    first, second = node_of(run, 1), node_of(run, 2)
    cluster.crash(first)
    cluster.boot(first)
    wait_for("its slurmd", lambda: listens(cluster, first), 60)
    cluster.crash(second)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]
    launches = [entry["nodes"] for entry in run.journal() if entry["entry"] == "launch"]
    assert first in launches[1]
    assert second not in launches[1]


def test_slurmctld_forgets_that_the_job_has_ended(cluster: Cluster, out: Path) -> None:
    """Killed before it wrote the end down, it starts the job again: what ended well is not trained once more."""
    run = running(cluster, out, nodes=3)
    state, old = cluster.settings.folder / "state", cluster.settings.folder / "state-of-before"
    copy = f"rm -rf {old}; cp -a {state} {old}"  # again where a file was replaced meanwhile
    wait_for("a copy", lambda: cluster.on("head", "sh", "-c", copy, check=False).returncode == 0, 30)
    run.go()
    assert run.end() == "COMPLETED", run.log
    rows, finals = run.rows(0), run.finals()
    cluster.crash("head")
    cluster.on("head", "sh", "-c", f"rm -r {state} && mv {old} {state}")
    cluster.boot("head")
    assert cluster.job(run.job)["JobState"] == "RUNNING"
    time.sleep(25)  # so long slurmctld believes in a job that its node does not know
    host = cluster.job(run.job)["BatchHost"]
    cluster.crash(host)
    cluster.boot(host)  # its slurmd says now what runs there, not some minutes later
    assert run.end() == "COMPLETED", run.log
    assert cluster.job(run.job)["Restarts"] == "1"
    assert (run.rows(0), run.finals()) == (rows, finals)
    assert decisions(run) == ["done", "done"]
    assert "ended well before the job came back" in run.log


PIECES = """#!/bin/bash
jit-srun {srun} {shape} {program} || exit
if [ -z "$SLURM_RESTART_COUNT" ]; then
    scontrol requeue $SLURM_JOB_ID
    sleep 60
fi
"""


def test_a_script_that_requeues_itself_is_no_lost_end(cluster: Cluster, reference: Training, out: Path) -> None:
    """Its training ended well and begins anew, in a directory of its own."""
    run = submit(cluster, out, nodes=3, batch=PIECES)
    assert run.end() == "COMPLETED", run.log
    assert cluster.job(run.job)["Restarts"] == "1"
    assert_equal(run, reference)
    assert run.replayed() == len(run.rows(0)) // 2
    second = replace(run, job=f"{run.job}.2")
    assert (decisions(run), decisions(second)) == (["done"], ["done"])


@pytest.mark.parametrize("end", ["scancel", "requeue"])
def test_the_job_is_ended_while_jit_srun_waits_for_the_save(
    cluster: Cluster, reference: Training, out: Path, end: str
) -> None:
    """Cancelled it stays so; requeued by an administrator it comes back; the save is completed for both."""
    run = running(cluster, out, "kill:backward:1:12", trainee=("--slow-save=6",))
    run.go()
    run.wait(lambda: "fault: death" in run.log, 120)
    cluster.on("head", *(["scancel"] if end == "scancel" else ["scontrol", "requeue"]), run.job)
    if end == "scancel":
        assert run.end() == "CANCELLED", run.log
        time.sleep(3)
        assert cluster.job(run.job)["JobState"] == "CANCELLED"
    else:
        assert run.end() == "COMPLETED", run.log
        assert_equal(run, reference)
    assert len(run.manifests()) == 1
