"""Slurm's expedited requeue (25.11 and later): jobs with the option have it, and what it gives and costs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.commands import wait_for
from testbed.machine import slurm_version
from tests.slurm.training import decisions, submit

SINCE = (25, 11)
DELAY = 100.0  # seconds that Slurm would let a requeued job wait, and more: 121
FAIL = "sleep 1; exit 3"


@pytest.fixture(scope="module")
def expediting() -> Iterator[Cluster]:
    """Four nodes without the controller hook; Epilog fails on the nodes that a file names."""
    version = slurm_version()
    if tuple(map(int, version.split(".")[:2])) < SINCE:
        pytest.skip(f"Slurm {version} has no expedited requeue: it came with 25.11")
    name = f"expedite-{os.getpid()}"
    epilog = Cluster(name).pfs / "epilog"
    conf = ("SlurmctldParameters=enable_expedited_requeue", f"Epilog={epilog}")
    with Cluster(name, nodes=4, plugin=True, controller_hook=False, conf=conf, site="expedite = on\n") as up:
        epilog.write_text(f"#!/bin/sh\n[ ! -e {up.pfs}/sick-$(uname -n) ]\n")
        epilog.chmod(0o755)
        yield up


@pytest.fixture
def cluster(expediting: Cluster) -> Iterator[Cluster]:
    """All of it idle and healthy; what the test leaves is put right after it."""
    yield expediting
    for path in expediting.pfs.glob("sick-*"):
        path.unlink()
    expediting.write_site("expedite = on\n")
    expediting.heal()


def asked(cluster: Cluster, *words: str, **env: str) -> tuple[bool, str]:
    """Whether a job submitted like this asks for an expedited requeue, and its Requeue."""
    job = cluster.sbatch("-H", *words, script="#!/bin/bash\ntrue\n", env=env)
    fields = cluster.job(job)
    cluster.on("head", "scancel", job)
    return fields.get("ExpeditedRequeue") == "Yes", fields["Requeue"]


def started(cluster: Cluster) -> str:
    """Submit a job on two nodes; its script has begun, or Slurm would take it for one that never started."""
    script = f"#!/bin/bash\ntouch {cluster.pfs}/began-$SLURM_JOB_ID\nsleep 300\n"
    job = cluster.sbatch("--jit-ckpt", "-N2", script=script)
    wait_for("its script", (cluster.pfs / f"began-{job}").exists, 60)
    return job


def runs_again(cluster: Cluster, job: str) -> dict[str, str]:
    """Wait until a job runs again; once more if it came to a node on which its old script was not yet gone."""

    def there() -> bool:
        fields = cluster.job(job)
        return fields["JobState"] == "RUNNING" and int(fields["Restarts"]) >= 1

    wait_for(f"second run of job {job}", there, DELAY)
    return cluster.job(job)


def test_who_asks(cluster: Cluster) -> None:
    """Jobs whose user asked for the option and said nothing of requeue, where the site's file says so."""
    assert asked(cluster, "--jit-ckpt") == (True, "1")
    assert asked(cluster, SBATCH_JIT_CKPT="") == (True, "1")
    assert asked(cluster) == (False, "1")
    assert asked(cluster, "--jit-ckpt", "--requeue") == (False, "1")
    assert asked(cluster, "--jit-ckpt", "--no-requeue") == (False, "0")
    cluster.write_site("enable = on\nexpedite = on\n")
    assert asked(cluster) == (False, "1")
    cluster.write_site("")
    assert asked(cluster, "--jit-ckpt") == (False, "1")


def test_a_training_comes_back_at_once(cluster: Cluster, out: Path) -> None:
    """A job that jit-srun puts back into the queue runs again without Slurm's delay, and without a controller hook."""
    run = submit(cluster, out, "kill:backward:1:12", options="relaunch=off")
    run.wait(lambda: decisions(run) == ["requeue"], 90)
    runs_again(cluster, run.job)
    assert run.end() == "COMPLETED", run.log
    assert decisions(run) == ["requeue", "done"]


def test_a_lost_node_does_not_end_the_job(cluster: Cluster) -> None:
    """no-kill counts as ever: the job runs on with one node less."""
    job = started(cluster)
    cluster.on("head", "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_for("a job of one node", lambda: cluster.job(job)["NodeList"] == "n1", 30)
    fields = cluster.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("RUNNING", "0")


def test_a_job_that_lost_all_its_nodes_comes_back(cluster: Cluster) -> None:
    """Without Slurm's delay."""
    job = started(cluster)
    for node in ("n1", "n2"):
        cluster.on("head", "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    runs_again(cluster, job)  # where: a node that answers is back in service at once, and may be one of them


def test_a_script_that_fails(cluster: Cluster) -> None:
    """It comes back where an epilog says that a node was bad; else Slurm holds the job: that is the price."""
    (cluster.pfs / "sick-n2").touch()
    job = cluster.sbatch(
        "--jit-ckpt", "-N2", script=f"#!/bin/bash\n[ $SLURM_RESTART_COUNT ] || {{ {FAIL}; }}; sleep 300\n"
    )
    assert "n2" not in runs_again(cluster, job)["NodeList"]
    assert cluster.nodes()["n2"].startswith("drain")
    held = cluster.sbatch("--jit-ckpt", "-N1", script=f"#!/bin/bash\n{FAIL}\n")
    cluster.wait_state(held, "REQUEUE_HOLD", 30)
