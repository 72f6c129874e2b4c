"""A Slurm in memory; it passes the contract of test_slurm.py and remembers what was done to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from slurm_plugin.slurm_text import JobInfo, NodeInfo, SlurmError


class FakeSlurm:
    """Jobs and nodes by name; `done` holds every change in order.

    `refuse` makes that many of the next questions fail, as during a restart of slurmctld.
    """

    def __init__(
        self, jobs: Mapping[str, JobInfo], nodes: Iterable[NodeInfo], steps: Mapping[int, str] | None = None
    ) -> None:
        self.jobs = dict(jobs)
        self.known = {node.name: node for node in nodes}
        self.steps = dict(steps or {})
        self.done: list[tuple[object, ...]] = []
        self.refuse = 0
        self.partitions: dict[str, tuple[str, ...]] = {}
        self.boot = 0.0

    def answers(self) -> bool:
        return self.refuse == 0

    def booted(self) -> float:
        self._answer()
        return self.boot

    def job(self, job_id: str) -> JobInfo:
        self._answer()
        found = self.jobs.get(job_id) or next((j for j in self.jobs.values() if j.job_id == job_id), None)
        if found is None:
            raise SlurmError(f"job {job_id} is not known")
        return found

    def requeue(self, job_id: str) -> None:
        self.jobs[job_id] = replace(self.job(job_id), state="PENDING", restarts=self.jobs[job_id].restarts + 1)
        self.done.append(("requeue", job_id))

    def update(self, job_id: str, *, start_time: str = "", exclude: Iterable[str] | None = None) -> None:
        job, names = self.job(job_id), None if exclude is None else tuple(exclude)
        self.jobs[job_id] = job if names is None else replace(job, excluded=names)
        self.done.append(("update", job_id, start_time, names))

    def node(self, name: str) -> NodeInfo:
        self._answer()
        if name not in self.known:
            raise SlurmError(f"node {name} is not known")
        return self.known[name]

    def nodes(self, names: Iterable[str]) -> dict[str, NodeInfo]:
        self._answer()
        return {name: self.known[name] for name in names if name in self.known}

    def release(self, job_id: str) -> None:
        self.jobs[job_id] = replace(self.job(job_id), held=False)
        self.done.append(("release", job_id))

    def cancel(self, job_id: str) -> None:
        self.jobs[job_id] = replace(self.job(job_id), state="CANCELLED")
        self.done.append(("scancel", job_id))

    def drain(self, node: str, reason: str) -> None:
        self._answer()
        self.known[node] = replace(self.known[node], state=f"{self.known[node].state}+DRAIN", reason=reason)
        self.done.append(("drain", node, reason))

    def partition_nodes(self, name: str) -> tuple[str, ...]:
        self._answer()
        return self.partitions[name]

    def step_of(self, job_id: str, pid: int) -> str:
        self._answer()
        return self.steps.get(pid, "")

    def running_steps(self, job_id: str) -> tuple[str, ...]:
        return () if self.job(job_id).state == "PENDING" else tuple(self.steps.values())

    def cancel_step(self, job_id: str, step_id: str, signal: str = "KILL") -> None:
        self._answer()
        self.done.append(("cancel", job_id, step_id, signal))

    def _answer(self) -> None:
        if self.refuse > 0:
            self.refuse -= 1
            raise SlurmError("slurmctld does not answer")
