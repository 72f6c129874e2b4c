"""The doors to Slurm keep their contract on a real Slurm: its commands, or pyslurm with --slurm-door=pyslurm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slurm_plugin.slurm_text import JobInfo, NodeInfo, SlurmError
from testbed import Cluster
from testbed.plugin import REPO
from tests.door_contract import DoorContract, World, until

CALL = Path(__file__).with_name("door_call.py")
SLEEP = "#!/bin/sh\nexec sleep 300\n"


class RemoteDoor:
    """A door of the cluster's head, opened there for each question."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self._cluster, self._kind = cluster, kind

    def booted(self) -> float:
        return float(self._ask("booted"))

    def job(self, job_id: str) -> JobInfo:
        return JobInfo(**_tuples(self._ask("job", job_id)))

    def requeue(self, job_id: str) -> None:
        self._ask("requeue", job_id)

    def update(self, job_id: str, *, start_time: str = "", exclude: Iterable[str] | None = None) -> None:
        self._ask("update", job_id, start_time=start_time, exclude=None if exclude is None else list(exclude))

    def node(self, name: str) -> NodeInfo:
        return NodeInfo(**self._ask("node", name))

    def nodes(self, names: Iterable[str]) -> dict[str, NodeInfo]:
        return {name: NodeInfo(**node) for name, node in self._ask("nodes", list(names)).items()}

    def drain(self, node: str, reason: str) -> None:
        self._ask("drain", node, reason)

    def partition_nodes(self, name: str) -> tuple[str, ...]:
        return tuple(self._ask("partition_nodes", name))

    def step_of(self, job_id: str, pid: int) -> str:
        return str(self._ask("step_of", job_id, pid))

    def running_steps(self, job_id: str) -> tuple[str, ...]:
        return tuple(self._ask("running_steps", job_id))

    def cancel(self, job_id: str) -> None:
        self._ask("cancel", job_id)

    def cancel_step(self, job_id: str, step_id: str, signal: str = "KILL") -> None:
        self._ask("cancel_step", job_id, step_id, signal)

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        line = [sys.executable, str(CALL), self._kind, method, json.dumps([args, named])]
        answer = json.loads(self._cluster.on("head", *line, env={"PYTHONPATH": str(REPO)}).stdout)
        if "error" in answer:
            raise SlurmError(answer["error"])
        return answer["value"]


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


@pytest.fixture(scope="session")
def door_kind(request: pytest.FixtureRequest, shared_cluster: Cluster) -> str:
    """The kind that was asked for; pyslurm must be there when it was."""
    kind = str(request.config.getoption("--slurm-door", default="scontrol"))
    if kind == "pyslurm":
        tried = shared_cluster.on("head", sys.executable, "-c", "import pyslurm", check=False)
        if tried.returncode:
            pytest.fail(f"--slurm-door=pyslurm: {sys.executable} cannot import pyslurm: {tried.stderr.strip()}")
    return kind


class TestDoor(DoorContract):
    """On five nodes: a job on two of them, two tasks of an array on two more; the last one has the array's number."""

    @pytest.fixture
    def world(self, cluster: Cluster, make_job: Callable[..., str]) -> World:
        running, array = make_job("--nodes=2"), make_job("--array=4-5")
        waiting = cluster.sbatch("--hold", "--output=/dev/null", script=SLEEP)
        nodes = cluster.wait_state(running, "RUNNING", 30)["NodeList"]
        tasks = [cluster.wait_state(f"{array}_{task}", "RUNNING", 30) for task in (4, 5)]
        numbers = {task["JobId"]: f"{array}_{task['ArrayTaskId']}" for task in tasks}
        taken = {task["NodeList"] for task in tasks}
        names = cluster.on("head", "scontrol", "show", "hostnames", nodes).stdout.split()
        free = next(n for n in reversed(cluster.node_names) if n not in {*names, *taken})
        task = next(name for number, name in numbers.items() if number != array)
        return World(running, tuple(names), waiting, task, free, numbers)

    @pytest.fixture
    def make_job(self, cluster: Cluster) -> Callable[..., str]:
        """Submit a job that only waits, on nodes of its own."""
        return lambda *args: cluster.sbatch("--exclusive", "--requeue", "--output=/dev/null", *args, script=SLEEP)

    @pytest.fixture
    def door(self, cluster: Cluster, world: World, door_kind: str) -> RemoteDoor:
        return RemoteDoor(cluster, door_kind)

    def test_a_step_of_an_arrays_task_is_signalled_alone(self, cluster: Cluster, door: RemoteDoor, out: Path) -> None:
        """By the array's number and the task's: the last task alone has the array's own number."""
        out.mkdir()
        script = f"#!/bin/sh\nsrun sleep 600 &\necho $! >{out}/$SLURM_ARRAY_TASK_ID\nwait $!\n"
        array = cluster.sbatch("--array=1-2", "-n1", "--output=/dev/null", script=script)
        try:
            steps = {}
            for task in (1, 2):
                cluster.wait_state(f"{array}_{task}", "RUNNING", 30)
                steps[task] = self._step(door, f"{array}_{task}", out / str(task))
            door.cancel_step(f"{array}_2", steps[2])
            until(lambda: door.job(f"{array}_2"), lambda job: job.state == "FAILED")
            assert door.job(f"{array}_1").state == "RUNNING"
            assert self._step(door, f"{array}_1", out / "1") == steps[1]
        finally:
            door.cancel(array)

    @staticmethod
    def _step(door: RemoteDoor, job: str, pid: Path) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if pid.exists() and pid.read_text() and (step := door.step_of(job, int(pid.read_text()))):
                return step
            time.sleep(0.2)
        raise AssertionError(f"{job} has no step")
