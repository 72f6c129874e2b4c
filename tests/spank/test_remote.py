"""slurmstepd on a real cluster: the spool, and that nothing of ours can hurt a node or a job."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_plugin import contract

pytestmark = pytest.mark.slurm
Site = Any  # conftest.Site


def test_spool_is_roots(site: Site) -> None:
    """Folders 0700 and the file 0600, all of root, though the job's user is another; signals and codes are raw."""
    body = "#!/bin/bash\nsrun -n2 bash -c 'exit $((3 * SLURM_PROCID))'\nexit 5\n"
    job = site.cluster.sbatch("--jit-ckpt=dir=user", "-N1", "-n2", "-o", "user.out", script=body, user=True)
    site.cluster.wait_state(job, "FAILED", 120)
    folder = f"{contract.SPOOL}/{job}"
    shown = site.cluster.on("n1", "stat", "-c", "%a %U", contract.SPOOL, folder, f"{folder}/{contract.TASKS}").stdout
    assert shown.splitlines() == ["700 root", "700 root", "600 root"]
    lines = sorted(line.split() for line in site.spool(job, "n1"))
    assert [line[:3] for line in lines] == [
        ["0", "0", "0"],
        ["0", "1", str(3 << 8)],
        [str(0xFFFFFFFB), "0", str(5 << 8)],
    ]
    assert all(len(line) == 4 and int(line[3]) > 1_600_000_000 for line in lines)


def test_what_a_failed_task_says_of_its_jit_srun(site: Site) -> None:
    """A dead host, another job's number, programs of its own: looked into as the owner, and no job is touched.

    It ends within a second or two: by Slurm's word, not by the job's, its batch host is alive.
    """
    other = site.cluster.sbatch("-H", script="#!/bin/bash\ntrue\n")
    forged = f"SLURM_JOB_ID={other} SLURM_JOBID={other} SLURM_RESTART_COUNT=0 LD_PRELOAD=/x PYTHONPATH=/x PATH=/x"
    # It knows the job's folder. The hosts share the machine's processes: those of other clusters are seen here too.
    seen_by_ps = f"ps -eo user:20,args | grep '[o]rphan import main' | grep -F dir={site.pfs}/alone >>seen-orphan"
    body = (
        f"#!/bin/bash\nexport JIT_CKPT_LAUNCHER=203.0.113.1:1:ab\n"
        f"until [ -e enough ] || [ $SECONDS -gt 120 ]; do {seen_by_ps}; done &\n"
        f"/usr/bin/srun -N1 -n2 /usr/bin/env {forged} /bin/sh -c 'exit 7'\n"
        "until [ -s seen-orphan ] || [ $SECONDS -gt 60 ]; do sleep 0.2; done\n"
        "sleep 2; touch enough; wait; sort -u seen-orphan\n"
    )
    job = site.cluster.sbatch("--jit-ckpt=dir=alone", "-N1", "-n2", "-o", "user.out", script=body, user=True)
    site.cluster.wait_state(job, "COMPLETED", 180)
    (seen,) = [line.split() for line in (site.pfs / "user.out").read_text().splitlines() if "import main" in line]
    assert seen[0] == "jituser"
    assert job in seen
    assert other not in seen
    assert {site.cluster.job(name)["Restarts"] for name in (job, other)} == {"0"}
    assert set(site.cluster.nodes().values()) <= {"idle", "completing", "allocated", "mixed"}
    site.run("scancel", other)


def test_hostile_spool(site: Site) -> None:
    """A link in the spool's place: the job ends well, nothing is written through it, the node stays in service."""
    trap = f"mv {contract.SPOOL} /var/spool/aside; mkdir -m 700 /var/spool/victim; ln -s victim {contract.SPOOL}"
    site.cluster.on("n1", "sh", "-c", f"mkdir -p -m 700 {contract.SPOOL}; {trap}")
    try:
        job = site.job("srun -n1 true && echo fine", "--jit-ckpt", "-w", "n1")
        assert "fine" in site.output(job)
        assert site.cluster.job(job)["JobState"] == "COMPLETED"
        assert site.cluster.on("n1", "ls", "/var/spool/victim").stdout == ""
        assert site.cluster.nodes()["n1"] in ("idle", "completing", "allocated", "mixed")
    finally:
        site.cluster.on(
            "n1", "sh", "-c", f"rm {contract.SPOOL}; mv /var/spool/aside {contract.SPOOL}; rmdir /var/spool/victim"
        )


def test_plugin_gone_under_a_waiting_job(site: Site) -> None:
    """The library vanishes while a job waits: the job runs, no node is drained, sbatch goes on working."""
    library = next(path for path in site.cluster.settings.folder.rglob("jit_ckpt.so") if "plugin" in path.parts)
    waiting = site.cluster.sbatch(
        "-H", "--jit-ckpt", f"--output={site.pfs}/%j.out", script="#!/bin/bash\nsrun -n1 echo ran\n"
    )
    library.rename(library.with_suffix(".away"))
    try:
        site.run("scontrol", "release", waiting)
        site.cluster.wait_state(waiting, "COMPLETED", 120)
        assert "ran" in site.output(waiting)
        plain = site.job("echo plain")
        assert site.output(plain).strip() == "plain"
        assert set(site.cluster.nodes().values()) <= {"idle", "completing", "allocated", "mixed"}
        assert site.run("sbatch", "--jit-ckpt", "--wrap=true").returncode != 0
    finally:
        library.with_suffix(".away").rename(library)
