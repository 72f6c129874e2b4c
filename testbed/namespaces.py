"""One host of a cluster as kernel namespaces: its own network, hostname and view of the file system.

Rule 1: nothing outside the namespaces changes except `/run/netns`, `/run/jit-testbed` and the cluster's own folders.
Rule 2: what a host is (on, cut off, powered off) is read from the kernel, never from a file of ours.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.commands import TestbedError, run, wait_for

RUN = Path("/run/jit-testbed")
NETNS = Path("/run/netns")
NETWORK = "10.77.0"  # the same in every cluster: each has a switch of its own that leads nowhere else
KILL_TIMEOUT = 20.0  # seconds until every process of a host is gone


@dataclass(frozen=True)
class Host:
    """A host: `number` is the last part of its address; `folder` holds what is on its own disk."""

    cluster: str
    name: str
    number: int
    folder: Path

    @property
    def address(self) -> str:
        """Its IP address inside the cluster."""
        return f"{NETWORK}.{self.number}"

    @property
    def netns(self) -> str:
        """The name that `ip netns` shows."""
        return f"{self.cluster}.{self.name}"

    def handle(self, kind: str) -> Path:
        """The file that keeps its namespace of this kind ("net", "uts" or "mnt")."""
        return NETNS / self.netns if kind == "net" else RUN / self.cluster / f"{self.name}.{kind}"

    def enter(self, cwd: str) -> list[str]:
        """The beginning of a command that runs on this host in the folder `cwd`."""
        handles = [f"--{o}={self.handle(k)}" for o, k in (("net", "net"), ("uts", "uts"), ("mount", "mnt"))]
        return ["nsenter", *handles, f"--wdns={cwd}", "--"]


def switch(cluster: str) -> str:
    """The name of the network namespace that joins the hosts of a cluster."""
    return f"{cluster}.switch"


def create_switch(cluster: str) -> None:
    """Make the bridge, in a namespace of its own so that clusters never meet."""
    run(["ip", "netns", "add", switch(cluster)])
    run(["ip", "-n", switch(cluster), "link", "add", "br0", "type", "bridge"])
    run(["ip", "-n", switch(cluster), "link", "set", "br0", "up"])


def create(host: Host, etc: Path, kept: Sequence[Path]) -> None:
    """Make the namespaces of a host: network card, hostname, its own /tmp, /run, /dev/shm, /var/spool and so on.

    Args:
        etc: folder with `slurm/` and `hosts`, shown under /etc on the host.
        kept: folders that stay visible at their paths although they lie below something the host has of its own.
    """
    run(["ip", "netns", "add", host.netns])
    port = ["ip", "link", "add", host.name, "netns", switch(host.cluster), "type", "veth"]
    # The address of the card is fixed: the neighbours still know it after the host was powered off and on.
    run([*port, "peer", "name", "eth0", "address", f"02:4a:49:54:00:{host.number:02x}", "netns", host.netns])
    inside = ["ip", "-n", host.netns]
    run([*inside, "link", "set", "eth0", "addrgenmode", "none"])
    run([*inside, "addr", "add", f"{host.address}/24", "dev", "eth0"])
    run([*inside, "link", "set", "eth0", "up"])
    run([*inside, "link", "set", "lo", "up"])
    run(["ip", "-n", switch(host.cluster), "link", "set", host.name, "master", "br0", "up"])
    for kind in ("uts", "mnt"):
        host.handle(kind).touch()
    # A bind mount of the namespace keeps it, so that later commands can enter it.
    run(["unshare", f"--uts={host.handle('uts')}", "hostname", host.name])
    _create_view(host)
    run(["nsenter", f"--mount={host.handle('mnt')}", "--", "sh", "-euc", _mount_script(host, etc, kept)])


def _create_view(host: Host) -> None:
    # Linux keeps only a mount namespace with a higher number than that of the caller. Since 6.18 each CPU hands out
    # numbers of its own, so inside a container some CPUs give lower ones; the one that made the caller's never does.
    unshare = ["unshare", f"--mount={host.handle('mnt')}", "--propagation=private", "true"]
    if run(unshare, check=False).returncode == 0:
        return
    for cpu in sorted(os.sched_getaffinity(0)):
        tried = run(["taskset", "--cpu-list", str(cpu), *unshare], check=False)
        if tried.returncode == 0:
            return
    raise TestbedError(f"cannot keep the mount namespace of {host.netns}: {tried.stderr.strip()}")


def closed_top(path: Path) -> Path | None:
    """The topmost folder above `path` that only its owner may enter, such as /root; None if everybody may come in."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _mount_script(host: Host, etc: Path, kept: Sequence[Path]) -> str:
    own = {Path("/tmp"): 0o1777, Path("/var/spool"): 0o755, Path("/var/log"): 0o755}
    for path in kept:
        top = closed_top(path)
        if top is not None:
            own.setdefault(top, 0o755)  # an empty one that everybody may enter, with the kept folder put back into it
    lines = []
    for path, mode in own.items():
        disk = host.folder / path.relative_to("/")
        disk.mkdir(parents=True, exist_ok=True)
        disk.chmod(mode)
        for back in (k for k in kept if k.is_relative_to(path)):
            target = disk / back.relative_to(path)
            target.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --rbind {shlex.quote(str(back))} {shlex.quote(str(target))}")
        lines.append(f"mount --rbind {shlex.quote(str(disk))} {shlex.quote(str(path))}")
    # Copies of the handles of other hosts and clusters would keep those alive after their end.
    lines.append("awk '$5 ~ \"^/run/(netns|jit-testbed)\" {print $5}' /proc/self/mountinfo | tac | xargs -r umount -l")
    lines.append("mount -t tmpfs -o mode=0755,size=64m tmpfs /run && mkdir -m 1777 /run/lock")
    lines.append("mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
    for name in ("slurm", "hosts"):
        lines.append(f"mount --bind {shlex.quote(str(etc / name))} /etc/{name}")
    return "\n".join(lines)


def destroy(host: Host) -> None:
    """Remove the namespaces of a host, in whatever state they are; processes are killed first."""
    kill([host])
    run(["ip", "-n", switch(host.cluster), "link", "del", host.name], check=False)
    run(["ip", "netns", "del", host.netns], check=False)
    for kind in ("uts", "mnt"):
        run(["umount", str(host.handle(kind))], check=False)
        host.handle(kind).unlink(missing_ok=True)


def plug(host: Host, *, plugged: bool) -> None:
    """Plug the network cable in or pull it, at the switch: the host itself sees only that the carrier is gone."""
    run(["ip", "-n", switch(host.cluster), "link", "set", host.name, "up" if plugged else "down"])


def plugged(host: Host) -> bool:
    """Whether the network cable is in."""
    shown = run(["ip", "-o", "-n", switch(host.cluster), "link", "show", host.name], check=False).stdout
    return ",UP" in shown.partition(">")[0]


def kill(hosts: Sequence[Host]) -> None:
    """End every process of these hosts at once.

    Raises:
        TestbedError: some would not die within `KILL_TIMEOUT` seconds.
    """

    def none_left() -> bool:
        found = processes(hosts)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not found

    wait_for(f"killing every process of {', '.join(h.netns for h in hosts)}", none_left, KILL_TIMEOUT, pause=0.02)


def processes(hosts: Sequence[Host]) -> list[int]:
    """The processes that live in the network or mount namespace of one of these hosts."""
    own = {None, _inode("/proc/self/ns/net"), _inode("/proc/self/ns/mnt")}
    ours = {_inode(str(h.handle(kind))) for h in hosts for kind in ("net", "mnt")} - own
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and {_inode(f"/proc/{entry}/ns/net"), _inode(f"/proc/{entry}/ns/mnt")} & ours:
            found.append(int(entry))
    return found


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # ended meanwhile, or no such namespace
        return None
    return found.st_dev, found.st_ino


def mounts_below(folder: Path) -> list[str]:
    """Mount points at or below a folder, the deepest first, as this process sees them."""
    with open("/proc/self/mountinfo", encoding="utf-8") as lines:
        points = [line.split()[4].replace("\\040", " ") for line in lines]
    return [p for p in reversed(points) if Path(p).is_relative_to(folder)]
