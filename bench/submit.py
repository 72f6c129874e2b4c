"""Measure what the plugin adds to Slurm's commands in jobs without the option: sbatch, and srun inside a job.

Each command is run with and without the plugin in plugstack.conf, taking turns, on a real cluster. The site's file is
as busy as it gets: the option is on for another partition, so each submission reads the file, its own command line and
the script.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from bench.rows import Row, differences, row
from testbed import Cluster

SITE = "enable = long,gpu\ndefault-partition = main\ndir = /scratch/%u\nmax-requeues = 20\nmounts = /,/tmp\n"
SCRIPT = "#!/bin/bash\n#SBATCH --job-name=bench\n#SBATCH --time=5 --nodes=1\ntrue\n"
TARGET = 5.0  # ms


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    rounds = 40 if quick else 150
    with Cluster("bench-submit", nodes=1, plugin=True, site=SITE) as cluster:
        plugstack = cluster.settings.folder / "etc" / "slurm" / "plugstack.conf"
        texts = {"with": plugstack.read_text(), "without": ""}
        (cluster.pfs / "job.sh").write_text(SCRIPT)
        found: dict[str, list[float]] = {}
        for turn in range(rounds):
            for way in sorted(texts, reverse=turn % 2 == 1):
                plugstack.write_text(texts[way])
                _timed(found, f"sbatch.{way}", cluster, "sbatch", "--hold", "--parsable", f"{cluster.pfs}/job.sh")
            cluster.on("head", "scancel", "--user=root")
            if turn % 50 == 49:
                say(f"submit: sbatch: {turn + 1} rounds")
        _steps(cluster, texts, rounds, found)
    names = ("sbatch", "srun", "cpu.sbatch", "cpu.srun")
    added = {name: differences(found[f"{name}.with"], found[f"{name}.without"]) for name in names}
    rows = [row(f"submit_ms.{name}.added", "ms", samples, target=TARGET) for name, samples in added.items()]
    return [*rows, *(row(f"submit_ms.{name}", "ms", samples) for name, samples in sorted(found.items()))]


def _steps(cluster: Cluster, texts: dict[str, str], rounds: int, found: dict[str, list[float]]) -> None:
    """Time steps of one running job that does not have the option."""
    plugstack = cluster.settings.folder / "etc" / "slurm" / "plugstack.conf"
    job = cluster.sbatch("--jit-ckpt=off", script="#!/bin/sh\nsleep 3600\n")
    cluster.wait_state(job, "RUNNING", 30)
    for turn in range(rounds):
        for way in sorted(texts, reverse=turn % 2 == 1):
            plugstack.write_text(texts[way])
            _timed(found, f"srun.{way}", cluster, "srun", f"--jobid={job}", "--overlap", "--mpi=none", "true")
    plugstack.write_text(texts["with"])
    cluster.on("head", "scancel", job)


def _timed(found: dict[str, list[float]], name: str, cluster: Cluster, *command: str) -> None:
    """Note the milliseconds of one command on the head: by the clock, and of processor time."""
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    cluster.on("head", *command)
    found.setdefault(name, []).append(1000 * (time.monotonic() - begin))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    found.setdefault(f"cpu.{name}", []).append(1000 * cpu)
