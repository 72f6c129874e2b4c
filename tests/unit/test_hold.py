"""hold: a name of a job belongs to one process, until its end."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time

from slurm_plugin import hold

TAKE = "import sys, time; from slurm_plugin import hold; held = hold.take(*sys.argv[1:])"
SITTING = TAKE + "; print(flush=True); time.sleep(60)"


def a_job() -> str:
    """A job id that no other test run on this machine uses."""
    return secrets.token_hex(8)


def test_a_name_is_given_once() -> None:
    """Until it is given back; other names and other jobs are free."""
    job = a_job()
    held = [hold.take(job, "a"), hold.take(job, "b"), hold.take(a_job(), "a")]
    assert None not in held
    assert hold.is_held(job, "a")
    assert hold.take(job, "a") is None
    give_back(held)
    assert not hold.is_held(job, "a")
    again = hold.take(job, "a")
    assert again is not None
    give_back([again])


def give_back(held: list[hold.Hold | None]) -> None:
    """Release them all."""
    for one in held:
        assert one is not None
        one.release()


def test_a_killed_process_gives_it_back() -> None:
    """SIGKILL leaves nothing behind."""
    job = a_job()
    process = subprocess.Popen([sys.executable, "-c", SITTING, job, "a"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        assert hold.take(job, "a") is None
        process.kill()
        process.wait()
    give_back([hold.take(job, "a")])


def test_somebody_else_on_the_name_does_not_count() -> None:
    """A user who guesses the name cannot keep a job from its checkpoints."""
    job = a_job()
    with socket.socket(socket.AF_UNIX) as sitting:  # bound, but nobody listens: its owner cannot be seen
        sitting.bind(f"\0jit-ckpt {os.geteuid()} {job} a")
        give_back([hold.take(job, "a")])
        assert not hold.is_held(job, "a")


def test_a_turn_is_waited_for_and_never_for_long() -> None:
    """Two jit-srun of one script choose one after the other; one that hangs does not stop the next."""
    job = a_job()
    began = time.monotonic()
    with hold.holding(job, "nodes", 5.0):
        assert time.monotonic() - began < 4
        with hold.holding(job, "nodes", 0.1):
            assert hold.is_held(job, "nodes")
    assert not hold.is_held(job, "nodes")
