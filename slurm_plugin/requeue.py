"""Put a job back into the queue without its bad nodes, with the owner's rights alone.

Used by jit-srun, and by a rank on a surviving node when jit-srun is dead with its node.

Rule 1: a cancelled job is left alone, and a job that is already on its way, or running again, is not requeued twice.
Rule 2: nodes that the job already stays away from stay excluded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from slurm_plugin import outage
from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import ON_ITS_WAY, JobInfo, SlurmError

REFUSALS: Final = 60.0  # seconds to go on while Slurm refuses: it does while a job is on its way out of its nodes
# A job that is still completing may not be told to start "now" (Slurm overwrites that), but a little later is kept.
START: Final = "now+3"
REQUESTS: Final = 3  # slurmctld may be killed again
ENDED: Final = frozenset(["CANCELLED", "DEADLINE"])


def requeue_job(
    slurm: Slurm,
    job_id: str,
    exclude: Iterable[str],
    log: Callable[[str], None],
    *,
    restarts: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue a job and keep it off the nodes in `exclude`; True when it is on its way.

    Args:
        job_id: "123", or "100_7" for a task of an array.
        log: gets one line for every thing done or refused.
        restarts: the job's restart count as the caller knows it; a higher one means that somebody was faster.
    """
    away = tuple(dict.fromkeys(exclude))

    def ask(question: Callable[[], JobInfo | None]) -> JobInfo | None:
        return outage.ask(slurm, question, log, refusals=REFUSALS, clock=clock, sleep=sleep)

    try:
        job = ask(lambda: _put_back(slurm, job_id, restarts, log))
    except SlurmError as error:
        log(f"job {job_id} cannot be requeued: {error}")
        return False
    if job is None:
        return False
    if job.state == "RUNNING" and restarts is not None and job.restarts > restarts:
        log(f"job {job_id} is already running again")
        return True
    merged = fitting(slurm, job, away, log)
    change = tuple(merged) if merged != job.excluded else None
    without = f" without {','.join(merged)}" if merged else ""
    start = "" if job.expedited else START  # a time of ours would only make it wait for Slurm's next look at the queue
    try:
        ask(lambda: slurm.update(job_id, start_time=start, exclude=change))
    except SlurmError as error:
        log(f"job {job_id} goes back to the queue; it could not be told to start soon{without}: {error}")
        return True
    log(f"job {job_id} goes back to the queue{without}")
    return True


def requeue_from_inside(
    slurm: Slurm,
    job_id: str,
    exclude: Iterable[str],
    log: Callable[[str], None],
    *,
    restarts: int,
    ends: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue a job from its own script, and ask again when Slurm has forgotten it: see `requeue_job`.

    A slurmctld that is killed within seconds of a request starts with an older state, in which the job just runs.

    Args:
        ends: waits a moment for Slurm to end this script; False when it does not.
    """
    for _ in range(REQUESTS):
        if not requeue_job(slurm, job_id, exclude, log, restarts=restarts, clock=clock, sleep=sleep):
            return False
        if ends():
            return True
        try:
            job = outage.ask(slurm, lambda: slurm.job(job_id), log, clock=clock, sleep=sleep)
        except SlurmError:
            return True
        if job.state != "RUNNING" or job.restarts > restarts:
            return True
        log(f"Slurm has forgotten that job {job_id} goes back to the queue; asking again")
    return False


def bring_back(
    slurm: Slurm,
    job_id: str,
    exclude: Iterable[str],
    log: Callable[[str], None],
    *,
    restarts: int,
    requeues: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """See to a job whose jit-srun is dead with its node: back into the queue, or to its end if it may not go there.

    Left alone it would hold its nodes until its time is over: with --no-kill Slurm lets it run without its script.
    Returns False when Slurm could not be told.
    """

    def end() -> bool:
        job = slurm.job(job_id)
        if restarts < requeues and job.may_requeue:
            return False
        if job.state not in ENDED | ON_ITS_WAY and job.restarts <= restarts:
            why = f"the limit of {requeues} requeues is reached" if job.may_requeue else "--no-requeue"
            log(f"{why}; ending job {job_id}, which has lost its script")
            slurm.cancel(job_id)
        return True

    try:
        if not outage.ask(slurm, end, log, refusals=REFUSALS, clock=clock, sleep=sleep):
            return requeue_job(slurm, job_id, exclude, log, restarts=restarts, clock=clock, sleep=sleep)
    except SlurmError as error:
        log(f"job {job_id} cannot be ended: {error}")
        return False
    return True


def fitting(slurm: Slurm, job: JobInfo, away: Collection[str], log: Callable[[str], None]) -> tuple[str, ...]:
    """Return the nodes that the job shall stay away from: those of before and `away`, if that leaves it enough.

    With too few left, or without one that the user named, Slurm would hold the job for ever (BadConstraints). Nodes
    that are dead it avoids by itself.
    """
    named = [n for n in away if n in job.required]
    if named:
        log(f"the job asks for {','.join(named)} by name, which therefore cannot be excluded")
    merged = tuple(dict.fromkeys([*job.excluded, *(n for n in away if n not in named)]))
    if merged == job.excluded:
        return merged  # the usual case, and one question less: all jobs of a site may be here at once
    try:
        nodes = slurm.partition_nodes(job.partition) if job.partition and job.width else ()
    except SlurmError:
        nodes = ()  # unknown
    if nodes and len(set(nodes) - set(merged)) < job.width:
        log(f"{job.width} nodes are needed and {job.partition} has {len(nodes)}: {','.join(away)} cannot be excluded")
        return job.excluded
    return merged


def _put_back(slurm: Slurm, job_id: str, restarts: int | None, log: Callable[[str], None]) -> JobInfo | None:
    job = slurm.job(job_id)
    if job.state in ENDED:
        log(f"job {job_id} was ended from outside ({job.state}); not requeued")
        return None
    if job.state not in ON_ITS_WAY and not (restarts is not None and job.restarts > restarts):
        slurm.requeue(job_id)
    return job
