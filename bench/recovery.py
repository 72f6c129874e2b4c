"""Measure how long a job stands still after a failure, against the floor: a plain srun of the same script.

In turns, on one cluster: a job that loses a process and is relaunched in its allocation, a plain one, a job that loses
a process and goes through the queue. Then the same through the queue with the rights of the job's owner alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench import jobs
from bench.jobs import Job
from bench.moments import Recovered, first_update, recovered
from bench.rows import Row, differences, row
from testbed import Cluster

AFTER = 1  # updates of the launch after a failure that are waited for


@dataclass
class _Found:
    """The samples, in seconds."""

    floor: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)  # of a protected job, script to first update
    relaunch: list[Recovered] = field(default_factory=list)
    requeue: list[Recovered] = field(default_factory=list)
    hook: list[float] = field(default_factory=list)
    owner: list[float] = field(default_factory=list)


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    turns, owner_turns = (1, 1) if quick else (3, 2)
    found = _Found()
    with jobs.cluster_of(jobs.RANKS) as cluster:
        for turn in range(turns):
            _relaunch(cluster, turn, found)
            _floor(cluster, turn, found)
            _requeue(cluster, turn, found)
            killed, queued, floor = _waited(found.relaunch)[-1], _waited(found.requeue)[-1], found.floor[-1]
            say(f"recovery: turn {turn + 1} of {turns}: first replayed update after {killed:.1f} s, through the queue")
            say(f"          after {queued:.1f} s; a plain start of the script takes {floor:.1f} s to its first")
    with jobs.cluster_of(jobs.RANKS, controller_hook=False) as cluster:
        for turn in range(owner_turns):
            job, _ = _fail_into_queue(cluster, f"owner-{turn}")
            found.owner.append(_running_after_commit(job))
            job.cancel()
            say(f"recovery: without the controller hook running again after {found.owner[-1]:.1f} s")
    return _rows(found)


def _rows(found: _Found) -> list[Row]:
    relaunch = differences(_waited(found.relaunch), found.floor)
    requeue = differences(_waited(found.requeue), found.floor)
    lost = [float(r.lost) for r in found.relaunch + found.requeue]
    return [
        row("first_update_over_floor_s.relaunch", "s", relaunch, target=2.0),
        row("first_update_over_floor_s.requeue", "s", requeue),
        row("requeue_to_running_s.controller_hook", "s", found.hook, target=5.0),
        row("requeue_to_running_s.owner", "s", found.owner, target=35.0),
        row("minibatches_lost", "count", lost, target=0.0),
        row("floor_s", "s", found.floor),
        row("first_start_over_floor_s", "s", differences(found.start, found.floor)),
        row("failure_to_commit_s", "s", [r.committed - r.failed for r in found.relaunch]),
    ]


def _relaunch(cluster: Cluster, turn: int, found: _Found) -> None:
    job = jobs.submit(cluster, f"relaunch-{turn}", nodes=jobs.RANKS)
    job.wait_training(0, jobs.BEFORE)
    found.start.append(first_update(job.updates(), 0).time - job.starts()[0])
    failed = job.kill(0)
    job.wait_training(1, AFTER)
    job.cancel()
    found.relaunch.append(recovered(failed, 0, job.manifests(), job.updates()))


def _floor(cluster: Cluster, turn: int, found: _Found) -> None:
    job = jobs.submit(cluster, f"floor-{turn}", nodes=jobs.RANKS, options=None)
    job.wait_training(0, AFTER)
    found.floor.append(first_update(job.updates(), 0).time - job.starts()[0])
    job.cancel()


def _requeue(cluster: Cluster, turn: int, found: _Found) -> None:
    job, failed = _fail_into_queue(cluster, f"requeue-{turn}")
    job.wait_training(1, AFTER)
    job.cancel()
    found.requeue.append(recovered(failed, 0, job.manifests(), job.updates()))
    found.hook.append(_running_after_commit(job))


def _fail_into_queue(cluster: Cluster, name: str) -> tuple[Job, float]:
    """Kill a rank of a job that may not relaunch; return when its batch script runs again, and when it was killed."""
    job = jobs.submit(cluster, name, nodes=jobs.RANKS, options="relaunch=off")
    job.wait_training(0, jobs.BEFORE)
    failed = job.kill(0)
    job.wait("its second start", lambda: len(job.starts()) > 1, 180.0)
    return job, failed


def _running_after_commit(job: Job) -> float:
    committed: float = job.manifests()[0]["times"]["committed"]
    return job.starts()[1] - committed


def _waited(recoveries: list[Recovered]) -> list[float]:
    return [r.updated - r.failed for r in recoveries]
