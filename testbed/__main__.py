"""The command line of the test bed: `python3 -m testbed [--name NAME] VERB ...`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

from testbed import Cluster, TestbedError
from testbed.namespaces import NETNS
from testbed.settings import DATA


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m testbed", description=__doc__)
    parser.add_argument("--name", default="jit", help="which cluster (default: jit); several can run side by side")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", help="bring the cluster up: host `head` and nodes n1..nN")
    up.add_argument("--nodes", type=int, default=5)
    up.add_argument("--cpus-per-node", type=int, default=4, help="may be more than there are (default: 4)")
    up.add_argument("--conf", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="lines of slurm.conf")
    up.add_argument("--plugin", action="store_true", help="build and load the SPANK plugin and the hooks")
    up.add_argument("--no-controller-hook", action="store_true", help="with --plugin: leave EpilogSlurmctld out")
    verbs.add_parser("down", help="end it and remove all that it made")
    on = verbs.add_parser("on", help="run a command on a host: on head sbatch job.sh")
    on.add_argument("--user", action="store_true", help="as the unprivileged user instead of root")
    on.add_argument("host")
    on.add_argument("command", nargs=argparse.REMAINDER)
    for verb, text in (
        ("off", "power a node off: the link first, then every process"),
        ("cut", "pull a node's network cable"),
        ("reconnect", "plug it in again"),
        ("crash", "kill slurmd on a node, or slurmctld on head; what runs goes on"),
        ("boot", "power a host on again, or start the daemon it lacks"),
    ):
        verbs.add_parser(verb, help=text).add_argument("node")
    verbs.add_parser("heal", help="cancel all jobs, power everything on, wait until all is idle")
    verbs.add_parser("status", help="show hosts, nodes and jobs")
    verbs.add_parser("ls", help="list the clusters on this machine")
    return parser.parse_args(argv)


def _status(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    for host, power in cluster.power().items():
        print(f"{host:8} {power:8} {nodes.get(host, 'slurmctld')}")
    print(f"jobs: {' '.join(cluster.queue()) or 'none'}    logs: {cluster.logs}    shared folder: {cluster.pfs}")


def _list() -> None:
    names = {p.name for p in DATA.glob("*")} | {p.name.partition(".")[0] for p in NETNS.glob("*.switch")}
    for name in sorted(names):
        try:
            hosts = Cluster.attach(name).power()
        except TestbedError:
            print(f"{name:16} left over; `python3 -m testbed --name {name} down` clears it")
            continue
        print(f"{name:16} {' '.join(f'{host}:{power}' for host, power in hosts.items())}")


def _exec(cluster: Cluster, args: argparse.Namespace) -> NoReturn:
    if not args.command:
        raise TestbedError("on HOST needs a command")
    here = os.getcwd()
    cwd = here if cluster.sees(here) else str(cluster.pfs)
    line, environ = cluster.command(args.host, *args.command, user=args.user, cwd=cwd)
    os.execvpe(line[0], line, environ)


def _up(args: argparse.Namespace) -> None:
    hook = not args.no_controller_hook
    cluster = Cluster(args.name, args.nodes, args.cpus_per_node, args.conf, plugin=args.plugin, controller_hook=hook)
    print(f"cluster {args.name} is up" if cluster.up() else f"cluster {args.name} was up already")
    _status(cluster)


def main(argv: list[str] | None = None) -> int:
    """Carry out one verb; errors become one line and exit code 1."""
    args = _arguments(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, frame: sys.exit(128 + got))
    try:
        if args.verb == "up":
            _up(args)
        elif args.verb == "ls":
            _list()
        elif args.verb == "down":
            Cluster(args.name).down()
        else:
            cluster = Cluster.attach(args.name)
            if args.verb == "on":
                _exec(cluster, args)
            elif args.verb == "status":
                _status(cluster)
            elif args.verb == "heal":
                cluster.heal()
            else:
                getattr(cluster, args.verb)(args.node)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("testbed: interrupted; nothing half-made is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
