"""Batch scripts that know nothing of jit-ckpt: plain srun, and `sbatch --jit-ckpt` is all that is new."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, decisions, program, submit

# What people write: the address of rank 0 from the list of nodes, a port of the job's own.
OLD = """#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""
ONE = OLD + "srun hostname\nsrun {srun} {program} || exit\nsrun hostname\n"
SPREAD = ("--ntasks-per-node=1",)


def test_a_killed_rank_in_an_old_script(cluster: Cluster, reference: Training, out: Path) -> None:
    """Started again in the allocation, same bits; the other sruns of the script are left alone."""
    run = submit(cluster, out, "kill:backward:1:12", nodes=3, sbatch=SPREAD, batch=ONE)
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]
    assert [p.name for p in run.directory.iterdir()] == [run.job]
    for node in ("n1", "n2", "n3"):
        assert run.log.splitlines().count(node) == 2, run.log


def test_a_dead_node_in_an_old_script_with_a_spare(cluster: Cluster, reference: Training, out: Path) -> None:
    """spares=1 of four nodes: three ranks; when rank 0's node dies the spare takes over and the address moves along."""
    run = submit(cluster, out, options="spares=1", sbatch=SPREAD, trainee=("--pause=0.1", "--wait=30"), batch=ONE)
    run.wait_minibatch(12)
    launch = run.journal()[0]
    assert (len(launch["nodes"]), len(launch["spares"])) == (3, 1)
    host = cluster.job(run.job)["BatchHost"]
    cluster.off(next(n for n in launch["nodes"] if n != host))
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert decisions(run) == ["relaunch", "done"]


def test_two_trainings_one_after_the_other(cluster: Cluster, reference: Training, out: Path) -> None:
    """A node dies in the second one and the job goes through the queue: it goes on, and the first one is over."""
    second = replace(reference, out=out / "second")
    script = ONE + f"srun --export=ALL {program(second.out, '--pause=0.1', '--wait=30')}\n"
    run = submit(cluster, out, "kill:forward:1:5", nodes=3, sbatch=SPREAD, batch=script)
    second = Training(cluster, run.job, out / "second", run.directory, 3)
    second.wait_minibatch(12, 400)
    host = cluster.job(run.job)["BatchHost"]
    cluster.off(next(n for n in run.journal()[0]["nodes"] if n != host))
    second.go()
    assert run.end() == "COMPLETED", run.log
    for training in (run, second):
        assert training.finals() == reference.finals(), run.log
        assert training.losses() == reference.losses(), run.log
    assert second.replayed() <= 1
    assert decisions(run) == ["relaunch", "done", "done"]
    assert "ended well before the job came back" in run.log
    assert sorted(p.name for p in run.directory.iterdir()) == [run.job, f"{run.job}.2"]


def test_two_trainings_at_the_same_time(cluster: Cluster, out: Path) -> None:
    """They share neither checkpoints nor nodes, and only the one that failed is started again."""
    a, b = out / "a", out / "b"
    first = "until squeue -h -s -j $SLURM_JOB_ID -o %i | grep -q '\\.0$'; do sleep 0.2; done\n"
    pair = (
        OLD
        + (
            "srun -N2 -n2 {program} &\n"
            + first  # it gets the first nodes, which its MASTER_ADDR means
            + f"(export MASTER_PORT=$((MASTER_PORT + 1)) MASTER_ADDR=; exec srun -N2 -n2 sh -c '"
            f"MASTER_ADDR=${{{{SLURM_STEP_NODELIST#n[}}}}; MASTER_ADDR=n${{{{MASTER_ADDR%%[-,]*}}}} exec "
            f"{program(b, 'kill:backward:1:12')}') &\nwait\n"
        )
    )
    run = submit(cluster, out, f"--out={a}", ranks=2, sbatch=SPREAD, batch=pair)
    assert run.end() == "COMPLETED", run.log
    one = Training(cluster, run.job, a, run.directory, 2)
    two = Training(cluster, run.job, b, run.directory, 2)
    assert one.finals() == two.finals(), run.log
    assert one.losses() == two.losses()
    assert (one.replayed(), two.replayed()) == (0, 1)
    journals = [p.parent.name for p in sorted(run.directory.glob("*/journal.jsonl"))]
    assert journals == [run.job, f"{run.job}.2"]


