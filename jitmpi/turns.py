"""Nodes of a step and the clock -> how long a rank waits before MPI_Init, so that two nodes do not speak at once.

Slurm's pmix plugin hangs there (seen with 22.05 and 24.11): when the first messages of two nodes cross, one of the two
has to connect, and both find that it is the other's turn, since a number in the job is compared with one in the step.
It takes a step of two nodes whose first is not the job's first: a relaunch without the first node, or a second step.
Three and more nodes send their first messages around a ring, where none meets another.

Rule: the nodes of such a step begin half a period apart by the wall clock: they cannot ask yet.
"""

from __future__ import annotations

from typing import Final

from jitmpi.config import Settings
from slurm_plugin.slurm_text import SlurmError, expand

PERIOD: Final = 2.0  # seconds; half of it is what one node may be late, and how far their clocks may be apart
OPEN: Final = 0.2  # seconds, from its moment on, in which a node still begins


def wait(settings: Settings, now: float) -> float:
    """Return the seconds to wait before MPI_Init; `now` is time.time()."""
    if not settings.mpi_type.startswith("pmix"):
        return 0.0
    try:
        step, job = expand(settings.step_nodes), expand(settings.job_nodes)
    except SlurmError:
        return 0.0
    if len(step) != 2 or settings.node not in step or job[:1] in ((), step[:1]):
        return 0.0
    since = (now - step.index(settings.node) * PERIOD / 2) % PERIOD
    return 0.0 if since < OPEN else PERIOD - since
