"""Measure how long the survivors need to know of a failure: a killed process, a node without power.

One job on a real cluster; each failure ends one launch of it, and the spare nodes replace those that were switched off.
From the moment before the kill, or before the power is cut, to `detected` of the manifest: the first survivor's word.
"""

from __future__ import annotations

from collections.abc import Callable

from bench import jobs
from bench.moments import detected_after
from bench.rows import Row, row


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    kills, offs = (2, 2) if quick else (5, 3)
    found: dict[str, list[float]] = {"kill": [], "poweroff": []}
    with jobs.cluster_of(jobs.RANKS + offs + 1) as cluster:
        keep = f"keep={kills + offs + 1}"
        job = jobs.submit(cluster, "detect", nodes=jobs.RANKS + offs + 1, options=keep)
        for attempt, kind in enumerate(_order(kills, offs)):
            job.wait_training(attempt, jobs.BEFORE)
            failed = job.kill(attempt) if kind == "kill" else job.power_off(attempt)
            job.wait("the commit", lambda a=attempt: any(m["attempt"] == a for m in job.manifests()))  # type: ignore[misc]
            found[kind].append(detected_after(failed, attempt, job.manifests()))
            say(f"detect: {kind}: {found[kind][-1]:.3f} s")
        job.cancel()
    return [
        row("detect_kill_s", "s", found["kill"], target=0.1),
        row("detect_poweroff_s", "s", found["poweroff"], target=3.0),
    ]


def _order(kills: int, offs: int) -> list[str]:
    """Take turns."""
    turns = []
    for turn in range(max(kills, offs)):
        turns += ["kill"] * (turn < kills) + ["poweroff"] * (turn < offs)
    return turns
