"""Turn the environment of a job and Slurm's word into a Site: which nodes there are, where they answer, who we are.

Rule: Slurm's word is asked for once, before anything runs; later the nodes themselves are asked, because Slurm learns
of a dead node only minutes after it died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_plugin import notice
from slurm_plugin.arguments import ArgumentError, Request
from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import SlurmError, expand


@dataclass(frozen=True)
class Site:
    """Where a jit-srun works.

    Attributes:
        job: how Slurm addresses the job, and its directory's name: "123", or "100_7" for a task of an array.
        restarts: how often the job has been through the queue.
        nodes: the nodes that may be used, in Slurm's order; need: how many of them a launch takes.
        addresses: node -> (IP address, port of slurmd); empty when Slurm or DNS did not answer, then none can be asked.
        hosts: node -> its address as Slurm's configuration has it, for the ranks to look up themselves: on a node its
            own name may mean 127.0.1.1.
        host: this machine as the ranks reach it.
    """

    request: Request
    job: str
    restarts: int
    nodes: tuple[str, ...]
    need: int
    addresses: Mapping[str, tuple[str, int]]
    hosts: Mapping[str, str]
    host: str


def job_name(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return how Slurm addresses the job, and how often it has been through the queue."""
    job = environ.get("SLURM_JOB_ID", "")
    if environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return job, int(restarts) if restarts.isdigit() else 0


def find_site(slurm: Slurm, environ: Mapping[str, str], request: Request) -> Site:
    """Look around.

    Raises:
        ArgumentError: the request does not fit into the job.
        SlurmError: the environment is not that of a job.
    """
    job, restarts = job_name(environ)
    held = expand(environ.get("SLURM_JOB_NODELIST", ""))
    if not held:
        raise SlurmError("SLURM_JOB_NODELIST names no nodes")
    nodes = tuple(n for n in held if (not request.within or n in request.within) and n not in request.without)
    need = request.nodes or (min(len(nodes), request.tasks) if request.tasks else len(nodes))
    if not 0 < need <= len(nodes):
        raise ArgumentError(f"{need} nodes are asked for, and the job has {len(nodes)} that may be used")
    me = environ.get("SLURMD_NODENAME", "")
    try:
        known = slurm.nodes({*held, me} - {""})
    except SlurmError:
        known = {}
    found = notice.resolve_all({n: known[n].address for n in nodes if n in known})
    addresses = {n: (address, known[n].port) for n, address in found.items()}
    host = known[me].address if me in known else (me or notice.this_host())
    return Site(
        request=request,
        job=job,
        restarts=restarts,
        nodes=nodes,
        need=need,
        hosts={n: known[n].address for n in nodes if n in known},
        addresses=addresses if len(addresses) == len(nodes) else {},
        host=host,
    )
