"""orphan: what is done for a job whose jit-srun is dead and whose ranks cannot reach Slurm."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_plugin import hold
from slurm_plugin.contract import Options
from slurm_plugin.orphan import Orphan, see_to, see_to_idle
from slurm_plugin.slurm_text import JobInfo, NodeInfo
from tests.unit.fake_slurm import FakeSlurm

REPO = Path(__file__).resolve().parents[2]
ORPHAN = Orphan("7", 1, "n1", Options("/x"))


class World:
    """Job 7 in its second life on n1 to n3, where nobody answers; what `events` say happens at the looks."""

    def __init__(self, *events: str, **fields: object) -> None:
        job = JobInfo("7", "RUNNING", nodes=("n1", "n2", "n3"), restarts=1, excluded=("n9",))
        nodes = [NodeInfo(n, "ALLOCATED", "", "10.0.0.1" if n == "n1" else "127.0.0.1", 7000) for n in job.nodes]
        self.slurm = FakeSlurm({"7": replace(job, **fields)}, nodes)  # type: ignore[arg-type]
        self.said: list[str] = []
        self.looks = 0
        self._events = itertools.chain(events, itertools.repeat(""))
        self._now = itertools.count(0.0, 5.0)

    def see_to(self) -> bool:
        return see_to(
            self.slurm,
            ORPHAN,
            self.said.append,
            responds=self._responds,
            clock=lambda: next(self._now),
            sleep=lambda _: None,
        )

    def see_to_idle(self, answers: bool = False) -> bool:
        """Look once at what is there; `answers`: the batch node does."""
        return see_to_idle(self.slurm, ORPHAN, self.said.append, responds=lambda host, port: answers)

    def happens(self, event: str) -> None:
        """Let Slurm see it."""
        job = self.slurm.jobs["7"]
        if event == "taken out":
            self.slurm.jobs["7"] = replace(job, nodes=job.nodes[1:])
        elif event in ("given up", "drained"):
            state = "ALLOCATED*" if event == "given up" else "ALLOCATED+DRAIN"
            self.slurm.known["n1"] = replace(self.slurm.known["n1"], state=state)
        elif event == "requeued":
            self.slurm.jobs["7"] = replace(job, state="PENDING", restarts=2)

    def _responds(self, host: str, port: int) -> bool:
        assert (host, port) == ("10.0.0.1", 7000), "where Slurm says that the slurmd of this node listens"
        self.looks += 1
        event = next(self._events)
        self.happens(event)
        return event == "answers"


def orphan(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run the program as the plugin does."""
    line = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(REPO)!r}); "]
    line[-1] += "from slurm_plugin.orphan import main; sys.exit(main())"
    return subprocess.run([*line, *words], env={"PATH": "/nonexistent"}, capture_output=True, timeout=30)


@pytest.mark.parametrize("event", ["taken out", "given up"])
def test_it_comes_back_once_slurm_has_lost_the_node_too(event: str) -> None:
    """Without that node, and without the others that do not answer."""
    world = World("", "", event)
    assert world.see_to()
    (what, _), (_, _, start, away) = world.slurm.done
    assert (what, start) == ("requeue", "now+3")
    assert away[:2] == ("n9", "n1")
    assert {"n2", "n3"} <= set(away)
    assert "jit-srun is dead with n1" in world.said[0]


def test_a_node_whose_address_cannot_be_found_is_not_left_out() -> None:
    """Where the name service is out that is so for all of them, and the job would have no nodes left."""
    world = World("given up")
    world.slurm.known["n2"] = replace(world.slurm.known["n2"], address="n2.invalid")
    assert world.see_to()
    away = world.slurm.done[1][3]
    assert "n2" not in away
    assert {"n1", "n3"} <= set(away)


