"""What the #SBATCH lines of a batch script say, and how Slurm writes a time limit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

Said = Callable[[str], dict[str, str]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "#!/bin/bash\n#SBATCH -p gpu\n#SBATCH --time=5 --no-requeue\n",
            {"partition": "gpu", "time": "5", "requeue": ""},
        ),
        ("#!/bin/sh\n\n# a comment\n#SBATCH --jit-ckpt=off\ntrue\n#SBATCH -p late\n", {"option": "off"}),
        ("#!/bin/sh\ntrue\n#SBATCH --jit-ckpt\n", {}),
        ("#!/bin/sh\n #SBATCH -p x\n##SBATCH -p y\n", {}),
        ("#!/bin/sh\n#SBATCH --partition 'g p u' # -t 5\n", {"partition": "g p u"}),
        ('#!/bin/sh\n#SBATCH --signal="B:TERM@9" -t 1\n', {"signal": "B:TERM@9", "time": "1"}),
        ("#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -p x\n", {"heterogeneous": ""}),
        ("#!/bin/sh\n#SBATCH --comment hetjob -p x\n", {"partition": "x"}),
        ("#!/bin/sh\n#SBATCH -p\n#SBATCH gpu\n", {"partition": "gpu"}),
        ("#!/bin/sh\r\n#SBATCH -p gpu\r\n", {"partition": "gpu"}),
        ("", {}),
    ],
)
def test_lines_are_read_as_sbatch_reads_them(said_in: Said, text: str, told: dict[str, str]) -> None:
    """Up to the first line that is no comment, with quotes, comments and several options a line."""
    assert said_in(text) == told


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("1:30", 90),
        ("2:00:05", 7205),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-02:03:04", 93784),
        ("0", 0),
        *((bad, 0) for bad in ("", "UNLIMITED", "1:", "1-", "1-2-3", "1:2:3:4", "5m", "-5", "99999999999")),
    ],
)
def test_time_limits(library: ctypes.CDLL, text: str, seconds: int) -> None:
    """Each way of sbatch(1) to write a limit; what is none counts as unknown."""
    library.jit_seconds.restype = ctypes.c_long
    assert library.jit_seconds(text.encode()) == seconds
