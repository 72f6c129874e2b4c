"""What Slurm says about jobs, nodes and steps, read from the text of `scontrol show`.

Rule 1: pure functions; the first mention of a key counts and free text (names, comments, paths) is never searched for
        keys, so that a user's job name cannot pose as a state. Slurm prints line breaks in it as they are: what then
        looks like a second record, or says a second time what is said once, is refused.
Rule 2: unknown keys are skipped and missing ones have a default: Slurm adds and drops keys with every version.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SLURMD_PORT: Final = 6818  # Slurm's default
MOST_NODES: Final = 1 << 17  # Slurm allows 65536; a list may be a user's word
LONGEST_NUMBER: Final = 18  # digits
# Keys whose value is the rest of the line.
FREE_TEXT: Final = frozenset(
    (
        *("JobName", "Command", "WorkDir", "Comment", "AdminComment", "SystemComment"),
        *("StdErr", "StdIn", "StdOut", "Reason", "OS", "Extra", "SubmitLine"),
    )
)
CLOSED: Final = frozenset(["DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"])
# What Slurm says once of a job or step, and is acted upon.
ONCE: Final = frozenset(
    (
        *("JobState", "Reason", "Requeue", "Restarts", "BatchFlag", "RunTime", "TimeLimit", "SubmitTime", "StartTime"),
        *("EndTime", "Partition", "ReqNodeList", "ExcNodeList", "NodeList", "NumNodes", "SrunHost:Pid"),
    )
)
ON_ITS_WAY: Final = frozenset(["PENDING", "EXPEDITING"])  # states of a job that comes back without our help
HELD: Final = "launch_failed_requeued_held"
NOTHING: Final = ("", "(null)", "None", "N/A", "Unknown", "NONE")


class SlurmError(Exception):
    """Slurm refused or did not answer in time; the message holds the command and Slurm's words."""


@dataclass(frozen=True)
class JobInfo:
    """What Slurm says of one job.

    Attributes:
        job_id: the bare number ("123"), also for an array task.
        state: "RUNNING", "CANCELLED", "TIMEOUT", "PREEMPTED", "PENDING", ...
        completing: the job is on its way out of the nodes.
        restarts: how often it went back to the queue.
        nodes: its nodes in Slurm's order; lost ones are gone from it once Slurm has noticed.
        excluded: nodes it may not use; required: nodes it must have.
        preempted: Slurm has asked it to make room.
        end: seconds since the epoch when its time is over; 0.0 without a limit.
        submitted: seconds since the epoch when it came into the queue, the last time.
        batch, may_requeue: it has a batch script; Slurm may put it back into the queue.
        array_job, array_task: "" outside arrays.
        held: Slurm holds it because it could not be launched on its nodes.
        expedited: Slurm brings it back by itself, at once (25.11 and later).
        partition: where it runs; width: nodes that it needs, 0 when unknown.
    """

    job_id: str
    state: str
    completing: bool = False
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    preempted: bool = False
    end: float = 0.0
    batch: bool = True
    may_requeue: bool = True
    array_job: str = ""
    array_task: str = ""
    partition: str = ""
    width: int = 0
    expedited: bool = False
    held: bool = False
    submitted: float = 0.0

    @property
    def address(self) -> str:
        """How Slurm addresses it alone: "100_7" for a task of an array, one of which has the array's own number."""
        return f"{self.array_job}_{self.array_task}" if self.array_job and self.array_task else self.job_id


@dataclass(frozen=True)
class NodeInfo:
    """One node: its state with all flags ("IDLE+DRAIN", "DOWN*"), why, and where its slurmd listens."""

    name: str
    state: str
    reason: str
    address: str
    port: int

    @property
    def closed(self) -> bool:
        """Whether somebody, or Slurm, has taken it out of service."""
        return bool(self._flags & CLOSED)

    @property
    def lost(self) -> bool:
        """Whether Slurm does not hear from it, or takes it for dead. What runs on a drained node runs on."""
        return "DOWN" in self._flags or "*" in self.state or "NOT_RESPONDING" in self.state

    @property
    def sick(self) -> bool:
        """Whether Slurm itself would not start anything there now."""
        return self.closed or self.lost

    @property
    def _flags(self) -> set[str]:
        return set(re.split(r"[^A-Z_]+", self.state))


