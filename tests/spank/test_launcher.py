"""srun on a real cluster: survivors of a dead task, srun as an allocator, options given to a step."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_plugin import contract

pytestmark = pytest.mark.slurm
Site = Any  # conftest.Site
# Task 1 dies by SIGKILL; task 0 says so if it is alive 3 s later (the site's WaitTime is 2 s). Where it must not be, it
# has longer to live: task 1 may start late, and what ends task 0 too.
DIES = "srun -N2 -n2 /bin/bash -c '[ $SLURM_PROCID = 0 ] && sleep 3 && echo alive || kill -9 $$'"
ENDED = DIES.replace("sleep 3", "sleep 25")


def test_survivors_go_on(site: Site) -> None:
    """A killed task ends nobody else, though the site kills on bad exit and waits 2 s; without the option it does."""
    job = site.job(DIES, "--jit-ckpt", "-N2")
    assert "alive" in site.output(job)
    assert [line.split()[:3] for line in site.spool(job, "n2")] == [["0", "1", "9"]]
    lines = [line.split()[:3] for line in site.spool(job, "n1")]
    assert lines[0] == ["0", "0", "0"]
    assert lines[1][:2] == [str(0xFFFFFFFB), "0"]
    plain = site.job(ENDED, "-N2")
    assert "alive" not in site.output(plain)


def test_users_choice_stays(site: Site) -> None:
    """-K1 and --wait on srun's command line win over ours."""
    job = site.job(ENDED.replace("srun", "srun -K1"), "--jit-ckpt", "-N2")
    assert "alive" not in site.output(job)


def test_srun_as_allocator(site: Site) -> None:
    """`srun --jit-ckpt` outside a job carries the option to its tasks and to the Epilog, with no-kill for the job."""
    show = "echo $JIT_CKPT $SLURM_JOB_ID no-kill=$SLURM_NO_KILL"
    done = site.run("srun", "-v", "--jit-ckpt=keep=3,dir=alloc", "/bin/bash", "-c", show)
    text, job, setting = next(line for line in done.stdout.splitlines() if line.startswith("dir=")).split()
    assert (text, setting) == (f"dir={site.pfs}/alloc,keep=3", "no-kill=")
    assert "no-kill             : set" in done.stdout
    assert (site.pfs / "alloc").is_dir()
    assert f"{contract.ENV_OPTIONS_HOOK}={text}\n" in site.epilog(job, "n1")
    assert [line.split()[:3] for line in site.spool(job, "n1")] == [["0", "0", "0"]]


def test_srun_refuses(site: Site) -> None:
    """A bad value ends srun before it allocates anything."""
    done = site.run("srun", "--jit-ckpt=save=0", "true")
    assert done.returncode != 0
    assert "srun: error: jit-ckpt: option: cannot use key 'save' with value '0'; allowed: seconds from 1" in done.stdout


def test_step_asks_in_a_job_without(site: Site) -> None:
    """A step may have the option in a job without it; the next step has it no more."""
    job = site.job("srun -n1 --jit-ckpt=keep=5 env | grep ^JIT_CKPT=; srun -n1 env | grep -c JIT")
    assert site.output(job).splitlines()[0] == f"JIT_CKPT=dir={site.pfs}/jit-ckpt,keep=5"
    assert site.output(job).splitlines()[1] == "0"


def test_step_cannot_change_the_job(site: Site) -> None:
    """In a job with the option srun says that its own is not used; plain srun in another folder says nothing."""
    other = site.pfs / "elsewhere"
    other.mkdir(exist_ok=True)
    body = f"cd {other}; srun -n1 printenv JIT_CKPT; srun -n1 --jit-ckpt=keep=5 printenv JIT_CKPT"
    lines = site.output(site.job(body, "--jit-ckpt=keep=3,dir=rel")).splitlines()
    text = f"dir={site.pfs}/rel,keep=3"
    assert lines[0] == text
    assert sorted(lines[1:]) == sorted(
        [f"jit-ckpt: option: cannot change the options of a running job: those of its submission stay ({text})", text]
    )
    assert list(other.iterdir()) == []


def test_step_without_environment(site: Site) -> None:
    """`srun --export=NONE` inside the job gives its tasks the option all the same."""
    job = site.job("srun --export=NONE -n1 /usr/bin/printenv JIT_CKPT", "--jit-ckpt=keep=3")
    assert site.output(job) == f"dir={site.pfs}/jit-ckpt,keep=3\n"
