"""See to a job whose jit-srun is dead with its node, for ranks that cannot reach Slurm themselves: in a container, say.

    orphan JOB RESTARTS OPTIONS

The SPANK plugin starts it on the node of a rank that left with EXIT_ORPHANED, outside of any container.

Rule 1: it runs as the job's owner and does what that one could do by hand: its arguments are the job's own words.
Rule 2: nobody waits for it, and every wait here has a deadline.
"""

from __future__ import annotations

import os
import re
import sys
import syslog

from slurm_plugin import contract, notice, outage
from slurm_plugin.requeue import bring_back
from slurm_plugin.slurm import JOB_ID, Slurm, check, open_slurm
from slurm_plugin.slurm_text import SlurmError


def main() -> int:
    """Run as a program of the plugin's."""
    os.closerange(3, 1024)  # slurmstepd's
    try:
        job, restarts, text = sys.argv[1:4]
        see_to(open_slurm(), check(JOB_ID, job), int(restarts), contract.parse_options(text))
    except Exception as error:
        log(f"{error!r}")
        return 1
    return 0


def see_to(slurm: Slurm, job: str, restarts: int, options: contract.Options) -> bool:
    """Bring the job back without the nodes that do not answer."""
    log(f"job {job}: its jit-srun is dead with its node, and its ranks cannot reach Slurm; doing it for them")
    return bring_back(slurm, job, silent(slurm, job), log, restarts=restarts, requeues=options.requeues)


def silent(slurm: Slurm, job: str) -> tuple[str, ...]:
    """Return the nodes of a job that do not answer."""
    try:
        names = outage.ask(slurm, lambda: slurm.job(job).nodes, log)
        nodes = slurm.nodes(names)
    except SlurmError:
        return ()  # unknown; Slurm itself avoids those that it knows to be dead
    answering = notice.answering({name: (notice.resolve(n.address), n.port) for name, n in nodes.items()})
    return tuple(name for name in nodes if name not in answering)


def log(text: str) -> None:
    """Write one line to the system's log."""
    syslog.openlog("jit-ckpt", syslog.LOG_PID, syslog.LOG_USER)
    syslog.syslog(syslog.LOG_NOTICE, re.sub(r"[^\x20-\x7e]", "?", text))


if __name__ == "__main__":
    sys.exit(main())