def parse_job(text: str, number: str = "") -> JobInfo:
    """Read `scontrol show job` of one job; of an array, asked for by its number, the one task that has it.

    Raises:
        SlurmError: the text holds no job, or more than one (of an array, or a name with a line break that poses).
    """
    pairs = _pairs(text, "JobId")
    # What stands before the name is Slurm's own word; behind it a name could pose as an array.
    if len(pairs) > 1 and all([*pair.items()][1:2] == [("ArrayJobId", number)] for pair in pairs):
        pairs = [pair for pair in pairs if pair["JobId"] == number]
    if len(pairs) != 1:
        raise SlurmError(f"scontrol show job: {len(pairs)} jobs in {text[:200]!r}")
    first = pairs[0]
    return JobInfo(
        job_id=first["JobId"],
        state=_state(first),
        completing="COMPLETING" in re.split(r"[,+ ]", first.get("JobState", "")),
        restarts=_number(first.get("Restarts")),
        nodes=expand(first.get("NodeList", "")),
        batch_host=_value(first.get("BatchHost")),
        excluded=expand(first.get("ExcNodeList", "")),
        required=expand(first.get("ReqNodeList", "")),
        preempted=_value(first.get("PreemptTime")) != "",
        end=when(first.get("EndTime")),
        batch=first.get("BatchFlag", "1") != "0",
        may_requeue=first.get("Requeue", "1") != "0",
        array_job=_value(first.get("ArrayJobId")),
        array_task=_value(first.get("ArrayTaskId")),
        partition=_value(first.get("Partition")),
        width=_number(first.get("NumNodes", "").partition("-")[0]),
        expedited=first.get("ExpeditedRequeue") == "Yes",
        held=first.get("Reason", "").startswith(HELD),
        submitted=when(first.get("SubmitTime")),
    )


def _state(job: dict[str, str]) -> str:
    """Name the state behind COMPLETING, which hides it in scontrol and in every form of squeue (seen on 22.05).

    A job whose processes still run can have got there in four ways, which leave different traces.
    """
    names = [n for n in re.split(r"[,+ ]", job.get("JobState", "")) if n and n != "COMPLETING"]
    if names:
        return names[0]
    if _value(job.get("PreemptTime")):
        return "PREEMPTED"
    if job.get("Reason", "").split(" ")[0] == "TimeLimit":  # also at the end of a reservation
        return "TIMEOUT"
    start, end, limit = when(job.get("StartTime")), when(job.get("EndTime")), _seconds(job.get("TimeLimit"))
    if limit and _seconds(job.get("RunTime")) >= limit:
        return "TIMEOUT"
    # A requeued job's end is what it would be if it started now; a cancelled one's is when it was cancelled.
    if not end or (limit and end - start >= limit):
        return "PENDING"
    return "CANCELLED"


def parse_nodes(text: str, slurmd_port: int = SLURMD_PORT) -> tuple[NodeInfo, ...]:
    """Read `scontrol show node`; a node's Port is printed only where it is not the cluster's."""
    return tuple(
        NodeInfo(
            name=node["NodeName"],
            state=node.get("State", "UNKNOWN"),
            reason=_value(node.get("Reason")),
            address=_value(node.get("NodeAddr")) or node["NodeName"],
            port=_number(node.get("Port")) or slurmd_port,
        )
        for node in _pairs(text, "NodeName")
    )


def parse_partition(text: str) -> tuple[str, ...]:
    """Read the nodes of a partition from `scontrol show partition`."""
    return tuple(name for found in _pairs(text, "PartitionName") for name in expand(found.get("Nodes", "")))


