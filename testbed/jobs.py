"""Ask a cluster's Slurm about its jobs and nodes, and wait for them, as tests, demo and benchmarks need it."""

from __future__ import annotations

import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Final

from testbed.commands import TestbedError, wait_for

# States that a job does not leave by itself; NODE_FAIL and PREEMPTED may be followed by a requeue.
FINAL: Final = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"})
FIELD: Final = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=(.*?)(?= [A-Za-z][A-Za-z0-9_/:]*=|$)")


def parse_record(line: str) -> dict[str, str]:
    """Read one line of `scontrol -o show ...`; values may hold spaces."""
    return dict(FIELD.findall(line.strip()))


class Jobs(ABC):
    """What can be asked of a cluster once a command can be run on its head."""

    @abstractmethod
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
        """Run a command on a host to its end."""

    def sbatch(
        self,
        *args: str,
        script: str | None = None,
        user: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a job and return its id.

        Args:
            args: the arguments of sbatch, the path of a batch script among them unless `script` is given.
            script: the text of the batch script.

        Raises:
            TestbedError: sbatch refused; the message holds what it said.
        """
        done = self.on("head", "sbatch", "--parsable", *args, user=user, cwd=cwd, env=env, stdin=script)
        return done.stdout.strip().splitlines()[-1].partition(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`, for example JobState, NodeList, BatchHost, Restarts, ExitCode.

        Raises:
            TestbedError: there is no such job.
        """
        return parse_record(self.on("head", "scontrol", "-o", "show", "job", job).stdout.splitlines()[0])

    def wait_state(self, job: str, states: str | Iterable[str], timeout: float) -> dict[str, str]:
        """Wait until a job is in one of these states and return its fields.

        Slurm calls a job RUNNING while its prologs still run. Here it is not: if a node goes then, Slurm takes the
        script for one that never started, and queues the job again though it was submitted with --no-requeue.

        Raises:
            TestbedError: it was not within `timeout` seconds, or it ended in another state.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        fields: dict[str, str] = {}

        def there() -> bool:
            fields.clear()
            fields.update(self.job(job))
            state = fields["JobState"]
            if state in FINAL and state not in wanted:
                raise TestbedError(f"job {job} ended as {state}, not {' or '.join(sorted(wanted))}: {fields}")
            return state in wanted and (state, fields.get("Reason")) != ("RUNNING", "Prolog")

        try:
            wait_for(f"job {job} {' or '.join(sorted(wanted))}", there, timeout)
        except TestbedError as error:
            state, reason = fields.get("JobState", "unknown"), fields.get("Reason", "")
            raise TestbedError(f"{error}; it is {state} (reason {reason})") from error
        return fields

    def nodes(self) -> dict[str, str]:
        """Return the state of every node as `sinfo` names it: "idle", "allocated", "down*", ..."""
        shown = self.on("head", "sinfo", "-h", "-N", "-o", "%N %T").stdout.split()
        return dict(zip(shown[::2], shown[1::2], strict=True))

    def queue(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        return self.on("head", "squeue", "-h", "-a", "-o", "%i").stdout.split()

    def wait_idle(self, timeout: float) -> None:
        """Wait until every node is idle and no job is left.

        Raises:
            TestbedError: it was not so within `timeout` seconds; the message says what was in the way.
        """
        nodes: dict[str, str] = {}
        jobs: list[str] = []

        def idle() -> bool:
            nodes.update(self.nodes())
            jobs[:] = self.queue()
            return set(nodes.values()) == {"idle"} and not jobs

        try:
            wait_for("idle", idle, timeout, pause=0.3)
        except TestbedError as error:
            raise TestbedError(f"{error}: nodes {nodes}, jobs {jobs}") from error
