"""Start and stop munged, slurmctld and slurmd on the hosts of a cluster.

Rule 1: which daemons run is read from /proc; no pid file is believed.
Rule 2: a daemon belongs to its host, not to the process that started it: it stays until the host goes off or down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from testbed import namespaces
from testbed.commands import TestbedError, run, wait_for
from testbed.machine import SYSTEM_PATH
from testbed.namespaces import Host
from testbed.settings import Settings

START_TIMEOUT: Final = 60.0  # seconds; all of a cluster's daemons take about four
NAMES: Final = ("slurmd", "slurmctld", "munged")
# As an init system would start them: nothing of the caller's environment gets into the daemons and the jobs' hooks.
ENVIRONMENT: Final = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_PMIX_DIRECT_CONN_UCX": "false"}


def start_head(settings: Settings) -> None:
    """Start munged and slurmctld where they do not run yet, and wait until it answers."""
    head = settings.head
    if not running(head, "munged"):
        _start_munged(settings, head)
    if not running(head, "slurmctld"):
        _start(settings, head, "slurmctld", "slurmctld")
    ping = [*head.enter("/"), "scontrol", "ping"]
    wait_for("an answer of slurmctld", lambda: run(ping, env=ENVIRONMENT, check=False).returncode == 0, START_TIMEOUT)


def start_node(settings: Settings, host: Host) -> None:
    """Start munged and slurmd where they do not run yet."""
    if not running(host, "munged"):
        _start_munged(settings, host)
    if not running(host, "slurmd"):
        _start(settings, host, "slurmd", f"slurmd-{host.name}")


def stop(settings: Settings) -> None:
    """End all daemons in their orderly way and wait for it."""
    for host in settings.hosts:
        for pid in (pid for name in NAMES for pid in running(host, name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    gone = [(host, name) for host in settings.hosts for name in NAMES]
    wait_for("the end of all daemons", lambda: not any(running(*where) for where in gone), START_TIMEOUT)


def crash(host: Host) -> None:
    """Kill slurmctld or slurmd outright; munged and the jobs' processes go on."""

    def found() -> list[int]:
        return [pid for name in ("slurmctld", "slurmd") for pid in running(host, name)]

    for pid in found():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(f"the end of {host.name}'s daemon", lambda: not found(), START_TIMEOUT, pause=0.02)


def running(host: Host, program: str) -> list[int]:
    """The process ids of a daemon on this host."""
    found = []
    for pid in namespaces.processes([host]):
        with contextlib.suppress(OSError):  # ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
            if name.removesuffix("-wlm") == program:  # what a newer daemon that starts itself anew has on Debian
                found.append(pid)
    return found


def _start_munged(settings: Settings, host: Host) -> None:
    inside = host.enter("/")
    run([*inside, "install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge"], env=ENVIRONMENT)
    places = [f"--{what}-file=/run/munge/munged.{what}" for what in ("pid", "log", "seed")]
    as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "--"]
    key = f"--key-file={settings.folder}/munge.key"
    run([*inside, *as_munge, "munged", "--num-threads=2", key, *places], env=ENVIRONMENT)


def _start(settings: Settings, host: Host, program: str, log: str) -> None:
    # setsid --fork: in no one's session, so that Ctrl-C and the end of the caller do not reach it.
    line = ["setsid", "--fork", *host.enter("/"), program, "-D"]
    path = settings.folder / "log" / f"{log}.out"
    with open(path, "a", encoding="utf-8") as out:
        done = subprocess.run(line, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise TestbedError(f"cannot start {program} on {host.name}; see {path}")
    wait_for(f"{program} on {host.name} (see {path})", lambda: bool(running(host, program)), START_TIMEOUT, pause=0.02)
