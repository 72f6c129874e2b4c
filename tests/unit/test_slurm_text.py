"""Slurm's text, as Slurm 22.05 prints it."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin.slurm_text import (
    NodeInfo,
    SlurmError,
    expand,
    parse_boot,
    parse_job,
    parse_nodes,
    parse_port,
    parse_step_of,
)

COMPLETING = """JobId=4 JobName=x
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime={run} TimeLimit={limit} TimeMin=N/A
   {extra}SubmitTime=2026-11-29T17:03:08 EligibleTime=2026-11-29T17:03:08
   StartTime=2026-11-29T17:03:10 EndTime={end} Deadline=N/A
   NodeList=n[1-2]
"""


@pytest.mark.parametrize(
    ("run", "limit", "end", "extra", "state"),
    [
        ("00:00:02", "UNLIMITED", "2026-11-29T17:03:12", "", "CANCELLED"),
        ("00:00:02", "00:05:00", "2026-11-29T17:03:12", "", "CANCELLED"),
        ("00:00:00", "UNLIMITED", "Unknown", "", "PENDING"),
        ("00:00:00", "00:05:00", "2026-11-29T17:08:10", "", "PENDING"),
        ("00:05:01", "00:05:00", "2026-11-29T17:08:11", "", "TIMEOUT"),
        ("1-00:00:07", "1-00:00:00", "2026-11-30T17:03:17", "", "TIMEOUT"),
        ("00:00:02", "00:05:00", "2026-11-29T17:03:12", "PreemptTime=2026-11-29T17:03:11 ", "PREEMPTED"),
    ],
)
def test_completing_hides_a_state_that_is_found_again(run: str, limit: str, end: str, extra: str, state: str) -> None:
    """Cancelled, requeued, timed out and preempted jobs are told apart while they complete."""
    job = parse_job(COMPLETING.format(restarts=0, run=run, limit=limit, end=end, extra=extra))
    assert (job.state, job.completing) == (state, True)


def test_the_end_of_a_reservation_is_a_time_limit() -> None:
    """The job's own limit is far away then; Slurm gives the reason."""
    text = COMPLETING.format(restarts=0, run="00:00:02", limit="00:05:00", end="2026-11-29T17:03:12", extra="")
    assert parse_job(text.replace("Reason=None", "Reason=TimeLimit")).state == "TIMEOUT"


def test_a_job_held_after_a_failed_launch_is_known_by_its_reason() -> None:
    """A job's name cannot pose as one."""
    text = "JobId=4 JobName=Reason=launch_failed_requeued_held\n   JobState=PENDING Reason={} Dependency=(null)\n"
    assert parse_job(text.format("launch_failed_requeued_held")).held
    assert not parse_job(text.format("JobHeldUser")).held


JOB = "JobId=4 JobName={name}\n   JobState=PENDING Reason=JobHeldAdmin\n   Requeue=1 Restarts=0\n   NodeList=\n"
POSE = "   JobState=PENDING Reason=launch_failed_requeued_held\n   Requeue=1 Restarts=1"


@pytest.mark.parametrize(
    "name",
    [
        f"x\n{POSE}",
        f"x\n{POSE}\n   NodeList=\nJobId=4 JobName=y",
        "x\nJobId=9 JobName=y",
        f"x\n   ArrayJobId=4\n{POSE}\nJobId=9 ArrayJobId=4 JobName=y",
    ],
)
def test_a_name_with_line_breaks_cannot_pose(name: str) -> None:
    """scontrol prints them (seen on 22.05): a user's job would pose as one that Slurm holds, not an administrator."""
    for number in ("", "4"):
        with pytest.raises(SlurmError):
            parse_job(JOB.format(name=name), number)
    step = "StepId=4.0 UserId=1\n   Nodes=1 Name={}\n   SrunHost:Pid=n1:7\n"
    with pytest.raises(SlurmError):
        parse_step_of(step.format("x\n   SrunHost:Pid=n1:8"), 8)


@pytest.mark.parametrize("separator", ["\n", "\x0b", "\x1c", "\x85", "\u2028"])
def test_an_odd_name_that_poses_as_nothing_is_a_name(separator: str) -> None:
    """Only a line break ends a line."""
    assert not parse_job(JOB.format(name=f"two{separator}   lines")).held
    if separator != "\n":
        assert not parse_job(JOB.format(name=f"x{separator}" + POSE.partition("\n")[0])).held


