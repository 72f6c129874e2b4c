"""A site as an administrator has it before jit-ckpt comes: machines with root file systems of their own, and Slurm.

Rule 1: what a machine has is Debian's packages and a site's own configuration; nothing of this checkout, except that
the site's torch environment borrows torch, mpi4py and h5py from this checkout's .venv.
Rule 2: a machine's processes and mounts lie in namespaces that end with it, and it ends with this process.
"""

from __future__ import annotations

import platform
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testbed import machine, release
from testbed.commands import TestbedError, run, wait_for
from testbed.settings import USER, cgroup_conf

SLURM: Final = "slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,munge,openmpi-bin"
OTHERS: Final = "python3,python3-venv,iproute2,procps,rpm"
SHARED: Final = ("home", "scratch", "opt/torch")  # folders that all machines see
NOISE: Final = (
    "var/log/",
    "var/lib/slurm",
    "var/lib/dpkg",
    "var/lib/apt",
    "root/.rpmdb",
    "var/cache",
    "etc/slurm/slurm.conf",
)
ADDRESS: Final = "10.78.0.{}"

# PID 1 of a machine: it takes the place of the root file system and then only collects orphans.
BOOT: Final = """\
root=$1 name=$2 shared=$3 disk=$4
shift 4
mount -t tmpfs -o mode=755 tmpfs "$disk"
mkdir "$disk/changed" "$disk/work" "$disk/root"
mount -t overlay -o "lowerdir=$root,upperdir=$disk/changed,workdir=$disk/work" overlay "$disk/root"
cd "$disk/root"
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount --rbind /sys sys
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p run/lock old
chmod 755 root # a checkout or Python below /root is seen at its own path
for folder in home scratch opt/torch; do mkdir -p $folder; mount --bind "$shared/$folder" $folder; done
for folder in "$@"; do mkdir -p ".$folder"; mount --rbind -o ro "$folder" ".$folder"; done
pivot_root . old
mount -t proc proc /proc
umount -l /old
hostname "$name"
trap '' CHLD
exec sleep infinity
"""

# systemd does not run on the machines: this does with three daemons what the packages' unit files say.
SYSTEMCTL: Final = """\
#!/bin/sh
action=$1
[ $# -eq 0 ] || shift
for unit in "$@"; do
    case ${unit%.service} in
    munge)
        install -d -o munge -g munge /run/munge
        daemon=munged start='setpriv --reuid=munge --regid=munge --clear-groups munged'
        ;;
    slurmctld | slurmd) daemon=${unit%.service} start=${unit%.service} ;;
    *) continue ;;
    esac
    case $action in
    stop | restart)
        pkill -x "$daemon"
        for _ in $(seq 300); do pgrep -x -r DRS "$daemon" >/dev/null || break; sleep 0.1; done # no zombies
        ;;
    esac
    case $action in
    start | restart) sh -c "$start" </dev/null >/dev/null 2>&1 || exit 1 ;;
    esac
done
exit 0
"""

SLURM_CONF: Final = """\
ClusterName=site
SlurmctldHost=c1({c1})
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=pmix
SchedulerParameters=sched_interval=3,bf_interval=3
NodeName=c1 NodeAddr={c1} CPUs=4
NodeName=c2 NodeAddr={c2} CPUs=4
PartitionName=main Nodes=c[1-2] Default=YES
"""


class NoTreeError(Exception):
    """debootstrap could not make the root file system of the machines."""


@dataclass(frozen=True)
class Machine:
    """One machine of the site: its name and its process 1."""

    name: str
    pid: int

    @property
    def root(self) -> Path:
        """Its root file system as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    def run(
        self, *command: str, user: str = "root", cwd: str = "/root", timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, as after a login."""
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={cwd}", "--"]
        home = "/root" if user == "root" else f"/home/{user}"
        who = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        environ = [f"PATH={machine.SYSTEM_PATH}", f"HOME={home}", f"USER={user}", "LANG=C.UTF-8"]
        # The namespaces' machine is small, and Open MPI shall not look for hardware of the one around it.
        environ += ["OMPI_MCA_pml=ob1", "OMPI_MCA_btl=self,tcp", "OMP_NUM_THREADS=1"]
        return run([*enter, *who, "env", "-i", *environ, *command], timeout=timeout, check=check)

    def files(self) -> set[str]:
        """List what is on its disk, besides what changes by itself."""
        names = run(["find", f"{self.root}/", "-xdev", "-not", "-type", "d", "-printf", "%P\\n"]).stdout.splitlines()
        return {name for name in names if not name.startswith(NOISE)}


