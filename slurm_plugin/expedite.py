"""Choose what Slurm itself shall do with a job that loses a node: Cluster -> value of sbatch's --requeue.

Slurm 25.11 can bring a job back at once, before all others, when a node fails or an epilog finds one bad, if the site
enables it and the job asks for it (--requeue=expedite). Read in its release notes and tests, not seen: this project is
tested on older clusters.

Rule 1: pure; whoever submits hands the facts in.
Rule 2: what the user said about requeue is never changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

SINCE: Final = (25, 11)
ENABLED: Final = "enable_expedited_requeue"  # of SlurmctldParameters

Choice = Literal["", "plain", "expedite"]


@dataclass(frozen=True)
class Cluster:
    """What the choice rests on.

    Attributes:
        version: as `scontrol --version` has it, "slurm 25.11.1".
        parameters: SlurmctldParameters of `scontrol show config`.
        said: the user chose something about requeue (--requeue, --no-requeue, SBATCH_REQUEUE, SBATCH_NO_REQUEUE).
        epilog: our node epilog fails, and so tells Slurm, when it finds the node bad.
    """

    version: str
    parameters: str
    said: bool = False
    epilog: bool = True


def choose(cluster: Cluster) -> Choice:
    """Return what to ask sbatch for; "" leaves the user's words as they are.

    Without an epilog that fails on a bad node Slurm would take every failure for the script's own and hold the job.
    """
    if cluster.said:
        return ""
    if version(cluster.version) >= SINCE and ENABLED in _words(cluster.parameters) and cluster.epilog:
        return "expedite"
    return "plain"


def version(text: str) -> tuple[int, int]:
    """Read "slurm 25.11.1-2"; (0, 0) when it is none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def _words(parameters: str) -> set[str]:
    return {word.strip().lower().partition("=")[0] for word in parameters.split(",")}
