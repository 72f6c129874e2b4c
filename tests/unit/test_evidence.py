"""Evidence: what the ends of tasks say, and words that are safe to pass on."""

from __future__ import annotations

import pytest

from slurm_plugin.evidence import SUSPECT, of_tasks, plain

BATCH = 0xFFFFFFFB


@pytest.mark.parametrize("status", [0, 9, 15, 6, 2, 83 << 8, 84 << 8, 1 << 8, 137 << 8])
def test_ends_that_people_slurm_and_programs_cause_say_nothing(status: int) -> None:
    """Killed by KILL or TERM, aborted, or ended with any exit code: the node is not to blame."""
    assert of_tasks(f"0 3 {status} 1764444444\n".encode()) == []


@pytest.mark.parametrize("signal", [4, 7, 11, 7 | 0x80])
def test_signals_that_broken_hardware_sends_are_a_suspicion(signal: int) -> None:
    """One for the whole job, however many tasks ended that way; with and without a core dump."""
    lines = "".join(f"0 {rank} {signal} 1764444444\n" for rank in range(128))
    (found,) = of_tasks(lines.encode())
    assert found.grade == SUSPECT
    assert found.what.startswith("rank 0 of step 0 died of SIG")


def test_the_batch_script_is_no_task() -> None:
    """A shell that dies says nothing; the steps of the job do."""
    assert of_tasks(f"{BATCH} 0 11 1764444444\n".encode()) == []


@pytest.mark.parametrize(
    "text",
    [b"", b"0 0 7\n", b"0 0 7 x\n", b"\xff\xfe 0 7 1\n", b"-1 0 7 1\n", b"0 0 7 1 1\n", b"9" * 5000, b"0 0 -7 1\n"],
)
def test_damaged_lines_say_nothing(text: bytes) -> None:
    """Nothing but a whole line counts."""
    assert of_tasks(text) == []
    assert of_tasks(text + b"\n1 2 7 1.5\n") != []


def test_words_become_one_safe_line() -> None:
    """No line break, no quote, no equal sign, nothing outside ASCII, and not too long."""
    assert plain('a\nb\t"c" \x1b[31mState=RESUME \\ `x` ü') == "a b 'c' ?[31mState:RESUME / 'x' ?"
    assert len(plain("x" * 5000)) == 100
    assert plain("x" * 5000).endswith("...")
