"""spares=K where the site's job_submit.lua adds the spare nodes: the user asks for what the ranks need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testbed import Cluster
from testbed.plugin import REPO


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """A cluster whose slurmctld runs packaging/job_submit.lua."""
    with Cluster(f"lua-{os.getpid()}", nodes=4, plugin=True, site="adds-spares = on\n") as up:
        shutil.copy(REPO / "packaging" / "job_submit.lua", up.settings.folder / "etc" / "slurm")
        up.settings = replace(up.settings, conf=("JobSubmitPlugins=lua",))
        up.install_plugin()  # writes slurm.conf anew and restarts the daemons
        yield up


@pytest.mark.parametrize(
    ("given", "held", "ranks"),
    [
        (["-N2", "--ntasks-per-node=2"], 3, 4),
        (["-N2", "-n4"], 3, 4),
        (["-N3"], 4, 3),
        (["-N2-2", "-n2", "-c2"], 3, 2),
    ],
)
def test_spare_nodes_come_on_top(site: Cluster, given: list[str], held: int, ranks: int) -> None:
    """The job has one node more; plain srun in its script runs the ranks that were asked for."""
    out = site.pfs / f"{held}-{ranks}{given[-1]}"
    script = (
        f"#!/bin/bash\nscontrol show hostnames >{out}.nodes\nsrun hostname >{out}.ranks\n"
        f'echo "$SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_NTASKS" >{out}.sizes\n/usr/bin/srun hostname >{out}.real\n'
    )
    job = site.sbatch(f"--jit-ckpt=dir={site.pfs}/ck,spares=1", *given, "-o", f"{out}.log", script=script)
    site.wait_state(job, "COMPLETED", 60)
    assert len(lines(out, "nodes")) == held
    assert len(lines(out, "ranks")) == ranks, Path(f"{out}.log").read_text()
    assert len(set(lines(out, "ranks"))) == held - 1
    assert (len(lines(out, "real")), len(set(lines(out, "real")))) == (ranks, held - 1), "srun itself takes any of them"
    assert lines(out, "sizes")[:2] == [str(held - 1)] * 2
    assert lines(out, "sizes")[2:] in ([str(ranks)], [])


def test_other_jobs_are_left_alone(site: Cluster) -> None:
    """No option, no spares: as many nodes as asked; spares without a number of nodes: said, not refused."""
    for given in ([], [f"--jit-ckpt=dir={site.pfs}/ck"]):
        job = site.sbatch(*given, "-N2", "-o", "/dev/null", script="#!/bin/sh\n")
        assert site.job(job)["NumNodes"] in ("2", "2-2")
    line = ["sbatch", f"--jit-ckpt=dir={site.pfs}/ck,spares=1", "-n2", "-o", "/dev/null"]
    done = site.on("head", *line, stdin="#!/bin/sh\n")
    assert "ask for those that the ranks need with --nodes" in done.stderr


def lines(out: Path, kind: str) -> list[str]:
    return Path(f"{out}.{kind}").read_text().split()
