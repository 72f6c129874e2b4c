"""Make and remove what a cluster consists of besides its daemons: folders, configuration files, namespaces.

Rule: `clear` goes by names alone, so it also removes half a cluster, or one of other settings.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from testbed import machine, namespaces, plugin
from testbed import settings as texts
from testbed.commands import run
from testbed.namespaces import NETNS, RUN, Host
from testbed.settings import DATA, Settings


def create(settings: Settings) -> None:
    """Make the folders, the files and the hosts of a cluster."""
    folder, run_folder = settings.folder, RUN / settings.name
    pfs, logs, state = folder / "pfs", folder / "log", folder / "state"
    for path in (pfs, logs, state, folder / "etc" / "slurm", run_folder):
        path.mkdir(parents=True, exist_ok=True)
    pfs.chmod(0o1777)
    shutil.chown(logs, "slurm")
    shutil.chown(state, "slurm")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    shutil.chown(key, "munge", "munge")
    configure(settings)
    with machine.uninterrupted():
        # A mount namespace can be kept only on a mount that is not shared.
        run(["mount", "--bind", str(run_folder), str(run_folder)])
        run(["mount", "--make-private", str(run_folder)])
        namespaces.create_switch(settings.name)
    kept = machine.kept_folders()
    for host in settings.hosts:
        with machine.uninterrupted():  # a command killed half-way can leave a child that still mounts something
            namespaces.create(host, folder / "etc", kept)


def configure(settings: Settings) -> None:
    """Write every configuration file, and install the plugin and the hooks if they are wanted."""
    folder = settings.folder
    library = plugin.install_library(folder / "plugin") if settings.plugin else None
    hooks = ["epilog-slurmctld"] * settings.controller_hook + ["prolog", "epilog"] * settings.node_hook
    for hook in hooks + ["health-check"] * bool(settings.health_check):
        plugin.install_hook(hook, folder / "hooks", settings.site_file)
    plugin.install_hook("orphan", folder, settings.site_file)
    plugin.install_shim(folder / "bin", settings.site_file)
    major, minor = (int(part) for part in machine.slurm_version().split(".")[:2])
    files = {
        "etc/hosts": texts.hosts_file(settings),
        "etc/slurm/slurm.conf": texts.slurm_conf(settings, memory_mib=machine.memory_mib(), mpi=machine.mpi()),
        "etc/slurm/cgroup.conf": texts.cgroup_conf((major, minor)),
        "etc/slurm/plugstack.conf": plugin.plugstack_conf(library, settings.site_file, folder / "bin"),
        "jit-ckpt.conf": settings.site,
        "cluster.json": settings.to_json(),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def saved(name: str) -> Settings | None:
    """The settings of the cluster of this name that was brought up before; None if there is none."""
    try:
        return Settings.from_json((DATA / name / "cluster.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):  # not there, or an interrupted `up` left half of it
        return None


def clear(settings: Settings) -> None:
    """End every process of a cluster and remove every trace of it."""
    name = settings.name
    with machine.uninterrupted():
        networks = sorted(p.name for p in NETNS.glob(f"{name}.*"))
        namespaces.kill([Host(name, network.partition(".")[2], 0, Path("/nonexistent")) for network in networks])
        for network in networks:
            run(["ip", "netns", "del", network], check=False)
        for folder in (RUN / name, settings.folder):
            for point in namespaces.mounts_below(folder):
                run(["umount", point])
            if folder.exists():
                shutil.rmtree(folder)
