"""HealthCheckProgram: the same checks as in Prolog and Epilog, by slurmd's clock, on busy and idle nodes; as root.

Rule: what it finds leads where the epilog's finds lead, without a job's name. Whatever becomes of that, the jobs here
      whose batch node is silent are looked after.
"""

from __future__ import annotations

import sys

from slurm_plugin import guard, kernel_log
from slurm_plugin.occasion import Occasion, act, kernel_begin, kernel_judged, verdict_of
from slurm_plugin.occasion import main as run_hook


def main() -> int:
    """Run as Slurm's HealthCheckProgram."""
    return run_hook("health-check", check)


def check(occasion: Occasion) -> int:
    """Look at the node and act on it, then at its jobs; always 0, Slurm makes nothing of another code."""
    try:
        judge(occasion)
    finally:
        if occasion.spool:
            try:
                guard.look(occasion.spool)
            except OSError as error:
                occasion.say(f"the batch nodes of the jobs here are not watched: {error}")
    return 0


def judge(occasion: Occasion) -> None:
    """Look at the node and act on it."""
    since = kernel_begin(occasion)
    seen = occasion.look(since)
    told = act(occasion, verdict_of(occasion, seen.findings))
    if since is None:  # the first time in this boot: what is in the log was there before us
        kernel_judged(occasion, _end(occasion))
    elif told:
        kernel_judged(occasion, seen.last)


def _end(occasion: Occasion) -> int | None:
    try:
        return kernel_log.end(occasion.given.get("kmsg", kernel_log.DEVICE))
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