PLAIN = {
    "every node": "srun hostname",
    "exit code": "srun -n1 sh -c 'exit 7'",
    "killed task": "srun -n1 sh -c 'kill -9 $$'",
    "pipeline": "printf 'b\\na\\n' | srun -N1 -n1 cat | sort",
    "no input": "srun -n1 -N1 cat </dev/null",
    "input from a file": "srun -N1 -n1 wc -l < $0",
    "side by side": "srun -N1 -n1 --exact echo x & srun -N1 -n1 --exact echo x & wait",
    "both outputs": "srun -N1 -n1 sh -c 'echo out; echo err >&2'",
    "no such program": "srun -N1 -n1 /nonexistent",
    "bad option": "srun --no-such-option hostname",
    "version": "srun --version",
    "environment": "srun -N1 -n1 --export=NONE,X=1 sh -c 'echo $X $HOME $PATH'",
    "clean path": "srun -N1 -n1 sh -c 'echo $PATH'",
    "terminal": "script -qec 'srun -N1 -n1 --pty tty' /dev/null | tr -d '\\r'",
    "stopped by its caller": "timeout -s TERM 10 srun -N1 -n1 sleep 60",
    "background": (
        "srun -N1 -n1 sh -c 'touch {out}/up; exec sleep 60' & p=$!; until [ -e {out}/up ]; do sleep 0.1; done; "
        "rm {out}/up; kill -TERM $p; wait $p"
    ),
    "output file": "srun -N1 -n1 -o {out}/file echo x; cat {out}/file",
    "descriptor": "srun --multi-prog <(echo 0-2 echo %t) | sort",
}


def test_what_is_no_training_is_left_as_it_was(cluster: Cluster, out: Path) -> None:
    """Output, standard error and exit code of many kinds of srun are those of the real one, and nothing is written."""
    lines = []
    for number, text in enumerate(PLAIN.values()):
        text = text.replace("{out}", str(out))
        for kind, path in (("real", "PATH=${PATH#*:}; "), ("ours", "")):
            quoted = f"({path}{text}) >{out}/{number}.{kind}.out 2>{out}/{number}.{kind}.err"
            lines.append(f"{quoted}\necho $? >{out}/{number}.{kind}.code")
    out.mkdir()
    script = "#!/bin/bash\n" + "\n".join(lines) + "\n"
    job = cluster.sbatch(
        f"--jit-ckpt=dir={out}/state", "-N3", "--ntasks-per-node=1", f"--output={out}/log", script=script
    )
    cluster.wait_state(job, "COMPLETED", 400)
    for number, (what, text) in enumerate(PLAIN.items()):
        real, ours = ([_told(out / f"{number}.{k}.{w}") for w in ("code", "out", "err")] for k in ("real", "ours"))
        assert ours == real, f"{what}: {text}"
    assert not list((out / "state").iterdir())


def _told(path: Path) -> list[str]:
    """Return the different lines of an output, without numbers of steps and times; the order is that of the network.

    On which node Slurm starts a task that fits on any is its own choice: that of the step before may not be free yet.
    A signal for a whole process group reaches srun twice, directly and through us, and it says so twice.
    """
    text = re.sub(r"(StepId=|STEP )\d+\.\d+|\d\d:\d\d:\d\d(\.\d+)?|(?<=(?:or: n|epd-n| ON n))\d", "", path.read_text())
    return sorted(set(text.splitlines()))


def test_the_batch_host_lost_under_what_is_no_training(cluster: Cluster, out: Path) -> None:
    """Slurm would let the job run on without its script: when a task elsewhere fails, the job comes back."""
    once = "[ -z $SLURM_RESTART_COUNT ] || exec echo again\n"
    step = f"srun sh -c 'touch {out}/up-$SLURM_PROCID; until [ -e {out}/go ]; do sleep 0.2; done; exit 3'\n"
    run = submit(cluster, out, nodes=2, batch="#!/bin/bash\n" + once + step + "sleep 600\n")
    run.wait(lambda: len([*out.glob("up-*")]) == 2, 120)
    host = cluster.job(run.job)["BatchHost"]
    cluster.off(host)
    time.sleep(5)  # it runs on without its script
    run.go()
    assert run.end() == "COMPLETED", run.log
    assert cluster.job(run.job)["ExcNodeList"] == host
    assert "again" in run.log
