"""The door to Slurm through pyslurm, for places where its commands are missing (many containers).

Rule 1: only what pyslurm 22.5 and 25.11 have in common.
Rule 2: pyslurm's calls cannot be bounded in time; where scontrol exists it is used instead (see slurm.open_slurm).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from slurm_plugin.slurm_text import HELD, SLURMD_PORT, JobInfo, NodeInfo, SlurmError, expand


def load() -> Any:
    """Import pyslurm.

    Raises:
        SlurmError: it is not installed, or was built for another Slurm.
    """
    try:
        return importlib.import_module("pyslurm")
    except ImportError as error:
        raise SlurmError(f"neither scontrol nor pyslurm can be used here: {error}") from error


class PyslurmSlurm:
    """Slurm through the pyslurm module that is handed in."""

    def __init__(self, pyslurm: Any) -> None:
        self._api = pyslurm

    def answers(self) -> bool:
        """See Slurm.answers."""
        try:
            self._api.Nodes.load()
        except Exception:  # pyslurm's errors have no common root in its versions
            return False
        return True

    def booted(self) -> float:
        """See Slurm.booted; pyslurm's versions have no common way to ask."""
        raise SlurmError("pyslurm cannot tell when slurmctld was started")

    def job(self, job_id: str) -> JobInfo:
        """See Slurm.job."""
        with _Asking(f"look up job {job_id}"):
            return _info(self._load(job_id))

    def requeue(self, job_id: str) -> None:
        """See Slurm.requeue."""
        with _Asking(f"requeue job {job_id}"):
            self._one(job_id).requeue()

    def update(self, job_id: str, *, start_time: str = "", exclude: Iterable[str] | None = None) -> None:
        """See Slurm.update."""
        changes: dict[str, str] = {"begin_time": start_time} if start_time else {}
        if exclude is not None:
            changes["excluded_nodes"] = ",".join(exclude)
        with _Asking(f"update job {job_id}"):
            if changes:
                self._one(job_id).modify(self._api.JobSubmitDescription(**changes))

    def release(self, job_id: str) -> None:
        """See Slurm.release."""
        with _Asking(f"release job {job_id}"):
            self._one(job_id).release()

    def cancel(self, job_id: str) -> None:
        """See Slurm.cancel."""
        with _Asking(f"cancel job {job_id}"):
            self._one(job_id).cancel()

    def node(self, name: str) -> NodeInfo:
        """See Slurm.node."""
        with _Asking(f"look up node {name}"):
            return _node(self._api.Node.load(name))

    def nodes(self, names: Iterable[str]) -> dict[str, NodeInfo]:
        """See Slurm.nodes."""
        with _Asking("look up nodes"):
            known = self._api.Nodes.load()
            return {name: _node(known[name]) for name in names if name in known}

    def drain(self, node: str, reason: str) -> None:
        """See Slurm.drain."""
        with _Asking(f"drain node {node}"):
            self._api.Node.load(node).modify(self._api.Node(state="DRAIN", reason=reason))

    def partition_nodes(self, name: str) -> tuple[str, ...]:
        """See Slurm.partition_nodes; pyslurm's versions have no common way to ask."""
        raise SlurmError(f"pyslurm cannot tell the nodes of partition {name}")

    def step_of(self, job_id: str, pid: int) -> str:
        """See Slurm.step_of."""
        with _Asking(f"look up the steps of job {job_id}"):
            for step in self._api.JobSteps.load(self._load(job_id).id).values():
                if step.srun_process_id == pid:
                    return str(step.id)
        return ""

    def running_steps(self, job_id: str) -> tuple[str, ...]:
        """See Slurm.running_steps."""
        with _Asking(f"look up the steps of job {job_id}"):
            steps = self._api.JobSteps.load(self._load(job_id).id).values()
            return tuple(str(step.id) for step in steps if str(step.id).isdigit())

    def cancel_step(self, job_id: str, step_id: str, signal: str = "KILL") -> None:
        """See Slurm.cancel_step."""
        with _Asking(f"signal step {job_id}.{step_id}"):
            name = signal if signal.isdigit() else f"SIG{signal}"
            self._api.JobStep(self._load(job_id).id, int(step_id)).send_signal(int(name) if name.isdigit() else name)

    def _load(self, job_id: str) -> Any:
        array, _, task = job_id.partition("_")
        if not task and (job := self._api.Job.load(int(array))).id == int(array):
            return job
        for job in self._api.Jobs.load().values():  # the number of an array gives any of its tasks, or all
            if (job.array_id, job.array_task_id) == (int(array), int(task)) if task else job.id == int(array):
                return job
        raise SlurmError(f"job {job_id} is not known")

    def _one(self, job_id: str) -> Any:
        """Load a job that is to be changed; one that shares its number with its array cannot be addressed alone."""
        job = self._load(job_id)
        if job.array_id and job.array_id == job.id:
            raise SlurmError(f"pyslurm cannot address task {job_id} without the rest of its array; scontrol can")
        return job


class _Asking:
    """Turn whatever pyslurm raises into a SlurmError that says what was asked."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SlurmError):
            raise SlurmError(f"cannot {self._what}: {error}") from error


def _info(job: Any) -> JobInfo:
    state = str(job.state or "UNKNOWN")
    return JobInfo(
        job_id=str(job.id),
        state=_ended(job) if state == "COMPLETING" else state,
        completing=state == "COMPLETING",
        restarts=int(job.requeue_count or 0),
        nodes=expand(job.allocated_nodes or ""),
        batch_host=job.batch_host or "",
        excluded=expand(job.excluded_nodes or ""),
        required=expand(job.required_nodes or ""),
        preempted=bool(job.preempt_time),
        end=float(job.end_time or 0),
        batch=bool(job.is_batch_job),
        may_requeue=bool(job.is_requeueable),
        array_job=str(job.array_id or ""),
        array_task="" if job.array_task_id is None else str(job.array_task_id),
        partition=job.partition or "",
        width=int(job.num_nodes or 0),
        submitted=float(job.submit_time or 0),
        held=str(getattr(job, "state_reason", "")).replace(" ", "_").startswith(HELD),
    )


def _ended(job: Any) -> str:
    """Name the state behind COMPLETING by the same traces as slurm_text does; time limits are in minutes."""
    if job.preempt_time:
        return "PREEMPTED"
    if getattr(job, "state_reason", None) == "TimeLimit":  # also at the end of a reservation
        return "TIMEOUT"
    limit = int(job.time_limit or 0) * 60
    if limit and int(job.run_time or 0) >= limit:
        return "TIMEOUT"
    if not job.end_time or (limit and job.end_time - (job.start_time or 0) >= limit):
        return "PENDING"
    return "CANCELLED"


def _node(node: Any) -> NodeInfo:
    return NodeInfo(
        name=node.name,
        state=str(node.state or "UNKNOWN"),
        reason=node.reason or "",
        address=node.address or node.name,
        port=int(node.port or 0) or SLURMD_PORT,
    )
