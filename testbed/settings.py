"""Turn the wishes for a cluster into the texts of its configuration files. Pure: no file is read or written here.

Rule: values that only make the test bed quicker or smaller can be overridden with `conf`; see `slurm_conf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from testbed.commands import TestbedError
from testbed.namespaces import Host

DATA: Final = Path("/var/lib/jit-testbed")  # on a real disk: /run is small and often mounted noexec
USER: Final = "jituser"  # the unprivileged user that jobs may run as; `make deps` adds it
MOST_NODES: Final = 200  # addresses .11 to .210
REPEATED: Final = ("nodename", "partitionname", "downnodes")  # keys of slurm.conf that add instead of replace


@dataclass(frozen=True)
class Settings:
    """What a cluster is like.

    Attributes:
        name: small letters, digits and dashes; several clusters live side by side under different names.
        nodes: how many compute nodes, n1 to nN, besides the controller "head".
        cpus: CPUs that Slurm believes each node has; more than the machine has is fine.
        conf: further lines of slurm.conf, "Key=Value"; a key given here replaces the default one.
        plugin: whether the SPANK plugin is loaded.
        controller_hook, node_hook: whether EpilogSlurmctld is set; whether Prolog and Epilog are.
        health_check: seconds between two runs of HealthCheckProgram; 0 for none.
        site: the text of the cluster's own jit-ckpt.conf, which the plugin and the hooks read.
    """

    name: str = "jit"
    nodes: int = 5
    cpus: int = 4
    conf: tuple[str, ...] = ()
    plugin: bool = False
    controller_hook: bool = False
    node_hook: bool = False
    site: str = ""
    health_check: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.name):
            raise TestbedError(f"cluster name {self.name!r}: allowed are 1 to 31 small letters, digits and dashes")
        if not 1 <= self.nodes <= MOST_NODES or self.cpus < 1:
            raise TestbedError(f"{self.nodes} nodes with {self.cpus} CPUs: allowed are 1 to {MOST_NODES} and 1 or more")
        for line in self.conf:
            if not re.fullmatch(r"\w+=[^\n]*", line):
                raise TestbedError(f"slurm.conf line {line!r}: it must read Key=Value")

    @property
    def folder(self) -> Path:
        """Where everything of the cluster lies on disk; removed when it goes down."""
        return DATA / self.name

    @property
    def site_file(self) -> Path:
        """The cluster's own jit-ckpt.conf."""
        return self.folder / "jit-ckpt.conf"

    @property
    def head(self) -> Host:
        """The host of slurmctld."""
        return Host(self.name, "head", 1, self.folder / "hosts" / "head")

    @property
    def compute(self) -> tuple[Host, ...]:
        """The compute nodes n1 to nN."""
        names = ((i, f"n{i}") for i in range(1, self.nodes + 1))
        return tuple(Host(self.name, name, 10 + i, self.folder / "hosts" / name) for i, name in names)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The head and all compute nodes."""
        return (self.head, *self.compute)

    def to_json(self) -> str:
        """Write it so that `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        return cls(**{**raw, "conf": tuple(raw["conf"])})


def slurm_conf(settings: Settings, *, memory_mib: int, mpi: str = "pmix") -> str:
    """Write slurm.conf; nodes claim `memory_mib` each, which is not shared out (CR_Core); `mpi` is srun's default."""
    s, nodes = settings, f"n[1-{settings.nodes}]"
    values = {
        "ClusterName": s.name,
        "SlurmctldHost": f"head({s.head.address})",
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "StateSaveLocation": f"{s.folder}/state",
        "SlurmdSpoolDir": "/var/spool/slurmd",  # each host has its own /var/spool and /run
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": f"{s.folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{s.folder}/log/slurmd-%n.log",
        "PlugStackConfig": "/etc/slurm/plugstack.conf",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # or nodes with fewer real CPUs are drained
        "MpiDefault": mpi,
        "PrologFlags": "Alloc",
        "ReturnToService": "2",
        "SlurmdTimeout": "15",  # seconds until a dead node is known; sites have 300
        "KillWait": "30",
        "SchedulerParameters": "sched_interval=3,bf_interval=3,nohold_on_prolog_fail",  # quick; sites have 60 and 30
    }
    values |= {"EpilogSlurmctld": f"{s.folder}/hooks/epilog-slurmctld"} if s.controller_hook else {}
    values |= {key: f"{s.folder}/hooks/{key.lower()}" for key in ("Prolog", "Epilog") if s.node_hook}
    if s.health_check:
        values |= {"HealthCheckProgram": f"{s.folder}/hooks/health-check", "HealthCheckInterval": str(s.health_check)}
    added = [line for line in s.conf if line.partition("=")[0].lower() in REPEATED]
    lines = [f"{key}={value}" for key, value in _override(values, s.conf).items()]
    shape = f"CPUs={s.cpus} Sockets=1 CoresPerSocket={s.cpus} ThreadsPerCore=1 RealMemory={memory_mib} State=UNKNOWN"
    lines += [f"NodeName={h.name} NodeAddr={h.address} {shape}" for h in s.compute]
    return "\n".join([*lines, f"PartitionName=main Nodes={nodes} Default=YES State=UP", *added, ""])


def _override(values: Mapping[str, str], conf: tuple[str, ...]) -> dict[str, str]:
    merged = {key.lower(): (key, value) for key, value in values.items()}
    for line in conf:
        key, _, value = line.partition("=")
        if key.lower() not in REPEATED:
            merged[key.lower()] = (key, value)
    return dict(merged.values())


def cgroup_conf(version: tuple[int, int]) -> str:
    """Write cgroup.conf: the hosts have no cgroups of their own, and newer versions must be told."""
    return "CgroupPlugin=disabled\n" if version >= (23, 2) else ""


def hosts_file(settings: Settings) -> str:
    """Write /etc/hosts as the hosts of the cluster see it."""
    lines = [f"{h.address} {h.name}" for h in settings.hosts]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines, ""])


def environment(environ: Mapping[str, str], path_first: tuple[str, ...], user: str) -> dict[str, str]:
    """Make the environment of a command on a host from the caller's: nothing of another job, MPI over plain TCP."""
    drop = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SPANK_", "JIT_CKPT", "PMIX_", "PMI_", "OMPI_", "UCX_", "XDG_")
    gone = ("TMPDIR", "TMP", "TEMP", "SLURM_CONF")
    env = {k: v for k, v in environ.items() if not k.startswith(drop) and k not in gone}
    path = [*path_first, *env.get("PATH", "/usr/bin:/bin").split(":"), "/usr/sbin", "/sbin"]
    env["PATH"] = ":".join(dict.fromkeys(path))
    # UCX takes all namespaces for one host and crashes at times; more than one thread a rank only slows all down.
    env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_osc": "^ucx"}
    env |= {"OMPI_MCA_mpi_yield_when_idle": "1", "SLURM_PMIX_DIRECT_CONN_UCX": "false"}
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | ({"USER": user, "LOGNAME": user, "HOME": f"/home/{user}"} if user != "root" else {})
