"""Prolog on a node, as root before every job: refuse the job if the node is bad, and note what later hooks need.

Rule: it judges the node as it is now. What happened before this job is not this job's matter, and a fault that was
      repaired leaves its traces in the kernel's log until the next boot.
"""

from __future__ import annotations

import sys

from slurm_plugin import contract, health, kernel_log
from slurm_plugin.evidence import BAD
from slurm_plugin.occasion import BEGAN, Occasion
from slurm_plugin.occasion import main as run_hook
from slurm_plugin.spool import Spool, SpoolError


def main() -> int:
    """Run as Slurm's Prolog."""
    return run_hook("prolog", refuse)


def refuse(occasion: Occasion) -> int:
    """Look at the node; EXIT_NODE_BAD lets slurmd drain it and requeue the job."""
    verdict = health.judge(occasion.look().findings)
    if verdict.state != health.HEALTHY:
        occasion.say(f"{occasion.node} is {verdict.state}: {verdict.evidence} (before job {occasion.job})")
    if verdict.state == BAD and occasion.site.drain:
        occasion.mark(verdict)  # for the reason: slurmd's own is only "Prolog error"
        return contract.EXIT_NODE_BAD
    if verdict.state == BAD:
        occasion.say("not refused: drain = off")
    _note_beginning(occasion)  # last: no epilog clears the spool of a job that was refused
    if occasion.spool and occasion.environ.get(contract.ENV_OPTIONS_HOOK):
        _note_guard(occasion, occasion.spool)
    return 0


def _note_beginning(occasion: Occasion) -> None:
    if not occasion.spool or not occasion.job:
        return
    try:
        position = kernel_log.Position(
            kernel_log.boot_id(), kernel_log.end(occasion.given.get("kmsg", kernel_log.DEVICE))
        )
        occasion.spool.write(BEGAN.format(job=occasion.job), kernel_log.write_position(position))
    except SpoolError as error:
        occasion.say(str(error))
    except OSError:
        pass  # no kernel log here (some containers); then it says nothing of any job


def _note_guard(occasion: Occasion, spool: Spool) -> None:
    from slurm_plugin import guard  # here: most jobs are none of ours

    try:
        guard.leave_note(spool, occasion.environ, occasion.node)
    except (SpoolError, OSError) as error:
        occasion.say(f"this node does not watch the batch node of job {occasion.job}: {error}")


if __name__ == "__main__":
    sys.exit(main())
