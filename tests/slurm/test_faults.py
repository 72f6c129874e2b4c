"""Every failure that the product promises to survive, on a real cluster, each ending in the undisturbed run's bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, decisions, submit

LOADED = ("--workers=1",)


@pytest.mark.parametrize("place", ["data", "forward", "backward", "update", "between"])
def test_a_rank_killed_anywhere_costs_one_minibatch(
    cluster: Cluster, reference: Training, out: Path, place: str
) -> None:
    """SIGKILL of rank 1 in each part of a minibatch: relaunched in the allocation, one minibatch twice, same bits."""
    run = submit(cluster, out, f"kill:{place}:1:12")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert run.replayed() <= 1
    assert decisions(run) == ["relaunch", "done"]
    (manifest,) = run.manifests()
    assert (manifest["fault"]["kind"], manifest["fault"]["ranks"], manifest["exact"]) == ("death", [1], True)


def test_rank_0_killed(cluster: Cluster, reference: Training, out: Path) -> None:
    """The first coordinator dies with its rank; the next candidate saves."""
    run = submit(cluster, out, "kill:backward:0:12")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert 0 not in [f["rank"] for f in run.manifests()[0]["files"]]


def test_a_rank_killed_before_the_ranks_have_met(cluster: Cluster, reference: Training, out: Path) -> None:
    """No agent can know of it yet, and the others would wait for ever: jit-srun hears of it and starts again."""
    run = submit(cluster, out, "kill:start:1:0")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]


# In the first launch rank 0 waits in MPI_Init until its deadline, and then the library ends the others' processes.
STUCK = """
import os, runpy, sys, time
from jitmpi import comm, session
if os.environ["JIT_CKPT_ATTEMPT"] == "0":
    session.BOOTSTRAP = 6.0 if os.environ["SLURM_PROCID"] == "0" else 60.0
    def hang(settings):
        with comm._witness(settings.rank, "MPI ended the process"):
            time.sleep(60 if settings.rank == 0 else 8)
            os._exit(99)
    comm.open_world = hang
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_that_hang_in_mpi_init_are_started_again(cluster: Cluster, reference: Training, out: Path) -> None:
    """srun gives the code with which MPI ended a rank, an own one for all it knows; jit-srun is told."""
    stuck = cluster.pfs / "stuck.py"
    stuck.write_text(STUCK)
    batch = f'#!/bin/bash\nset -- {{program}}\nshift\nexec jit-srun {{srun}} {{shape}} python {stuck} "$@"\n'
    run = submit(cluster, out, batch=batch)
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]
    assert "the ranks did not come up" in run.log
    assert "MPI ended the process" not in run.log


def test_two_ranks_killed_at_once(cluster: Cluster, reference: Training, out: Path) -> None:
    """One survivor has all that the two dead ranks handed over."""
    run = submit(cluster, out, "kill:forward:1:12", "kill:forward:2:12")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)


def test_an_exception_on_one_rank(cluster: Cluster, reference: Training, out: Path) -> None:
    """One rank raises once; its traceback is shown and the job goes on."""
    run = submit(cluster, out, "raise:forward:1:12")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert "ValueError: injected into rank 1" in run.log


def test_a_rank_that_stops_for_good(cluster: Cluster, reference: Training, out: Path) -> None:
    """SIGSTOP: no connection closes; progress tells, and the others leave it behind."""
    run = submit(cluster, out, "stop:forward:1:12")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert run.manifests()[0]["fault"]["kind"] == "hang"
    assert run.manifests()[0]["fault"]["ranks"] == [1]


def test_a_node_powered_off_with_a_spare(cluster: Cluster, reference: Training, out: Path) -> None:
    """The spare takes over in the same allocation, without waiting for Slurm to notice."""
    run = submit(cluster, out, trainee=("--pause=0.1", "--wait=30"))
    run.wait_minibatch(12)
    cluster.off(node_of(run, 1))
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]
    assert run.replayed() <= 1


def test_a_node_powered_off_without_a_spare(cluster: Cluster, reference: Training, out: Path) -> None:
    """Requeued with the node excluded, and running again without Slurm's two minutes."""
    run = submit(cluster, out, nodes=3, trainee=("--pause=0.1", "--wait=30"))
    run.wait_minibatch(12)
    dead = node_of(run, 1)
    cluster.off(dead)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["requeue", "done"]
    assert dead in cluster.job(run.job)["ExcNodeList"]


