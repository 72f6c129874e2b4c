"""See to a job whose jit-srun is dead with its node, when no rank could: in a container without Slurm, under torchrun.

    orphan JOB RESTARTS HOST NODES OPTIONS [idle]

The SPANK plugin starts it on some nodes of a step with a task that failed, outside of any container; `guard`, with
"idle", at every health check once the batch node was silent. With --no-kill Slurm lets such a job run on without its
script, on the nodes that are left, until its time is over.

Rule 1: it runs as the job's owner and does what that one could do by hand: its arguments are the job's own words.
Rule 2: while the node of jit-srun answers it does nothing; nor before Slurm too has lost it. Slurm is asked nothing
    where slurmd's usual port answers; where it does not, it may be a firewall, and Slurm knows the port.
Rule 3: with "idle" it looks once, and does nothing while a step runs: those ranks may be saving, and see to the job
    themselves.
Rule 4: nobody waits for it, and every wait here has a deadline. One for a job looks on a node, and only while it runs.
"""

from __future__ import annotations

import os
import re
import sys
import syslog
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from slurm_plugin import contract, hold, notice, outage
from slurm_plugin.requeue import bring_back
from slurm_plugin.slurm import JOB_ID, Slurm, check, open_slurm
from slurm_plugin.slurm_text import SLURMD_PORT, JobInfo, SlurmError, expand

DEADLINE: Final = 1800.0  # seconds for Slurm to notice that a node is dead: SlurmdTimeout, usually 300
PAUSE: Final = 5.0  # seconds between two looks
ALIVE: Final = frozenset(["RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING"])


@dataclass(frozen=True)
class Orphan:
    """A job.

    Attributes:
        job: how Slurm addresses it, or its own number.
        restarts: its life.
        node: the node of its batch script, and so of its jit-srun.
    """

    job: str
    restarts: int
    node: str
    options: contract.Options


def main() -> int:
    """Run as a program of the plugin's, or of `guard`."""
    try:
        job, restarts, host, nodes, text, *when = sys.argv[1:]
        if when not in ([], ["idle"]):
            raise ValueError(f"{when} is neither nothing nor idle")
        if not when and notice.responds(host, SLURMD_PORT):
            return 0
        options = contract.parse_options(text)
        orphan = Orphan(check(JOB_ID, job), int(restarts), expand(nodes)[0], options)
        if (here := hold.take(orphan.job, "guard" if when else "orphan")) is None:
            return 0  # a script may start any number of steps
        if when:
            time.sleep(os.getpid() % 50 / 10)  # health checks of many nodes begin at the same moment
        (see_to_idle if when else see_to)(open_slurm(), orphan, log)
        here.release()
    except Exception as error:
        log(f"orphan: {error!r}")
        return 1
    return 0


def see_to(
    slurm: Slurm,
    orphan: Orphan,
    log: Callable[[str], None],
    *,
    responds: Callable[[str, int], bool] = notice.responds,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the node is lost for Slurm too, then bring the job back without the nodes that do not answer.

    Returns False when there was nothing to do.
    """
    begin, ask = clock(), partial(outage.ask, slurm, log=log, clock=clock, sleep=sleep)
    try:
        node = ask(lambda: slurm.node(orphan.node))
        while clock() < begin + DEADLINE and not responds(node.address, node.port):
            job = ask(lambda: slurm.job(orphan.job))
            if not is_orphan(job, orphan):
                return False
            if job.state == "RUNNING" and is_lost(slurm, job, orphan.node):
                return bring(slurm, orphan, job, log, clock, sleep)
            sleep(PAUSE)
    except SlurmError as error:
        log(f"job {orphan.job}: {error}")
    return False


def see_to_idle(
    slurm: Slurm,
    orphan: Orphan,
    log: Callable[[str], None],
    *,
    responds: Callable[[str, int], bool] = notice.responds,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Bring the job back if Slurm has lost its batch node and no step of it is left, as things stand; Rule 3.

    A node that Slurm has taken out of the job may have booted since; its script is gone all the same.
    """
    ask = partial(outage.ask, slurm, log=log, clock=clock, sleep=sleep)
    try:
        job = ask(lambda: slurm.job(orphan.job))
        if job.state != "RUNNING" or not is_orphan(job, orphan):
            return False
        if orphan.node in job.nodes:
            if responds(orphan.node, SLURMD_PORT):
                return False  # it was busy once
            node = ask(lambda: slurm.node(orphan.node))
            if not node.lost or responds(node.address, node.port):
                return False
        if ask(lambda: slurm.running_steps(job.address)):
            return False
        return bring(slurm, orphan, job, log, clock, sleep)
    except SlurmError as error:
        log(f"job {orphan.job}: {error}")
    return False


def bring(
    slurm: Slurm,
    orphan: Orphan,
    job: JobInfo,
    log: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Bring the job back without its batch node and the others that do not answer."""
    log(f"job {job.address}: its jit-srun is dead with {orphan.node}, and nobody else has seen to it")
    away = [orphan.node, *silent(slurm, job)]
    limits = {"restarts": orphan.restarts, "requeues": orphan.options.requeues}
    return bring_back(slurm, job.address, away, log, **limits, clock=clock, sleep=sleep)


def is_orphan(job: JobInfo, orphan: Orphan) -> bool:
    """Say whether this is still the life of the job that began on that batch node."""
    began = job.batch and job.restarts <= orphan.restarts and job.batch_host in ("", orphan.node)
    return began and job.state in ALIVE


def is_lost(slurm: Slurm, job: JobInfo, node: str) -> bool:
    """Say whether Slurm has lost a node of the job: taken it out, or given it up."""
    return node not in job.nodes or slurm.node(node).lost


def silent(slurm: Slurm, job: JobInfo) -> tuple[str, ...]:
    """Return the nodes of a job that do not answer; one whose address cannot be found cannot be asked."""
    nodes = slurm.nodes(job.nodes)
    found = notice.resolve_all({name: n.address for name, n in nodes.items()})
    heard = notice.answering({name: (address, nodes[name].port) for name, address in found.items()})
    return tuple(name for name in found if name not in heard)


def log(text: str) -> None:
    """Write one line to the system's log."""
    syslog.openlog("jit-ckpt", syslog.LOG_PID, syslog.LOG_USER)
    syslog.syslog(syslog.LOG_NOTICE, re.sub(r"[^\x20-\x7e]", "?", text))


if __name__ == "__main__":
    sys.exit(main())