def tree() -> Path:
    """Return the root file system of this machine's release with Slurm in it; made once.

    Raises:
        NoTreeError: no mirror is known or answers, or this release's packages are too much for debootstrap.
    """
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    packages = f"{SLURM},{OTHERS}"
    with release.held(f"site-{codename}-{zlib.crc32(packages.encode()):08x}") as root:
        try:
            if not root.exists():
                release.make(codename, root, packages)
        except TestbedError as error:
            raise NoTreeError(str(error)) from error
    return root


@contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[tuple[Machine, ...]]:
    """Boot machines, joined by a network; what they change of the tree they share is lost with them.

    Args:
        folder: an empty one; it holds what all machines share.
    """
    source = tree()
    for name in SHARED:
        (folder / name).mkdir(parents=True)
    (folder / "scratch").chmod(0o1777)
    with ExitStack() as stack:
        found = tuple(stack.enter_context(_machine(folder, name, source)) for name in names)
        _connect(found)
        yield found


@contextmanager
def _machine(folder: Path, name: str, source: Path) -> Iterator[Machine]:
    disk = folder / "disk" / name
    disk.mkdir(parents=True)
    line = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork"]
    line += ["--kill-child", "--propagation", "private", "sh", "-euc", BOOT, "sh", str(source), name, str(folder)]
    holder = subprocess.Popen([*line, str(disk), *map(str, machine.kept_folders())], stdin=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        wait_for(f"machine {name}", lambda: _comm(children) == "sleep\n", 30, pause=0.02)
        yield Machine(name, int(children.read_text(encoding="utf-8").split()[0]))
    finally:
        holder.kill()
        holder.wait(30)


def _comm(children: Path) -> str:
    try:
        return Path(f"/proc/{children.read_text(encoding='utf-8').split()[0]}/comm").read_text(encoding="utf-8")
    except (OSError, IndexError):
        return ""


def _connect(found: Sequence[Machine]) -> None:
    if len(found) < 2:
        return
    pair = ["ip", "link", "add", "eth0", "netns", str(found[0].pid), "type", "veth"]
    run([*pair, "peer", "name", "eth0", "netns", str(found[1].pid)])
    hosts = "".join(f"{ADDRESS.format(i)} {m.name}\n" for i, m in enumerate(found, 1))
    for i, one in enumerate(found, 1):
        (one.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}", encoding="utf-8")
        (one.root / "etc/hostname").write_text(f"{one.name}\n", encoding="utf-8")
        one.run("ip", "link", "set", "lo", "up")
        one.run("ip", "addr", "add", f"{ADDRESS.format(i)}/24", "dev", "eth0")
        one.run("ip", "link", "set", "eth0", "up")


def start_slurm(found: Sequence[Machine]) -> None:
    """Configure and start Slurm as the site had it: the first machine is controller, login host and a node."""
    version = run(["/usr/sbin/slurmctld", "-V"]).stdout.split()[-1].split(".")
    for one in found:
        one.run("useradd", "--uid", "4242", "--no-create-home", "--shell", "/bin/bash", USER)
        slurm = one.root / "etc/slurm"
        conf = SLURM_CONF.format(c1=ADDRESS.format(1), c2=ADDRESS.format(2))
        (slurm / "slurm.conf").write_text(conf, encoding="utf-8")
        (slurm / "cgroup.conf").write_text(cgroup_conf((int(version[0]), int(version[1]))), encoding="utf-8")
        # Slurm's MPI plugin opens a name that only libpmix-dev has, which would bring half a compiler with it.
        for library in one.root.glob("usr/lib/**/libpmix.so.2"):
            library.with_suffix("").symlink_to(library.name)
        systemctl = one.root / "usr/bin/systemctl"
        systemctl.unlink(missing_ok=True)  # it may be a link to what other units need
        systemctl.write_text(SYSTEMCTL, encoding="utf-8")
        systemctl.chmod(0o755)
        one.run("systemctl", "start", "munge")
    found[0].run("install", "-d", "-o", USER, "-g", USER, f"/home/{USER}")
    found[0].run("systemctl", "start", "slurmctld")
    for one in found:
        one.run("systemctl", "start", "slurmd")
    wait_idle(found[0])


def wait_idle(first: Machine) -> None:
    """Wait until every node is idle."""
    shown = ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
    wait_for("idle nodes", lambda: first.run(*shown, check=False).stdout.split() == ["idle", "idle"], 60, pause=0.3)


def torch_environment(first: Machine, python: Path, venv: Path) -> None:
    """Make /opt/torch, the users' environment: what `venv` has, torch and so on, but no jit-ckpt."""
    first.run(str(python), "-m", "venv", "/opt/torch", timeout=120)
    target = next((first.root / "opt/torch").glob("lib/python*/site-packages"))
    for entry in next(venv.glob("lib/python*/site-packages")).iterdir():
        if "jit_ckpt" not in entry.name and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)
