"""EpilogSlurmctld: a requeued jit-ckpt job starts at once, and not on the nodes that have just failed under it.

Runs as SlurmUser on the controller when a job has left its nodes. Slurm would let a requeued job wait for two minutes.

Rule 1: it touches no job but the one it was started for, and that one only if it was submitted with --jit-ckpt.
Rule 2: slurmctld waits for nothing: packaging/wrapper starts this apart from it, and it ends after a deadline.
Rule 3: it always ends with 0.
"""

from __future__ import annotations

import os
import re
import sys
import syslog
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from slurm_plugin import contract, outage
from slurm_plugin.requeue import fitting
from slurm_plugin.slurm import JOB_ID, Slurm, open_slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError, expand

DEADLINE: Final = 900.0  # seconds of looking at all: a job with a dead node completes only after SlurmdTimeout (300 s)
# A job whose nodes all live is pending again after one or two seconds, so nobody looks before. Then seconds between two
# looks: half of the time spent so far, within these; of a hundred jobs on their way out each look is two requests.
FIRST: Final = 1.0
PAUSES: Final = (0.5, 5.0)
REFUSALS: Final = 10.0  # seconds to go on while Slurm refuses the change
# slurmd refuses, as revoked, what is started within the second in which it ended the job before; clocks differ too.
REVOKED: Final = 2.0

T = TypeVar("T")


def main() -> int:
    """Run as Slurm's EpilogSlurmctld."""
    try:
        job = job_of(os.environ)
        done = job and hasten(
            open_slurm(), job, expand(os.environ.get("SLURM_JOB_NODELIST", "")), requeues=limit(os.environ)
        )
        if done:
            log(done)
    except Exception as error:  # Rule 3
        log(f"job {os.environ.get('SLURM_JOB_ID', '')}: {error!r}")
    return 0


def job_of(environ: Mapping[str, str]) -> str:
    """Return how Slurm addresses the job of this hook, "" when it is none of ours."""
    if not environ.get(contract.ENV_OPTIONS_HOOK):
        return ""
    job = environ.get("SLURM_JOB_ID", "")
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    if array:
        job = f"{array}_{task}"
    return job if JOB_ID.fullmatch(job) else ""


def limit(environ: Mapping[str, str]) -> int:
    """Return how often the job may go back to the queue; a text that cannot be read gives the default."""
    try:
        return contract.parse_options(environ[contract.ENV_OPTIONS_HOOK]).requeues
    except (KeyError, contract.OptionError):
        return contract.Options.requeues


def hasten(
    slurm: Slurm,
    job_id: str,
    nodes: tuple[str, ...],
    *,
    requeues: int = contract.Options.requeues,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until the job is pending again, then let it start now without its sick nodes; return what was done.

    A job that Slurm has held because it could not be launched (a node or slurmctld was too busy) is released.

    Returns "" for a job that does not come back.
    """

    def ask(question: Callable[[], T], refusals: float) -> T:
        return outage.ask(slurm, question, log, refusals=refusals, outage=DEADLINE, clock=clock, sleep=sleep)

    begin = clock()
    sleep(FIRST)
    waited = False
    while (spent := clock() - begin) < DEADLINE:
        try:
            job = ask(lambda: slurm.job(job_id), 0.0)
        except SlurmError:
            return ""  # gone from Slurm's memory: nothing to bring forward
        if not job.completing and job.state == "PENDING":
            if waited or job.restarts == 0:
                if job.held and job.restarts > requeues:
                    return f"job {job_id} could not be launched and stays held: {requeues} requeues are over"
                start = partial(_start_now, slurm, job_id, job, nodes)
                return ask(start, REFUSALS) if job.restarts > 0 else ""
            waited = True
            sleep(REVOKED)
            continue
        if not job.completing:
            return ""  # over, or running again already
        sleep(min(PAUSES[1], max(PAUSES[0], spent / 2)))
    return f"job {job_id} has not left its nodes within {DEADLINE:.0f} s; left alone"


def _start_now(slurm: Slurm, job_id: str, job: JobInfo, nodes: tuple[str, ...]) -> str:
    sick = [name for name, node in sorted(slurm.nodes(nodes).items()) if node.sick]
    exclude = fitting(slurm, job, sick, log)
    slurm.update(job_id, start_time="now", exclude=exclude if exclude != job.excluded else None)
    if job.held:
        slurm.release(job_id)
    released = ", released after a failed launch" if job.held else ""
    return f"job {job_id} may start now{released}" + (f" without {','.join(exclude)}" if exclude else "")


def log(text: str) -> None:
    """Write one line to the system's log."""
    syslog.openlog("jit-ckpt", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_INFO, "controller epilog: " + re.sub(r"[^\x20-\x7e]", "?", text))


if __name__ == "__main__":
    sys.exit(main())
