"""The promises of the test bed itself. The other tests believe it, so it is tested on the real thing too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import Cluster, TestbedError, namespaces
from testbed.commands import wait_for
from testbed.namespaces import NETNS, RUN
from testbed.settings import DATA

PEER = """
import socket, sys, time
if sys.argv[1] == "listen":
    s = socket.create_server(("0.0.0.0", 7000)); print("ready", flush=True); c, _ = s.accept(); time.sleep(300)
s = socket.create_connection(("n2", 7000), timeout=10); print("ready", flush=True)
sys.stdin.readline()
s.settimeout(3)
try:
    print("end" if s.recv(1) == b"" else "data", flush=True)
except TimeoutError:
    print("silence", flush=True)
sys.stdin.readline()
s.settimeout(20); s.send(b"x")
try:
    print("end" if s.recv(1) == b"" else "data", flush=True)
except ConnectionResetError:
    print("reset", flush=True)
"""


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """A cluster of two nodes whose nodes these tests may hurt."""
    with Cluster(f"bed-{os.getpid()}", nodes=2, conf=["SlurmdTimeout=20"]) as up:
        yield up


def traces(name: str) -> list[str]:
    """Everything of a cluster that can be found on this machine."""
    found = [str(p) for p in NETNS.glob(f"{name}.*")]
    found += [m for root in (RUN, DATA, NETNS) for m in namespaces.mounts_below(root) if name in m]
    found += [str(p) for p in (RUN / name, RUN / f".{name}.lock", DATA / name) if p.exists()]
    inside = [p for p in Path("/proc").glob("[0-9]*/cmdline") if p.parent.name != str(os.getpid())]
    for path in inside:
        try:
            if f"{DATA}/{name}/" in path.read_text(errors="replace"):
                found.append(str(path))
        except OSError:  # ended meanwhile
            continue
    return found


def mounts_elsewhere() -> list[str]:
    """The mount points of this machine outside the folders in which clusters, of other tests too, come and go."""
    return [m for m in namespaces.mounts_below(Path("/")) if not m.startswith((f"{RUN}/", f"{DATA}/", f"{NETNS}/"))]


def inodes(hosts: tuple[namespaces.Host, ...]) -> set[int]:
    """The network namespaces of these hosts."""
    return {os.stat(h.handle("net")).st_ino for h in hosts}


def living_in(networks: set[int]) -> list[str]:
    """The processes in these network namespaces."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.stat(path).st_ino in networks:
                found.append(str(path))
        except OSError:
            continue
    return found


def test_a_job_runs_on_both_nodes_as_root_and_as_user(small: Cluster) -> None:
    """Jobs run on separate hosts, as root and as an unprivileged user, in the shared folder."""
    for user in (False, True):
        script = "#!/bin/bash\nsrun bash -c 'echo $(hostname) $(id -un) $(pwd)'\n"
        job = small.sbatch("-N2", "--output=out-%j", script=script, user=user)
        small.wait_state(job, "COMPLETED", 60)
        lines = sorted((small.pfs / f"out-{job}").read_text().splitlines())
        who = "jituser" if user else "root"
        assert lines == [f"n1 {who} {small.pfs}", f"n2 {who} {small.pfs}"]
    small.wait_idle(90)


def test_hosts_have_their_own_files_and_the_machine_keeps_its_own(small: Cluster) -> None:
    """/tmp, /dev/shm and /var/spool belong to one host; all see this checkout; the machine's /etc stays as it was."""
    for folder in ("/tmp", "/dev/shm", "/var/spool"):
        small.on("n1", "touch", f"{folder}/only-n1")
        assert small.on("n2", "test", "-e", f"{folder}/only-n1", check=False).returncode == 1
        assert not Path(folder, "only-n1").exists()
    small.on("n2", "test", "-e", __file__)
    small.on("n2", "test", "-x", sys.executable, user=True)
    small.on("n1", "getent", "hosts", "n2")
    assert "n2" not in Path("/etc/hosts").read_text().split()
    assert not Path("/etc/slurm/slurm.conf").exists() or small.name not in Path("/etc/slurm/slurm.conf").read_text()


