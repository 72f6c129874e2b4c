"""The door to Slurm: what this package asks of it, through Slurm's commands.

Rule 1: every command runs under a deadline and fails with one error, SlurmError.
Rule 2: a job is addressed as "123", or as "100_7" for a task of an array: an array's bare number means all its tasks.
Rule 3: nothing that could be read as an option or a list reaches a command line; ids and names are checked first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from slurm_plugin.slurm_text import (
    NODE_NAME,
    JobInfo,
    NodeInfo,
    SlurmError,
    parse_boot,
    parse_job,
    parse_nodes,
    parse_partition,
    parse_port,
    parse_running,
    parse_step_of,
)

PATIENCE: Final = 10.0  # seconds a command may take; slurmctld answers in milliseconds or is being restarted
SEARCH_PATH: Final = (
    "/usr/bin:/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"  # hooks of slurmctld have no PATH
)

JOB_ID: Final = re.compile(r"\d{1,10}(_\d{1,10})?", re.ASCII)
STEP_ID: Final = re.compile(r"\d{1,10}", re.ASCII)
START_TIME: Final = re.compile(r"now(\+\d{1,6})?", re.ASCII)
PARTITION: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
SIGNAL: Final = re.compile(r"[A-Z0-9]{1,10}")
REASON: Final = re.compile(r"[A-Za-z0-9][ !#$%&'()*+,./0-9:;<>?@A-Z\[\]^_a-z{|}~-]{0,199}")  # no quote, no "="

NO_STEP: Final = ". not found"  # "Job step 7. not found", of a job that Slurm knows; of others something else is said

# Environment that sends a question to other clusters, or changes what a command does. A job's number is this cluster's.
MISLEADING: Final = re.compile(r"SLURM_CLUSTERS|SCANCEL_\w+|SCONTROL_\w+", re.ASCII)

Run = Callable[[Sequence[str], float], str]


class Slurm(Protocol):
    """What jit-ckpt asks of Slurm; every method raises SlurmError."""

    def answers(self) -> bool:
        """Say whether slurmctld answers at all; never raises."""

    def booted(self) -> float:
        """Say when slurmctld was started, in seconds since the epoch."""

    def job(self, job_id: str) -> JobInfo:
        """Look a job up, a task of an array by its own number too."""

    def requeue(self, job_id: str) -> None:
        """Put a batch job back into the queue; Slurm ends its processes."""

    def update(self, job_id: str, *, start_time: str = "", exclude: Iterable[str] | None = None) -> None:
        """Set when the job may start ("now", "now+3") and the whole list of nodes it may not use."""

    def release(self, job_id: str) -> None:
        """Let a held job start; one that Slurm itself has held only with SlurmUser's rights."""

    def cancel(self, job_id: str) -> None:
        """End a job for good."""

    def node(self, name: str) -> NodeInfo:
        """Look a node up."""

    def nodes(self, names: Iterable[str]) -> dict[str, NodeInfo]:
        """Look several nodes up in one question; unknown names are left out."""

    def drain(self, node: str, reason: str) -> None:
        """Let no new job start on a node; running ones go on. Whoever asks has looked at its state before."""

    def partition_nodes(self, name: str) -> tuple[str, ...]:
        """Return the names of a partition's nodes."""

    def step_of(self, job_id: str, pid: int) -> str:
        """Return the id of the job's step that the srun with this process id started, "" for none."""

    def running_steps(self, job_id: str) -> tuple[str, ...]:
        """Return the numbers of the job's steps that run; its batch script has none."""

    def cancel_step(self, job_id: str, step_id: str, signal: str = "KILL") -> None:
        """Send a signal to every task of a step."""