@pytest.mark.parametrize("events", [["answers"], ["", "", "answers"], ["", "requeued", "given up"], ["drained"], []])
def test_a_job_that_somebody_sees_to_is_left_alone(events: list[str]) -> None:
    """jit-srun's node answers, now or again; a rank has requeued it; Slurm never loses the node, or has it drained."""
    world = World(*events)
    assert not world.see_to()
    assert world.slurm.done == []


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "CANCELLED"},
        {"state": "PENDING"},
        {"state": "COMPLETED"},
        {"state": "FAILED"},
        {"restarts": 2},
        {"batch": False},
        {"batch_host": "n2"},
    ],
)
def test_a_job_that_needs_nobody_is_left_alone(fields: dict[str, object]) -> None:
    """Cancelled, on its way, over, running again, without a script or with a living one: the first look is the last."""
    world = World("given up", **fields)
    assert not world.see_to()
    assert (world.slurm.done, world.looks) == ([], 1)


def test_a_job_that_is_suspended_may_still_be_an_orphan() -> None:
    """It is looked at until it runs."""
    world = World("given up", state="SUSPENDED")
    assert not world.see_to()
    assert world.looks > 9
    assert world.slurm.done == []


@pytest.mark.parametrize(("event", "answers"), [("taken out", False), ("taken out", True), ("given up", False)])
def test_an_idle_job_comes_back_once_slurm_has_lost_the_node(event: str, answers: bool) -> None:
    """One that was taken out of the job may have booted, and answer; its script is gone all the same."""
    world = World()
    assert not world.see_to_idle()
    world.happens(event)
    assert world.see_to_idle(answers)
    assert [done[:2] for done in world.slurm.done] == [("requeue", "7"), ("update", "7")]


@pytest.mark.parametrize(("event", "answers"), [("drained", False), ("given up", True), ("requeued", False)])
def test_an_idle_job_that_may_have_its_script_is_left_alone(event: str, answers: bool) -> None:
    """Slurm hears from the node, or it answers, or somebody was faster."""
    world = World()
    world.happens(event)
    assert not world.see_to_idle(answers)
    assert world.slurm.done == []


def test_a_node_that_was_busy_once_costs_one_question() -> None:
    """It is looked at for the rest of the job's life."""
    world = World()
    world.slurm.known.clear()
    assert not world.see_to_idle(answers=True)
    assert (world.slurm.done, world.said) == ([], [])


def test_a_job_with_a_step_is_not_idle() -> None:
    """Its ranks may still be saving what a requeue would cut off; the next health check looks again."""
    world = World()
    world.happens("taken out")
    world.slurm.steps = {1: "0"}
    assert not world.see_to_idle()
    assert world.slurm.done == []
    world.slurm.steps = {}
    assert world.see_to_idle()


def test_of_an_array_only_the_task_comes_back() -> None:
    """Slurm is told its number only; asked to requeue that, it would take it for the whole array's."""
    world = World()
    world.slurm.jobs["7"] = replace(world.slurm.jobs["7"], array_job="7", array_task="3")
    world.slurm.jobs["7_3"] = world.slurm.jobs["7"]
    world.happens("given up")
    assert world.see_to_idle()
    assert [done[:2] for done in world.slurm.done] == [("requeue", "7_3"), ("update", "7_3")]


@pytest.mark.parametrize(("name", "more"), [("orphan", []), ("guard", ["idle"])])
def test_one_looks_after_a_job_on_a_node(name: str, more: list[str]) -> None:
    """A script that starts steps in a loop, health checks, and a host that never answers make no crowd."""
    job = str(os.getpid())
    held = hold.take(job, name)
    assert held is not None
    assert orphan([job, "0", "203.0.113.1", "n1", "dir=/x", *more]).returncode == 0
    held.release()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["7"],
        ["7;reboot", "0", "h", "n1", "dir=/x"],
        ["-h", "0", "h", "n1", "dir=/x"],
        ["7", "x", "h", "n1", "dir=/x"],
        ["7", "0", "h", "n[", "dir=/x"],
        ["7", "0", "h", "n[1-99999999999]", "dir=/x"],
        ["7", "0", "h", "", "dir=/x"],
        ["7", "0", "h", "n1", "evil=1"],
        ["7", "0", "h", "n1", "dir=/x", "busy"],
    ],
)
def test_words_that_are_none_of_ours_end_it(words: list[str]) -> None:
    """A job may put anything into its environment: one line in the system's log, and nothing is done."""
    done = orphan(words)
    assert (done.returncode, done.stdout) == (1, b"")
