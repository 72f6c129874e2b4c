"""The batch host is lost while no step of the job runs elsewhere: no rank sees it, the health check does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from testbed import Cluster
from testbed.commands import wait_for
from tests.slurm.training import decisions, submit

SLEEPER = """#!/bin/bash
[ -z $SLURM_RESTART_COUNT ] || exec echo again
srun -N1 -n1 -r1 sh -c "touch {out}/began-$SLURM_ARRAY_TASK_ID
    until [ -e {out}/ready ]; do sleep 0.2; done
    touch {out}/whole-$SLURM_ARRAY_TASK_ID"
until [ -e {out}/end ]; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    """Five nodes whose health is checked every two seconds."""
    with Cluster(f"guard-{os.getpid()}", nodes=5, plugin=True, health_check=2) as up:
        yield up


@pytest.fixture
def guarded(five: Cluster) -> Iterator[Cluster]:
    """Those, whole again after each test."""
    yield five
    five.heal()


def notes(cluster: Cluster, job: str) -> dict[str, list[str]]:
    """What each node that watches the job has noted, without the boot's id; only root can read it."""
    found = {}
    for node in cluster.node_names:
        path = f"/var/spool/jit-ckpt/{job}/guard"
        shown = cluster.on(node, "sh", "-c", f"stat -c %a:%u {path} && cat {path}", check=False).stdout.splitlines()
        if shown:
            assert shown[0] == "600:0"
            found[node] = shown[2:]
    return found


def test_a_script_that_has_started_nothing_yet(guarded: Cluster) -> None:
    """The job comes back without the dead node, trains to its end, and leaves nothing in the spool.

    Another one there, which may not come back, is ended.
    """
    first = "[ $SLURM_RESTART_COUNT ] || {{ echo began; sleep 600; }}\n"
    batch = "#!/bin/bash\n" + first + "exec jit-srun {srun} {shape} {program}\n"
    run = submit(
        guarded, guarded.pfs / "sleeper", nodes=3, ranks=2, batch=batch, user=True, trainee=("--pause=0.3", "--wait=30")
    )
    fields = guarded.wait_state(run.job, "RUNNING", 60)
    run.wait(lambda: "began" in run.log, 30)
    wait_for("the notes", lambda: len(notes(guarded, run.job)) == 2, 20)
    watching = notes(guarded, run.job)
    host, uid = fields["BatchHost"], fields["UserId"].partition("(")[2].rstrip(")")
    assert host not in watching
    for note in watching.values():
        assert (note[0], note[2:4]) == (uid, ["0", host])
    pair = f"--nodelist={host},{next(iter(watching))}"
    script = f"#!/bin/sh\ntouch {run.out}/began\nexec sleep 600\n"
    barred = guarded.sbatch(f"--jit-ckpt=dir={run.directory}", "--no-requeue", "-N2", pair, script=script, user=True)
    wait_for("its script", (run.out / "began").exists, 30)
    guarded.off(host)
    guarded.wait_state(barred, "CANCELLED", 90)
    wait_for("the second life", lambda: guarded.job(run.job)["Restarts"] == "1", 90)
    run.wait_minibatch(1)
    wait_for("its second watch", lambda: {n[2] for n in notes(guarded, run.job).values()} == {"1"}, 60)
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert guarded.job(run.job)["ExcNodeList"] == host
    assert decisions(run) == ["done"]
    wait_for("empty spools", lambda: not notes(guarded, run.job), 20)


def test_a_task_of_an_array_after_its_step(guarded: Cluster) -> None:
    """A healthy step elsewhere runs to its end; then that task comes back, alone, though it has the array's number.

    That its batch host was booted meanwhile, and answers, does not bring its script back.
    """
    out = guarded.pfs / "array"
    out.mkdir()
    given = [f"--jit-ckpt=dir={out}/state", "--array=1-2", "-N2", "--exclusive", f"--output={out}/%a.out"]
    array = guarded.sbatch(*given, script=SLEEPER.replace("{out}", str(out)))
    tasks = {name: guarded.wait_state(name, "RUNNING", 60) for name in (f"{array}_1", f"{array}_2")}
    lost = next(name for name, fields in tasks.items() if fields["JobId"] == array)
    (other,), task = set(tasks) - {lost}, lost.rpartition("_")[2]
    wait_for("its step", (out / f"began-{task}").exists, 30)
    host = tasks[lost]["BatchHost"]
    guarded.off(host)
    wait_for("a job without the node", lambda: guarded.job(lost)["NumNodes"] == "1", 90)
    guarded.boot(host)
    wait_for("an idle node", lambda: guarded.nodes()[host] == "idle", 60)
    assert guarded.job(lost)["Restarts"] == "0"
    (out / "ready").touch()
    fields = guarded.wait_state(lost, "COMPLETED", 90)
    assert (fields["Restarts"], fields["ExcNodeList"]) == ("1", host)
    assert (out / f"whole-{task}").exists(), "the step was cut off"
    assert "again" in (out / f"{task}.out").read_text()
    (out / "end").touch()
    fields = guarded.wait_state(other, "COMPLETED", 90)
    assert (fields["Restarts"], fields["ExcNodeList"]) == ("0", "(null)")