class ScontrolSlurm:
    """Slurm through its commands."""

    def __init__(self, run: Run | None = None, patience: float = PATIENCE) -> None:
        self._run = run or run_command
        self._patience = patience
        self._port = 0

    def answers(self) -> bool:
        """See Slurm.answers."""
        try:
            self._ask("scontrol", "ping")
        except SlurmError:
            return False
        return True

    def booted(self) -> float:
        """See Slurm.booted."""
        return parse_boot(self._ask("scontrol", "show", "config"))

    def job(self, job_id: str) -> JobInfo:
        """Look a job up; see Slurm.job."""
        return parse_job(self._ask("scontrol", "show", "job", check(JOB_ID, job_id)), job_id)

    def requeue(self, job_id: str) -> None:
        """See Slurm.requeue."""
        self._ask("scontrol", "requeue", check(JOB_ID, job_id))

    def update(self, job_id: str, *, start_time: str = "", exclude: Iterable[str] | None = None) -> None:
        """See Slurm.update."""
        changes = [f"StartTime={check(START_TIME, start_time)}"] if start_time else []
        if exclude is not None:
            changes.append("ExcNodeList=" + ",".join(check(NODE_NAME, n) for n in exclude))
        if changes:
            self._ask("scontrol", "update", f"JobId={check(JOB_ID, job_id)}", *changes)

    def release(self, job_id: str) -> None:
        """See Slurm.release."""
        self._ask("scontrol", "release", check(JOB_ID, job_id))

    def cancel(self, job_id: str) -> None:
        """See Slurm.cancel."""
        self._ask("scancel", check(JOB_ID, job_id))

    def node(self, name: str) -> NodeInfo:
        """See Slurm.node."""
        found = self.nodes([name])
        if name not in found:
            raise SlurmError(f"scontrol show node {name}: it tells of {', '.join(found) or 'no node'}")
        return found[name]

    def nodes(self, names: Iterable[str]) -> dict[str, NodeInfo]:
        """See Slurm.nodes."""
        wanted = [check(NODE_NAME, n) for n in names]
        if not wanted:
            return {}
        try:
            text = self._ask("scontrol", "show", "node", ",".join(wanted))
        except SlurmError as error:
            if len(wanted) == 1 or "not found" not in str(error):
                raise
            text = self._ask("scontrol", "show", "node")  # one that was deleted fails the question for all
        found = parse_nodes(text, self._slurmd_port())
        return {node.name: node for node in found if node.name in wanted}

    def drain(self, node: str, reason: str) -> None:
        """See Slurm.drain."""
        name, why = check(NODE_NAME, node), check(REASON, reason)
        self._ask("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={why}")

    def partition_nodes(self, name: str) -> tuple[str, ...]:
        """See Slurm.partition_nodes."""
        return parse_partition(self._ask("scontrol", "show", "partition", check(PARTITION, name)))

    def step_of(self, job_id: str, pid: int) -> str:
        """See Slurm.step_of."""
        return parse_step_of(self._ask("scontrol", "show", "step", check(JOB_ID, job_id)), pid)

    def running_steps(self, job_id: str) -> tuple[str, ...]:
        """See Slurm.running_steps."""
        try:
            return parse_running(self._ask("scontrol", "show", "step", check(JOB_ID, job_id)))
        except SlurmError as error:
            if str(error).endswith(NO_STEP):
                return ()
            raise

    def cancel_step(self, job_id: str, step_id: str, signal: str = "KILL") -> None:
        """See Slurm.cancel_step."""
        # Through slurmctld: asked directly, scancel waits for nodes that are dead.
        target = f"{check(JOB_ID, job_id)}.{check(STEP_ID, step_id)}"
        self._ask("scancel", "--ctld", "-s", check(SIGNAL, signal), target)

    def _ask(self, *command: str) -> str:
        return self._run(command, self._patience)

    def _slurmd_port(self) -> int:
        if not self._port:
            self._port = parse_port(self._ask("scontrol", "show", "config"))
        return self._port


def run_command(command: Sequence[str], patience: float) -> str:
    """Run one of Slurm's commands and return what it printed.

    Raises:
        SlurmError: it is not there, failed, or did not end within `patience` seconds.
    """
    program = shutil.which(command[0]) or shutil.which(command[0], path=SEARCH_PATH)
    words = " ".join(command)
    if program is None:
        raise SlurmError(f"{words}: {command[0]} is not installed here")
    own = {name: value for name, value in os.environ.items() if not MISLEADING.fullmatch(name)}
    env = {**own, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words}: no answer within {patience:g} s") from None
    except OSError as error:
        raise SlurmError(f"{words}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SlurmError(f"{words}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def check(pattern: re.Pattern[str], text: str) -> str:
    """Return `text` if all of it matches.

    Raises:
        SlurmError: it does not; it may come from a user and must not reach a command line.
    """
    if not pattern.fullmatch(text):
        raise SlurmError(f"{text!r} is not a name that Slurm would use")
    return text


def open_slurm(patience: float = PATIENCE) -> Slurm:
    """Return the way to Slurm that works here: its commands, which can be bounded in time, else pyslurm.

    Raises:
        SlurmError: neither is installed (as in many containers).
    """
    if shutil.which("scontrol") or shutil.which("scontrol", path=SEARCH_PATH):
        return ScontrolSlurm(patience=patience)
    from slurm_plugin.slurm_native import PyslurmSlurm, load

    return PyslurmSlurm(load())
