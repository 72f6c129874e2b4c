"""overhear: srun's words pass through unchanged, and the ends of tasks are noticed in them."""

from __future__ import annotations

import contextlib
import os

import pytest

from slurm_plugin.overhear import Overhear, TaskEnd


def through(*pieces: bytes) -> tuple[bytes, list[TaskEnd], bool]:
    """Send pieces through and return what came out, what was overheard, and whether the end was seen."""
    source, ours = os.pipe()
    out, target = os.pipe()
    overhear = Overhear(os.fdopen(source, "rb", buffering=0), target)
    found = []
    for piece in pieces:
        os.write(ours, piece)
        found += overhear.listen()
    assert overhear.listen() == []
    os.close(ours)
    overhear.listen()
    os.close(target)
    said = os.read(out, 1 << 20)
    os.close(out)
    overhear.close()
    return said, found, overhear.closed


@pytest.mark.parametrize(
    ("line", "end", "kind"),
    [
        (b"srun: error: n2: task 1: Killed", TaskEnd("n2", "1", "Killed"), "death"),
        (
            b"srun: error: n2: tasks 4-7: Exited with exit code 1",
            TaskEnd("n2", "4-7", "Exited with exit code 1"),
            "exception",
        ),
        (
            b"srun: error: gpu-01.site: task 0: Segmentation fault (core dumped)",
            TaskEnd("gpu-01.site", "0", "Segmentation fault (core dumped)"),
            "death",
        ),
    ],
)
def test_the_end_of_a_task_is_overheard(line: bytes, end: TaskEnd, kind: str) -> None:
    """However the line is cut into pieces, and between whatever else is said."""
    text = b"Traceback\n" + line + b"\nmore"
    for cut in range(len(text)):
        said, found, closed = through(text[:cut] or b"\n", text[cut:])
        assert said.endswith(text[cut:])
        assert found == [end]
        assert closed
    assert end.kind == kind


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "Unable to confirm allocation for job 1: Unable to contact slurm controller",
            "Unable to contact slurm controller",
        ),
        ("Unable to create step for job 100_5: Invalid job id specified", "Invalid job id specified"),
        ("n2: task 1: Exited with exit code 1", ""),
    ],
)
def test_why_there_is_no_step_is_overheard(line: str, why: str) -> None:
    """Then no rank was ever started."""
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(os.devnull, "wb") as nowhere:
        os.write(writing, f"srun: error: {line}\n".encode())
        os.close(writing)
        ear = Overhear(source, nowhere.fileno())
        ear.listen()
        assert ear.refusal == why


def test_what_is_not_sruns_is_only_passed_on() -> None:
    """Endless lines, bytes that are no text, and look-alikes."""
    text = b"x" * 10_000 + b"\xff\x00\nsrun: error: task 1: Killed\nnot srun: error: n2: task 1: Killed\n"
    said, found, _ = through(text)
    assert said == text
    assert found == []


def test_a_standard_error_that_nobody_reads_stops_nothing() -> None:
    """A full pipe costs a deadline and the rest of the words, not the launch."""
    source, ours = os.pipe()
    unread, target = os.pipe()
    os.set_blocking(target, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(target, b"x" * 65536)
    overhear = Overhear(os.fdopen(source, "rb", buffering=0), target, stalled=0.05)
    os.write(ours, b"srun: error: n2: task 1: Killed\n")
    assert overhear.listen() == [TaskEnd("n2", "1", "Killed")]
    overhear.close()
    for fd in (ours, unread, target):
        os.close(fd)
