"""Bring a Slurm cluster of namespaces up and down, and do to its nodes what happens to real ones.

Rule 1: every verb can be repeated, and `down` cleans up whatever an interrupted verb left.
Rule 2: one verb at a time for each cluster; clusters with different names do not touch each other.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from testbed import daemons, layout, machine, namespaces, plugin, settings
from testbed.commands import TestbedError, run, wait_for
from testbed.jobs import Jobs
from testbed.namespaces import Host
from testbed.settings import Settings


class Cluster(Jobs):
    """One cluster; also a context manager that brings it up and down.

    Attributes:
        settings: name, nodes and so on; see `Settings`.
        pfs: a folder that every host sees, for anything jobs read and write.
        logs: slurmctld.log, slurmd-n1.log, ...
    """

    def __init__(
        self,
        name: str = "jit",
        nodes: int = 5,
        cpus_per_node: int = 4,
        conf: Sequence[str] = (),
        *,
        plugin: bool = False,
        controller_hook: bool = True,
        node_hook: bool = True,
        site: str = "",
        health_check: int = 0,
    ) -> None:
        hooks = (plugin and controller_hook, plugin and node_hook)
        self.settings = Settings(name, nodes, cpus_per_node, tuple(conf), plugin, *hooks, site, health_check)
        self.pfs = self.settings.folder / "pfs"
        self.logs = self.settings.folder / "log"

    @classmethod
    def attach(cls, name: str = "jit") -> Cluster:
        """Return the cluster of this name that was brought up before, perhaps by another process.

        Raises:
            TestbedError: there is none.
        """
        cluster = cls(name)
        saved = layout.saved(name)
        if saved is None:
            raise TestbedError(f"no cluster {name!r} is up; `python3 -m testbed --name {name} up` starts one")
        cluster.settings = saved
        return cluster

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.settings.name

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the compute nodes: n1, n2, ..."""
        return tuple(h.name for h in self.settings.compute)

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def up(self) -> bool:
        """Bring the cluster up and wait until all its nodes are idle; False if it was up already.

        Raises:
            TestbedError: not root, Slurm is missing, a cluster of this name is up with other settings, or it does not
                start; then nothing of it is left.
        """
        machine.check()
        with machine.locked(self.name):
            saved = layout.saved(self.name)
            if saved is not None and self._alive(saved):
                if saved != self.settings:
                    raise TestbedError(f"cluster {self.name!r} is up with other settings ({saved}); `down` it first")
                return False
            layout.clear(self.settings)
            try:
                layout.create(self.settings)
                self._start_daemons()
            except BaseException:
                layout.clear(self.settings)
                raise
        return True

    def down(self) -> None:
        """End every process of the cluster and remove all that it ever made. Nothing happens if it is not there."""
        with machine.locked(self.name):
            layout.clear(self.settings)

    def on(
        self,
        host: str,
        *command: str,
        user: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and return it with its output as text.

        Args:
            user: as the unprivileged user instead of root.
            cwd: the folder to run in; the shared folder by default.
            env: added to the environment.

        Raises:
            TestbedError: no such host, longer than `timeout` seconds, or it failed while `check` is set.
        """
        line, environ = self.command(host, *command, user=user, cwd=cwd, env=env)
        return run(line, timeout=timeout, check=check, env=environ, stdin=stdin)

    def popen(
        self,
        host: str,
        *command: str,
        user: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a command on a host and do not wait for it; otherwise as `on`."""
        line, environ = self.command(host, *command, user=user, cwd=cwd, env=env)
        return subprocess.Popen(line, env=environ, text=True, stdin=stdin, stdout=stdout, stderr=stderr)

    def command(
        self,
        host: str,
        *command: str,
        user: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line and environment that run a command on a host."""
        found = self._host(host)
        if not found.handle("mnt").exists():
            raise TestbedError(f"host {host} of cluster {self.name!r} is not there; `up` brings the cluster up")
        first = tuple(str(p) for p in (plugin.REPO / ".venv" / "bin",) if p.is_dir())
        environ = settings.environment(os.environ, first, settings.USER if user else "root")
        as_user = ["setpriv", f"--reuid={settings.USER}", f"--regid={settings.USER}", "--init-groups", "--"]
        return [*found.enter(cwd or str(self.pfs)), *(as_user if user else []), *command], {**environ, **(env or {})}

    def sees(self, folder: str) -> bool:
        """Whether this folder of the machine is the same folder on the hosts."""
        kept = any(Path(folder).is_relative_to(k) for k in machine.kept_folders())
        own = any(Path(folder).is_relative_to(p) for p in ("/tmp", "/run", "/dev/shm", "/var/spool", "/var/log"))
        return kept or (not own and namespaces.closed_top(Path(folder) / "x") is None)

    def off(self, node: str) -> None:
        """Power a node off: first its link dies, then every process on it. Its peers get no FIN and no RST."""
        host = self._host(node)
        with machine.locked(self.name):
            namespaces.plug(host, plugged=False)
            namespaces.kill([host])

    def cut(self, node: str) -> None:
        """Pull the network cable of a node; what runs on it goes on."""
        with machine.locked(self.name):
            namespaces.plug(self._host(node), plugged=False)

    def reconnect(self, node: str) -> None:
        """Plug the network cable of a node in again."""
        with machine.locked(self.name):
            namespaces.plug(self._host(node), plugged=True)

    def crash(self, node: str) -> None:
        """Kill slurmd on a node, or slurmctld on "head", with SIGKILL; steps that run go on. `boot` starts it again."""
        with machine.locked(self.name):
            daemons.crash(self._host(node))

    def wait_kept(self, job: str, timeout: float = 120.0) -> None:
        """Wait until slurmctld has written to its disk what it knows of a job now; killed before, it would not know it.

        The job gets a new Comment, and slurmctld writes all it knows of a job at once: some seconds later.

        Raises:
            TestbedError: there is no such job, or it was not written within `timeout` seconds.
        """
        mark, kept = f"kept-{secrets.token_hex(8)}", self.settings.folder / "state" / "job_state"
        self.on("head", "scontrol", "update", f"JobId={job}", f"Comment={mark}")

        def written() -> bool:
            try:
                return mark.encode() in kept.read_bytes()
            except OSError:  # slurmctld renames it
                return False

        wait_for(f"job {job} in {kept}", written, timeout)

    def boot(self, node: str) -> None:
        """Power a host on: new namespaces, the old disk, its daemon. One that is on gets only the daemon it lacks."""
        host = self._host(node)
        with machine.locked(self.name):
            if not namespaces.processes([host]):
                with machine.uninterrupted():
                    namespaces.destroy(host)
                    namespaces.create(host, self.settings.folder / "etc", machine.kept_folders())
            if host == self.settings.head:
                daemons.start_head(self.settings)
            else:
                daemons.start_node(self.settings, host)

    def power(self) -> dict[str, str]:
        """Return what the kernel says of every host: "on", "cut", "off" (nothing runs on it) or "missing"."""
        found = {}
        for host in self.settings.hosts:
            if not host.handle("net").exists():
                found[host.name] = "missing"
            elif not namespaces.processes([host]):
                found[host.name] = "off"
            else:
                found[host.name] = "on" if namespaces.plugged(host) else "cut"
        return found

    def heal(self, timeout: float = 180.0) -> None:
        """Cancel all jobs, plug and power everything on, undo drains and wait until all is idle: between two tests.

        Raises:
            TestbedError: it was not idle within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self.boot("head")
        for job in self.queue():
            self.on("head", "scancel", job, check=False)
            self.on("head", "scancel", "-s", "KILL", "-f", job, check=False)
        for node, state in self.power().items():
            if state == "cut":
                self.reconnect(node)
            if node != "head":
                self.boot(node)
        self.on("head", "scontrol", "reconfigure")  # asks all nodes to register at once instead of at the next ping
        while set(self.nodes().values()) - {"idle"} and time.monotonic() < deadline:
            for node, state in self.nodes().items():
                if re.match(r"(down|drain|draining|drained|fail|failing)\b", state):
                    self.on("head", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            time.sleep(0.5)
        self.wait_idle(max(1.0, deadline - time.monotonic()))

    def install_plugin(self, *, controller_hook: bool = True, node_hook: bool = True) -> None:
        """Build and load the SPANK plugin and the hooks; a running cluster restarts its daemons for them.

        Raises:
            TestbedError: the plugin does not build, or the cluster does not come back.
        """
        with machine.locked(self.name):
            running = layout.saved(self.name) is not None
            self.settings = replace(self.settings, plugin=True, controller_hook=controller_hook, node_hook=node_hook)
            if running:
                layout.configure(self.settings)
                daemons.stop(self.settings)
                self._start_daemons()

    def write_site(self, text: str) -> None:
        """Replace the cluster's jit-ckpt.conf; plugin and hooks read it anew each time, so nothing is restarted."""
        self.settings = replace(self.settings, site=text)
        aside = self.settings.site_file.with_suffix(".new")
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.settings.site_file)

    def restart(self) -> None:
        """Stop slurmctld and every slurmd and start them again; jobs stay as Slurm keeps them."""
        with machine.locked(self.name):
            daemons.stop(self.settings)
            self._start_daemons()

    def version(self) -> str:
        """Return Slurm's version, for example "22.05.8"."""
        return machine.slurm_version()

    def _host(self, name: str) -> Host:
        for host in self.settings.hosts:
            if host.name == name:
                return host
        raise TestbedError(f"cluster {self.name!r} has no host {name!r}; it has {', '.join(self.power())}")

    def _alive(self, saved: Settings) -> bool:
        if not all(h.handle(kind).exists() for h in saved.hosts for kind in ("net", "uts", "mnt")):
            return False
        try:
            return self.on("head", "scontrol", "ping", timeout=15, check=False).returncode == 0
        except TestbedError:
            return False

    def _start_daemons(self) -> None:
        s = self.settings
        daemons.start_head(s)
        hosts = [h for h in s.compute if namespaces.plugged(h)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: daemons.start_node(s, host), hosts))
        wait_for("idle nodes", lambda: self._up_nodes() >= {h.name for h in hosts}, daemons.START_TIMEOUT)

    def _up_nodes(self) -> set[str]:
        return {node for node, state in self.nodes().items() if state in ("idle", "allocated", "mixed", "completing")}