def test_a_whole_array_is_no_job() -> None:
    """Its bare number brings all tasks, and the first one is anybody's."""
    text = "JobId=5 ArrayJobId=4 ArrayTaskId=1 JobName=x\n\nJobId=4 ArrayJobId=4 ArrayTaskId=2 JobName=x\n"
    with pytest.raises(SlurmError):
        parse_job(text)
    with pytest.raises(SlurmError):
        parse_job(f"{text}\nJobId=9 JobName=y\n", "4")
    with pytest.raises(SlurmError):
        parse_job(f"{text}\nJobId=4 ArrayJobId=4 ArrayTaskId=3 JobName=y\n", "4")


def test_one_task_of_an_array_has_the_arrays_number() -> None:
    """Whoever knows no more than that number means this one; its address means it alone."""
    text = "JobId=5 ArrayJobId=4 ArrayTaskId=1 JobName=x\n\nJobId=4 ArrayJobId=4 ArrayTaskId=2 JobName=x\n"
    assert parse_job(text, "4").address == "4_2"


def test_newer_versions_name_both_states() -> None:
    """CANCELLED,COMPLETING is read as it stands."""
    job = parse_job("JobId=4 JobName=x\n   JobState=CANCELLED,COMPLETING Reason=None\n")
    assert (job.state, job.completing) == ("CANCELLED", True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("n[08-11],gpu1", ("n08", "n09", "n10", "n11", "gpu1")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a-b.c[1]-x", ("a-b.c1-x",)),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_node_lists_are_expanded(text: str, names: tuple[str, ...]) -> None:
    """Slurm's short forms become names, with their leading zeros."""
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n 1", "/etc/nodes", "n[1]]", "-w", "n[1,]"])
def test_what_is_no_node_list_is_an_error(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(SlurmError):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[0-99999999999]",
        "n[1-999999][1-999999]",
        "r[1-400]n[1-400]",
        ",".join(["n[1-99999]"] * 9),
        f"n[1-{'9' * 5000}]",
        f"n[{'0' * 99}1]",
    ],
)
def test_a_list_of_more_nodes_than_slurm_allows_is_an_error(text: str) -> None:
    """A user's word fills no memory."""
    with pytest.raises(SlurmError):
        expand(text)


def test_times_are_those_of_no_zone() -> None:
    """Seconds since the epoch, which Slurm is asked for; where it writes a date nevertheless, that is local time."""
    assert parse_boot("BOOT_TIME               = 1796000162\n") == 1796000162.0
    written = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1796000162))
    assert parse_boot(f"BOOT_TIME               = {written}\n") == 1796000162.0
    assert parse_boot("BOOT_TIME               = Unknown\n") == 0.0


@pytest.mark.parametrize(
    ("state", "lost", "sick"),
    [
        ("IDLE", False, False),
        ("MIXED+DRAIN", False, True),
        ("ALLOCATED+FAIL", False, True),
        ("IDLE+POWERED_DOWN", False, False),
        ("DOWN", True, True),
        ("DOWN*+DRAIN", True, True),
        ("ALLOCATED*", True, True),
        ("ALLOCATED+NOT_RESPONDING", True, True),
    ],
)
def test_a_drained_node_is_not_lost(state: str, lost: bool, sick: bool) -> None:
    """Nothing new is started on it, and what runs there runs on."""
    node = NodeInfo("n1", state, "", "n1", 6818)
    assert (node.lost, node.sick) == (lost, sick)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text of Slurm's, or of a user's in it, raises anything but SlurmError."""
    for read in (parse_job, expand):
        with contextlib.suppress(SlurmError):
            read(text)
    parse_nodes("NodeName=x " + text)
    parse_port(text)
    parse_step_of("StepId=1.0\n" + text, 1)


def test_free_text_is_not_searched_for_keys() -> None:
    """A job's command, comment or reason cannot set one of its fields."""
    job = parse_job(
        "JobId=4 JobName=a NodeList=evil\n   Comment=x Restarts=9 NodeList=n7\n   NodeList=n1\n   Restarts=1\n"
    )
    assert (job.nodes, job.restarts) == (("n1",), 1)
