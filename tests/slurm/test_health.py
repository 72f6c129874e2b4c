"""Node health on a real cluster: who is refused, who is drained and for what, and who is left alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from testbed import Cluster

CHECK = """#!/bin/sh
touch {folder}/looked
[ ! -e {folder}/sick-$SLURMD_NODENAME ] || {{ echo "fan 3 stands still"; exit 1; }}
"""
SITE = "checks-dir = {folder}/checks.d\n"
FANS = "jit-ckpt: fans: fan 3 stands still"


class Ward:
    """A small cluster whose nodes fall ill when they are told to."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.settings.folder
        checks = self.folder / "checks.d"
        checks.mkdir(mode=0o755, exist_ok=True)
        (checks / "fans").write_text(CHECK.format(folder=self.folder))
        (checks / "fans").chmod(0o755)
        self.well()

    def well(self) -> None:
        """Make all nodes well, with the site's file as it should be."""
        for sick in self.folder.glob("sick-*"):
            sick.unlink()
        self.cluster.write_site(SITE.format(folder=self.folder))

    def sick(self, node: str) -> None:
        """Let a node's fan stand still."""
        (self.folder / f"sick-{node}").touch()

    def job(self, script: str, *args: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job with the option."""
        given = (f"--jit-ckpt=dir={self.cluster.pfs}/ckpt", "--output=/dev/null", *args)
        return self.cluster.sbatch(*given, env=env, script=f"#!/bin/sh\n{script}\n")

    def end(self, job: str) -> dict[str, str]:
        """Wait for a job's good end, and for its epilogs."""
        fields = self.cluster.wait_state(job, "COMPLETED", 60)
        self.wait("the epilogs", lambda: not {"completing"} & set(self.cluster.nodes().values()))
        return fields

    def reason(self, node: str) -> str:
        """Why a node is drained, "" if it is not."""
        shown = self.cluster.on("head", "sinfo", "-h", "-N", "-n", node, "-o", "%E").stdout.strip()
        return "" if shown == "none" else shown

    def log(self, node: str) -> str:
        """What the hooks of a node have written."""
        return self.cluster.on(node, "cat", "/var/log/jit-ckpt.log", check=False).stdout

    def lines_of_a_look(self, node: str) -> int:
        """How many lines its health check writes from one look's beginning to the next one's."""
        self.look()
        before = self.log(node).count("\n")
        self.look()
        return self.log(node).count("\n") - before

    def look(self) -> None:
        """Wait until a check begins."""
        looked = self.folder / "looked"
        looked.unlink(missing_ok=True)
        self.wait("look", looked.exists)

    @staticmethod
    def wait(what: str, there: Callable[[], bool], patience: float = 90.0) -> None:
        """Wait until it is so."""
        deadline = time.monotonic() + patience
        while not there():
            assert time.monotonic() < deadline, f"no {what} within {patience:g} s"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def hospital() -> Iterator[Ward]:
    """Three nodes with Prolog and Epilog."""
    with Cluster(f"health-{os.getpid()}", nodes=3, plugin=True) as up:
        yield Ward(up)


@pytest.fixture
def ward(hospital: Ward) -> Iterator[Ward]:
    """The same nodes, all well again after each test."""
    yield hospital
    hospital.well()
    hospital.cluster.heal()


def test_a_bad_node_is_refused_and_the_job_runs_elsewhere(ward: Ward) -> None:
    """Before it has begun; the node is drained with the evidence, and the job is not held."""
    ward.sick("n1")
    ran = ward.cluster.pfs / "ran"
    job = ward.job(f"hostname >>{ran}")
    ward.end(job)
    assert ran.read_text().split() == ["n2"]
    assert ward.reason("n1") == f"{FANS} job {job}"
    assert ward.cluster.nodes()["n1"].startswith("drain")


def test_a_node_that_falls_ill_is_drained_by_the_end_of_the_epilog(ward: Ward) -> None:
    """The job goes on to its end; its other nodes stay in service, whatever node its user names to our hooks."""
    names = {
        f"{prefix}{name}": "n1" for prefix in ("", "SPANK_", "SLURM_SPANK_") for name in ("SLURMD_NODENAME", "_NODE")
    }
    lies = {**names, "SLURM_JOB_ID": "1\n; touch /root/x", "PYTHONPATH": "/nowhere", "SPANK_PATH": "/nowhere"}
    job = ward.job("exec sleep 300", "--nodes=2", env=lies)
    ward.cluster.wait_state(job, "RUNNING", 30)
    ward.sick("n2")
    ward.cluster.on("head", "scancel", job)
    ward.wait("drain", lambda: ward.cluster.nodes()["n2"] == "drained")
    assert ward.reason("n2") == f"{FANS} job {job}"
    ward.wait("idle nodes", lambda: {ward.cluster.nodes()[n] for n in ("n1", "n3")} == {"idle"})
    assert ward.cluster.on("n2", "ls", "/var/spool/jit-ckpt").stdout.split().count(job) == 0


def test_an_administrators_drain_keeps_its_reason(ward: Ward) -> None:
    """Whatever we find there."""
    job = ward.job("exec sleep 300")
    ward.cluster.wait_state(job, "RUNNING", 30)
    ward.cluster.on("head", "scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=ticket 4711")
    ward.sick("n1")
    ward.cluster.on("head", "scancel", job)
    ward.wait("the end", lambda: ward.cluster.nodes()["n1"] == "drained")
    ward.wait("a line in the log", lambda: "left as it is" in ward.log("n1"))
    assert ward.reason("n1") == "ticket 4711"


def test_a_user_cannot_get_a_node_drained(ward: Ward) -> None:
    """Tasks that die of what broken hardware sends are counted once, and drain nothing."""
    for _ in range(2):
        script = "srun sh -c 'kill -BUS $$'; srun sh -c 'kill -KILL $$'; exit 0"
        ward.end(ward.job(script, "--ntasks=4", "--nodelist=n1"))
    assert set(ward.cluster.nodes().values()) == {"idle"}
    suspicion = ward.cluster.on("n1", "cat", "/var/spool/jit-ckpt/suspicion").stdout.splitlines()
    assert len(suspicion) == 1
    assert "SIGBUS" in suspicion[0]


def test_a_threshold_of_the_sites_own_drains_a_suspect(ward: Ward) -> None:
    """Counted by user: root's job and another user's are two."""
    ward.cluster.on("n1", "rm", "-f", "/var/spool/jit-ckpt/suspicion")
    ward.cluster.write_site(SITE.format(folder=ward.folder) + "suspect-threshold = 2\n")
    ward.end(ward.job("srun sh -c 'kill -SEGV $$'; exit 0", "--nodelist=n1"))
    assert ward.cluster.nodes()["n1"] == "idle"
    script = "#!/bin/sh\nsrun sh -c 'kill -SEGV $$'; exit 0\n"
    args = (f"--jit-ckpt=dir={ward.cluster.pfs}/ckpt-user", "--output=/dev/null", "--nodelist=n1")
    job = ward.cluster.sbatch(*args, user=True, script=script)
    ward.wait("drain", lambda: ward.cluster.nodes()["n1"] == "drained")
    assert ward.reason("n1").startswith("jit-ckpt: suspected 2 times, at last: rank 0 of step ")
    assert ward.reason("n1").endswith(f" died of SIGSEGV job {job}")


def test_a_site_that_only_watches_drains_nothing(ward: Ward) -> None:
    """drain = off: the job runs there, and the log tells what was found."""
    ward.cluster.write_site(SITE.format(folder=ward.folder) + "drain = off\n")
    ward.sick("n1")
    job = ward.job("exit 0", "--nodelist=n1")
    assert ward.end(job)["NodeList"] == "n1"
    assert set(ward.cluster.nodes().values()) == {"idle"}
    assert "not refused: drain = off" in ward.log("n1")
    assert "not drained: drain = off" in ward.log("n1")


SMI = """#!/bin/sh
cat <<END
Attached GPUs                             : 1
GPU 00000000:17:00.0
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 0
            DRAM Uncorrectable            : 2
END
"""


def test_hardware_is_judged_by_its_own_tools(ward: Ward) -> None:
    """What nvidia-smi tells of a GPU, a file system that is gone: the job runs on the node that has neither fault."""
    ward.cluster.write_site(SITE.format(folder=ward.folder) + "mounts = /var/spool/data\n")
    place = "mount -t tmpfs tmpfs /usr/local/bin; cat >/usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi"
    ward.cluster.on("n1", "sh", "-c", place, stdin=SMI)
    for node in ("n1", "n2", "n3"):
        ward.cluster.on(node, "mkdir", "-p", "/var/spool/data")
    ward.cluster.on("n3", "mount", "-t", "tmpfs", "tmpfs", "/var/spool/data")
    ward.cluster.on("n1", "mount", "-t", "tmpfs", "tmpfs", "/var/spool/data")
    try:
        job = ward.job("exit 0")
        assert ward.end(job)["NodeList"] == "n3"
        assert ward.reason("n1") == f"jit-ckpt: GPU 00000000:17:00.0: 2 uncorrectable ECC errors job {job}"
        assert ward.reason("n2") == f"jit-ckpt: /var/spool/data is not mounted job {job}"
    finally:
        ward.cluster.on("n1", "umount", "-l", "/usr/local/bin")
        for node in ("n1", "n3"):
            ward.cluster.on(node, "umount", "-l", "/var/spool/data")


BROKEN = {
    "n1": "umount -l /var/spool/jit-ckpt 2>/dev/null; mkdir -p /var/spool/jit-ckpt; "
    "mount -t tmpfs -o ro,mode=0700 tmpfs /var/spool/jit-ckpt",
    "n2": "mkdir -p /var/spool/jit-ckpt; mount -t tmpfs -o size=4k,nr_inodes=2,mode=0700 tmpfs /var/spool/jit-ckpt; "
    "head -c 4096 /dev/zero >/var/spool/jit-ckpt/full || true",
    "n3": "rm -rf /var/spool/jit-ckpt; echo >/var/spool/jit-ckpt; ln -sf /etc/passwd /var/log/jit-ckpt.log",
}
MENDED = "umount -l /var/spool/jit-ckpt; rm -rf /var/spool/jit-ckpt /var/log/jit-ckpt.log"


def test_nothing_broken_of_ours_hurts_a_node(ward: Ward) -> None:
    """Spool read-only, full or a file; site's file malformed or open to all; no Python: jobs run, nodes are idle."""
    for node, command in BROKEN.items():
        ward.cluster.on(node, "sh", "-c", command)
    file = ward.cluster.settings.site_file
    try:
        for text, mode in (
            ("", 0o644),
            ("no such key\n", 0o644),
            ("drain = on\n", 0o666),
            ("python = /no/such\n", 0o644),
        ):
            ward.cluster.write_site(text)
            file.chmod(mode)
            ward.end(ward.job("srun -N3 true", "--nodes=3"))
            assert set(ward.cluster.nodes().values()) == {"idle"}, text
    finally:
        for node in BROKEN:
            ward.cluster.on(node, "sh", "-c", MENDED, check=False)
    assert "jit-ckpt" not in Path("/etc/passwd").read_text()


def test_the_health_check_drains_an_idle_node_and_never_undrains() -> None:
    """By slurmd's own clock; when the fault is gone the drain stays until somebody ends it."""
    with Cluster(f"watch-{os.getpid()}", nodes=1, plugin=True, health_check=2) as up:
        ward = Ward(up)
        ward.sick("n1")
        ward.wait("drain", lambda: up.nodes()["n1"] == "drained")
        assert ward.reason("n1") == FANS
        ward.well()
        ward.wait("look that writes nothing", lambda: ward.lines_of_a_look("n1") == 0)  # one was perhaps under way
        assert up.nodes()["n1"] == "drained"
