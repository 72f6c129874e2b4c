"""What every door to Slurm must do, for the fakes of tests/unit and for the real cluster of tests/slurm alike.

pytest tests/slurm/test_door.py                       through Slurm's commands
pytest tests/slurm --slurm-door=pyslurm               through pyslurm, where a site has it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError

REASON = "jit-ckpt: link mlx5_0/1 was up and is down; GPU 00000000:17:00.0: 2 uncorrectable ECC errors job 7"


@dataclass
class World:
    """What there is: a batch job that runs on two nodes, one that waits, a task of an array, a node without any job.

    `numbers`: each running task of that array by its own number, which for one of them is the array's.
    """

    running: str
    nodes: tuple[str, ...]
    waiting: str
    task: str
    free: str
    numbers: Mapping[str, str]


def until(ask: Callable[[], JobInfo], there: Callable[[JobInfo], bool], patience: float = 30.0) -> JobInfo:
    """Ask until it is so; what a job does takes Slurm a moment."""
    deadline = time.monotonic() + patience
    while not there(found := ask()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


class DoorContract:
    """The contract; subclasses give the door and the world behind it."""

    @pytest.fixture
    def world(self) -> World:
        """What there is behind the door."""
        raise NotImplementedError

    @pytest.fixture
    def door(self, world: World) -> Slurm:
        """The way under test."""
        raise NotImplementedError

    def test_a_running_job_is_told(self, door: Slurm, world: World) -> None:
        """Where it runs, and that it may come back."""
        job = door.job(world.running)
        assert (job.job_id, job.state, job.completing, job.restarts) == (world.running, "RUNNING", False, 0)
        assert (job.nodes, job.batch_host, job.batch, job.may_requeue) == (world.nodes, world.nodes[0], True, True)

    def test_a_job_came_into_the_queue_after_slurmctld_was_started(self, door: Slurm, world: World) -> None:
        """Both by one clock; pyslurm cannot tell the first one."""
        try:
            booted = door.booted()
        except SlurmError as error:
            pytest.skip(str(error))
        assert 0 < booted <= door.job(world.running).submitted

    def test_a_task_of_an_array_is_told(self, door: Slurm, world: World) -> None:
        """By the array's number and its own."""
        job = door.job(world.task)
        assert f"{job.array_job}_{job.array_task}" == world.task

    def test_a_task_of_an_array_is_told_by_its_own_number(self, door: Slurm, world: World) -> None:
        """Also the one that has the array's; from there on Slurm is asked by an address that means it alone."""
        assert len(world.numbers) == 2
        for number, task in world.numbers.items():
            job = door.job(number)
            assert (job.job_id, job.address) == (number, task)
        assert door.job(world.running).address == world.running

    def test_a_job_without_steps_has_none(self, door: Slurm, world: World) -> None:
        """That is no error; in 24.11 also of a job that runs, once its batch host is lost."""
        assert door.running_steps(world.waiting) == ()

    def test_what_is_not_there_is_an_error(self, door: Slurm) -> None:
        """Whatever goes wrong is a SlurmError."""
        for ask in (door.job, door.running_steps):
            with pytest.raises(SlurmError):
                ask("3999999999")

    def test_a_requeued_job_waits(self, door: Slurm, world: World) -> None:
        """It goes back to the queue, and Slurm counts that."""
        door.requeue(world.running)
        job = until(lambda: door.job(world.running), lambda job: job.state == "PENDING" and not job.completing)
        assert job.restarts == 1

    def test_a_cancelled_job_is_over(self, door: Slurm, world: World) -> None:
        """It does not come back; of an array only the one task."""
        for name in (world.waiting, world.task):
            door.cancel(name)
            until(lambda name=name: door.job(name), lambda job: job.state == "CANCELLED")  # type: ignore[misc]
        assert door.job(world.running).state == "RUNNING"

    def test_a_waiting_job_learns_which_nodes_it_may_not_use(self, door: Slurm, world: World) -> None:
        """The list is replaced as a whole, and can be emptied."""
        door.update(world.waiting, start_time="now+600", exclude=[world.free])
        assert door.job(world.waiting).excluded == (world.free,)
        door.update(world.waiting, exclude=[])
        assert door.job(world.waiting).excluded == ()

    def test_nodes_are_told(self, door: Slurm, world: World) -> None:
        """One by one and together, unknown ones left out; those that are fine are not called sick."""
        node = door.node(world.free)
        assert (node.name, node.closed, node.sick) == (world.free, False, False)
        assert set(door.nodes([world.free, *world.nodes])) == {world.free, *world.nodes}
        assert set(door.nodes([world.free, "nowhere"])) == {world.free}
        with pytest.raises(SlurmError):
            door.node("nowhere")

    def test_a_drained_node_is_told_with_its_reason(self, door: Slurm, world: World) -> None:
        """The whole reason is there, whatever a tool's words have in them."""
        door.drain(world.free, REASON)
        node = door.node(world.free)
        assert (node.closed, node.sick) == (True, True)
        assert node.reason.startswith(REASON)

    def test_a_job_on_a_drained_node_goes_on(self, door: Slurm, world: World) -> None:
        """Draining keeps new jobs away and ends none."""
        door.drain(world.nodes[1], REASON)
        assert door.node(world.nodes[1]).closed
        assert door.job(world.running).state == "RUNNING"