def test_the_batch_host_powered_off(cluster: Cluster, reference: Training, out: Path) -> None:
    """jit-srun dies with its node; a survivor asks for the requeue."""
    run = submit(cluster, out, nodes=3, trainee=("--pause=0.1", "--wait=30"))
    run.wait_minibatch(12)
    cluster.off(cluster.job(run.job)["BatchHost"])
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)


def test_a_node_cut_from_the_network(cluster: Cluster, reference: Training, out: Path) -> None:
    """Both sides of the cut can write; one checkpoint is committed, by the larger side."""
    run = submit(cluster, out, trainee=("--pause=0.1", "--wait=30"))
    run.wait_minibatch(12)
    cluster.cut(node_of(run, 1))
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert len(run.manifests()) == 1
    assert run.manifests()[0]["fault"]["unreachable"] == [1]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_second_death_during_the_save(cluster: Cluster, reference: Training, out: Path, rank: int) -> None:
    """The coordinator, or a saver, dies while the state is written: those who are left write it."""
    run = submit(cluster, out, "kill:backward:1:12", f"kill:save:{rank}:0")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)


def test_a_second_failure_after_recovery(cluster: Cluster, reference: Training, out: Path) -> None:
    """A relaunched job is protected like the first."""
    run = submit(cluster, out, "kill:forward:1:12", "kill:backward:2:30:1", trainee=LOADED)
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["relaunch", "relaunch", "done"]
    assert len(run.manifests()) == 2


def test_a_failure_while_a_relaunched_job_restores(cluster: Cluster, reference: Training, out: Path) -> None:
    """Nothing new is saved, the earlier checkpoint stays, and the next launch reads it."""
    run = submit(cluster, out, "kill:forward:1:12", "kill:restore:2:0:1")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert len(run.manifests()) == 1


def test_data_loader_workers_with_random_augmentation(cluster: Cluster, out: Path) -> None:
    """What workers draw at random is the same after a resume, in another process."""
    undisturbed = submit(cluster, out / "undisturbed", trainee=LOADED)
    assert undisturbed.end() == "COMPLETED", undisturbed.log
    run = submit(cluster, out / "failed", "kill:backward:1:12", trainee=LOADED)
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, undisturbed)


def test_the_time_limits_signal_is_a_planned_end(cluster: Cluster, reference: Training, out: Path) -> None:
    """USR1 before the time limit: saved, requeued, finished."""
    run = submit(cluster, out, trainee=("--pause=0.2", "--wait=30"))
    run.wait_minibatch(12)
    cluster.on("head", "scancel", "--signal=USR1", run.job)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert run.manifests()[0]["fault"]["kind"] == "signal"
    assert decisions(run) == ["requeue", "done"]


def test_all_replicas_lost(cluster: Cluster, out: Path) -> None:
    """Nobody is left to save: it says so, stops, and nothing looks complete."""
    run = submit(cluster, out, "kill:forward:all:12:any")
    assert run.end() == "FAILED", run.log
    assert not run.manifests()
    assert decisions(run) == ["stop"]


def test_a_bug_on_every_rank_stops_soon(cluster: Cluster, out: Path) -> None:
    """The script raises everywhere at the same minibatch: two attempts at most, and the traceback is visible."""
    run = submit(cluster, out, "raise:forward:all:12:any")
    assert run.end() == "FAILED", run.log
    assert decisions(run)[-1] == "stop"
    assert len(decisions(run)) <= 2
    assert "ValueError: injected into rank" in run.log


def test_scancel_stays_cancelled(cluster: Cluster, out: Path) -> None:
    """What the user ended does not come back."""
    run = submit(cluster, out, trainee=("--pause=0.2", "--wait=30"))
    run.wait_minibatch(12)
    cluster.on("head", "scancel", run.job)
    assert run.end() == "CANCELLED", run.log
    time.sleep(5)
    assert cluster.job(run.job)["JobState"] == "CANCELLED"
    assert "requeue" not in decisions(run)


def node_of(run: Training, rank: int) -> str:
    """The node that a rank of the running launch is on."""
    launch = [entry for entry in run.journal() if entry["entry"] == "launch"][-1]
    return str(launch["nodes"][rank])
