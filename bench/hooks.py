"""Measure what every job on a node waits for: Prolog and Epilog of a healthy node, as slurmd starts them.

Run one after the other on a node of a real cluster, between its jobs; a bare start of the interpreter beside them tells
how much of that is ours. None of the three asks Slurm anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.rows import Row, row
from testbed import Cluster

NODE = "n1"
PYTHON = ("/usr/bin/python3", "-I", "-B", "-c", "pass")


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    turns = 7 if quick else 30
    took: dict[str, list[float]] = {"prolog": [], "epilog": [], "python": []}
    with Cluster("bench", 1, plugin=True) as cluster:
        hooks = cluster.settings.folder / "hooks"
        lines = {"prolog": (str(hooks / "prolog"),), "epilog": (str(hooks / "epilog"),), "python": PYTHON}
        for turn in range(turns + 1):
            # a job's number that Slurm has not given yet: its folder in the spool is nobody's
            env = {"SLURM_JOB_ID": str(4_000_000 + turn), "SLURM_JOB_UID": "0", "SLURMD_NODENAME": NODE}
            for name, line in lines.items():
                begin = time.monotonic()
                cluster.on(NODE, *line, env=env)
                if turn:  # the first one reads its files from the disk
                    took[name].append(time.monotonic() - begin)
    say(f"hooks: {turns} times each")
    return [
        row("prolog_s", "s", took["prolog"], target=0.3),
        row("epilog_s", "s", took["epilog"], target=0.3),
        row("python_start_s", "s", took["python"]),
    ]