def test_power_failure_sends_nothing(small: Cluster) -> None:
    """The peer of a powered-off node hears silence; after the node booted the old connection is reset, never closed."""
    server = small.popen("n2", sys.executable, "-c", PEER, "listen")
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    client = small.popen("n1", sys.executable, "-c", PEER, "connect", stdin=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdin is not None
    assert client.stdout.readline() == "ready\n"
    small.off("n2")
    server.communicate(timeout=10)
    assert server.returncode == -signal.SIGKILL
    assert small.power()["n2"] == "off"
    client.stdin.write("listen\n")
    client.stdin.flush()
    assert client.stdout.readline() == "silence\n"
    small.boot("n2")
    assert small.power()["n2"] == "on"
    answer, _ = client.communicate("send\n", timeout=60)
    assert answer == "reset\n"
    small.heal()


def test_cut_and_reconnect(small: Cluster) -> None:
    """A cut node goes on running, unreachable, until it is reconnected; Slurm takes it for down meanwhile."""
    runner = small.popen("n1", "sleep", "300")
    small.cut("n1")
    assert small.power()["n1"] == "cut"
    small.on("n1", "ip", "-4", "addr", "show", "eth0")
    reach = ["bash", "-c", "exec 3<>/dev/tcp/n1/6818"]
    assert small.on("head", "timeout", "2", *reach, check=False).returncode != 0
    wait_for("the loss of n1", lambda: small.nodes()["n1"].rstrip("*") == "down", 180, pause=0.3)
    assert runner.poll() is None
    small.reconnect("n1")
    small.on("head", "timeout", "30", *reach)
    small.heal()
    runner.kill()
    runner.communicate(timeout=10)


def test_a_crashed_daemon_takes_nothing_along(small: Cluster) -> None:
    """slurmctld and slurmd killed under a job: its step goes on, and `boot` brings back only what is missing."""
    # The hosts share the machine's process ids. Renamed only when it holds the number.
    task = "echo $$ >task-$SLURM_NODEID.new; mv task-$SLURM_NODEID.new task-$SLURM_NODEID; exec sleep 300"
    job = small.sbatch("-N2", script=f"#!/bin/bash\nsrun bash -c '{task}'\n")
    tasks = [small.pfs / f"task-{node}" for node in (0, 1)]
    wait_for("the step", lambda: all(task.exists() for task in tasks), 120)
    small.wait_kept(job)  # killed before slurmctld has written that down, it would start the job anew
    for host in ("n2", "head"):
        small.crash(host)
        assert small.power()[host] == "on"
    assert small.on("head", "scontrol", "ping", check=False, timeout=30).returncode != 0
    for host in ("n2", "head", "n2", "head"):
        small.boot(host)
    assert small.job(job)["JobState"] == "RUNNING"
    assert [Path(f"/proc/{task.read_text().strip()}/comm").read_text() for task in tasks] == ["sleep\n"] * 2
    small.heal()


def test_heal_after_a_power_failure_under_a_job(small: Cluster) -> None:
    """`heal` brings a cluster whose job has just lost a node back to idle, long before Slurm would notice."""
    job = small.sbatch("-N2", "--no-requeue", "--wrap", "sleep 300")
    small.wait_state(job, "RUNNING", 60)
    small.off("n2")
    small.on("head", "scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    small.heal()
    assert set(small.nodes().values()) == {"idle"}
    assert small.queue() == []


def test_clusters_side_by_side(small: Cluster) -> None:
    """A second cluster with the same addresses works next to the first, and its end leaves the first alone."""
    name = f"bed2-{os.getpid()}"
    with Cluster(name, nodes=1) as other:
        assert other.sbatch("--wrap", "true") == "1"
        other.wait_state("1", "COMPLETED", 60)
        assert set(other.nodes()) == {"n1"}
        assert small.on("n1", "hostname").stdout == other.on("n1", "hostname").stdout == "n1\n"
    assert traces(name) == []
    assert small.up() is False
    small.wait_idle(90)


def test_down_leaves_nothing(small: Cluster) -> None:
    """After `down` no namespace, mount, process or folder of the cluster is left, whatever ran on it; twice is fine."""
    cluster = Cluster(f"bed3-{os.getpid()}", nodes=1)
    before = mounts_elsewhere()
    links = subprocess.run(["ip", "-br", "addr"], check=True, capture_output=True, timeout=10).stdout
    assert cluster.up() is True
    assert subprocess.run(["ip", "-br", "addr"], check=True, capture_output=True, timeout=10).stdout == links
    networks = inodes(cluster.settings.hosts)
    stray = cluster.popen("n1", "bash", "-c", "trap '' TERM HUP; setsid sleep 300 & sleep 300")
    cluster.sbatch("--wrap", "sleep 300")
    cluster.down()
    stray.communicate(timeout=10)
    cluster.down()
    assert traces(cluster.name) == []
    assert living_in(networks) == []
    assert mounts_elsewhere() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", ["head.mnt", "n1.net", "slurmctld"])
def test_interrupted_up_is_cleaned(number: signal.Signals, after: str) -> None:
    """`up` interrupted at any point leaves nothing; killed outright, the next `down` removes what it left."""
    name = f"bed4-{os.getpid()}"
    # Where the tests run in a shell's background, Ctrl-C is ignored, and what they start inherits that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "testbed", "--name", name]
    repo = Path(__file__).parents[2]
    up = subprocess.Popen([*command, "up", "--nodes", "2"], cwd=repo, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seen = {
        "head.mnt": RUN / name / "head.mnt",
        "n1.net": NETNS / f"{name}.n1",
        "slurmctld": DATA / name / "log" / "slurmctld.out",
    }
    deadline = time.monotonic() + 60
    while not seen[after].exists() and up.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    up.send_signal(number)
    up.communicate(timeout=90)
    if number == signal.SIGKILL:
        assert traces(name) != []
        subprocess.run([*command, "down"], cwd=repo, check=True, timeout=90)
    assert up.returncode != 0
    assert traces(name) == []


def test_up_again_after_a_crash(small: Cluster) -> None:
    """`up` on a cluster whose controller died starts it anew; one that is up with other settings is refused."""
    cluster = Cluster(f"bed5-{os.getpid()}", nodes=1)
    try:
        cluster.up()
        with pytest.raises(TestbedError, match="other settings"):
            Cluster(cluster.name, nodes=2).up()
        namespaces.kill([cluster.settings.head])
        assert cluster.up() is True
        cluster.wait_idle(90)
    finally:
        cluster.down()


def test_errors_name_what_is_wrong(small: Cluster) -> None:
    """A wrong host, a failing or endless command and an absent cluster each give an error that says so."""
    with pytest.raises(TestbedError, match="no host 'n9'"):
        small.on("n9", "true")
    with pytest.raises(TestbedError, match="ended with 3"):
        small.on("n1", "sh", "-c", "exit 3")
    with pytest.raises(TestbedError, match="within 1 s"):
        small.on("n1", "sleep", "60", timeout=1)
    with pytest.raises(TestbedError, match="no cluster 'absent'"):
        Cluster.attach("absent")
    with pytest.raises(TestbedError, match="Key=Value"):
        Cluster("absent", conf=["nonsense"])
    job = small.sbatch("--wrap", "exit 4")
    with pytest.raises(TestbedError, match="ended as FAILED"):
        small.wait_state(job, "COMPLETED", 60)


def test_conf_overrides_defaults(small: Cluster) -> None:
    """A line given as `conf` replaces the default one."""
    shown = small.on("head", "scontrol", "show", "config").stdout
    assert " 20 sec" in next(line for line in shown.splitlines() if line.startswith("SlurmdTimeout"))