def parse_port(text: str) -> int:
    """Read slurmd's port from `scontrol show config`."""
    found = re.search(r"^SlurmdPort\s*=\s*(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else SLURMD_PORT


def parse_boot(text: str) -> float:
    """Read when slurmctld was started from `scontrol show config`; 0.0 when it does not say."""
    found = re.search(r"^BOOT_TIME\s*=\s*(\S+)", text, re.MULTILINE)
    return when(found.group(1)) if found else 0.0


def parse_step_of(text: str, pid: int) -> str:
    """Find the step that the srun with this process id started in `scontrol show step`; "" for none."""
    for step in _pairs(text, "StepId"):
        if step.get("SrunHost:Pid", "").rpartition(":")[2] == str(pid):
            return step["StepId"].rpartition(".")[2]
    return ""


def parse_running(text: str) -> tuple[str, ...]:
    """Read the numbers of a job's steps from `scontrol show step`; its batch script and Slurm's own have none."""
    found = (step["StepId"].rpartition(".")[2] for step in _pairs(text, "StepId"))
    return tuple(step for step in found if step.isascii() and step.isdigit())


def expand(nodes: str) -> tuple[str, ...]:
    """Expand Slurm's short form of a node list: "n[1-3,07],gpu1" -> ("n1", "n2", "n3", "n07", "gpu1").

    Raises:
        SlurmError: it cannot be read.
    """
    if nodes.strip() in NOTHING:
        return ()
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", nodes.strip()):
        names += _expand_one(item)
        _limit(len(names))
    return tuple(names)


def _limit(count: int) -> None:
    if count > MOST_NODES:
        raise SlurmError(f"a node list of {count} nodes or more")


def _expand_one(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        if not NODE_NAME.fullmatch(item):
            raise SlurmError(f"{item!r} is not a node list")
        return [item]
    inside, closed, tail = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not found or not closed:
            raise SlurmError(f"{item!r} is not a node list")
        low, high = found.group(1), found.group(2) or found.group(1)
        if max(len(low), len(high)) > LONGEST_NUMBER:
            raise SlurmError(f"{item[:200]!r} is not a node list")
        _limit(len(numbers) + 1 + int(high) - int(low))
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    tails = _expand_one("x" + tail) if tail else ["x"]
    _limit(len(numbers) * len(tails))
    return [f"{head}{number}{end[1:]}" for number in numbers for end in tails]


def _pairs(text: str, begin: str) -> list[dict[str, str]]:
    """Split the output of `scontrol show` into one dictionary a record; records begin with `begin=`.

    Raises:
        SlurmError: a key of ONCE is there twice.
    """
    records: list[dict[str, str]] = []
    for line in text.split("\n"):  # not splitlines: it takes characters of names for ends of lines too
        if line.startswith(f"{begin}="):
            records.append({})
        rest = line.strip()
        while rest and records:
            key, equals, after = rest.partition("=")
            if not equals:
                break
            value, _, rest = (after, "", "") if key in FREE_TEXT else after.partition(" ")
            key, record = key.strip(), records[-1]
            if key in ONCE and key in record:
                raise SlurmError(f"scontrol show: {begin}={record[begin]} says {key} twice")
            record.setdefault(key, value)
            rest = rest.strip()
    return records


def _value(text: str | None) -> str:
    return "" if text is None or text in NOTHING else text


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def when(text: str | None) -> float:
    """Read seconds since the epoch, or "2026-11-29T17:01:19", which an hour of the year means twice; 0.0 for none."""
    if _number(text):
        return float(_number(text))
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def _seconds(text: str | None) -> int:
    """Read "1-02:03:04", "02:03:04"; 0 for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text or "", re.ASCII)
    if not found:
        return 0
    days, hours, minutes, seconds = (int(n or 0) for n in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
