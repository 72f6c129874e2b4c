"""orphan: what is done for a job whose jit-srun is dead and whose ranks cannot reach Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_plugin import orphan
from slurm_plugin.contract import Options
from slurm_plugin.slurm_text import JobInfo, NodeInfo
from tests.unit.fake_slurm import FakeSlurm

REPO = Path(__file__).resolve().parents[2]


def cluster() -> FakeSlurm:
    """Job 7 on a node that answers nobody, as nothing listens there."""
    job = JobInfo("7", "RUNNING", nodes=("n1",), excluded=("n9",))
    return FakeSlurm({"7": job, "8": job}, [NodeInfo("n1", "ALLOCATED", "", "127.0.0.1", 1)])


def test_it_comes_back_without_the_nodes_that_are_dead() -> None:
    """What the ranks saw is not known here: the nodes are asked."""
    fake = cluster()
    assert orphan.see_to(fake, "7", 0, Options("/x"))
    assert fake.done == [("requeue", "7"), ("update", "7", "now+3", ("n9", "n1"))]


def test_a_job_that_is_running_again_is_left_alone() -> None:
    """The count that the rank's step began with is an older one."""
    fake = cluster()
    fake.requeue("7")
    fake.done.clear()
    assert orphan.see_to(fake, "7", 0, Options("/x"))
    assert ("requeue", "7") not in fake.done


@pytest.mark.parametrize(
    "words", [[], ["7"], ["7;reboot", "0", "dir=/x"], ["-h", "0", "dir=/x"], ["7", "x", "dir=/x"], ["7", "0", "evil=1"]]
)
def test_words_that_are_none_of_ours_end_it(words: list[str]) -> None:
    """A job may put anything into its environment: one line in the system's log, and nothing is done."""
    line = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(REPO)!r}); "]
    line[-1] += "from slurm_plugin.orphan import main; sys.exit(main())"
    done = subprocess.run([*line, *words], env={"PATH": "/nonexistent"}, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, b"")
