"""What a command line says to Slurm's command, and what only to the user's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    "line",
    [
        "sbatch --jit-ckpt job.sh",
        "/usr/bin/sbatch --jit-ckpt=keep=3 job.sh",
        "sbatch -N 2 -vv --time 10 --jit-ckpt job.sh",
        "sbatch -vN 2 -W --wait --requeue --exclusive --jit-ckpt job.sh",
        "sbatch -N2 -n4 --wrap=true --jit job.sh",
        "sbatch --nodes=2 --hold --overcom --jit-ckpt",
        "sbatch -k --open-mode truncate --jit-ckpt job.sh",
        "salloc -W 5 --jit-ckpt bash",
        "srun -l -K0 -n 4 --pty --jit-ckpt python train.py",
        "srun --wait 5 --jit-ckpt hostname",
    ],
)
def test_given_to_slurm(said_by: Callable[[str], Any], line: str) -> None:
    """An option before the script's name is found, whatever stands before it and however it is shortened."""
    assert "option" in said_by(line).told()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "sbatch",
        "sbatch job.sh",
        "sbatch job.sh --jit-ckpt",
        "sbatch -N 2 job.sh --jit-ckpt=keep=3",
        "sbatch -vN2 job.sh --jit-ckpt",
        "sbatch --requeue job.sh --jit-ckpt",
        "sbatch --wait job.sh --jit-ckpt",
        "sbatch -W job.sh --jit-ckpt",
        "sbatch -- --jit-ckpt",
        "sbatch --comment --jit-ckpt job.sh",
        "sbatch --job-name=--jit-ckpt --j job.sh",
        "sbatch --jit-ckpt-more job.sh",
        "srun -n 4 python train.py --jit-ckpt",
        "--jit-ckpt",
    ],
)
def test_not_given_to_slurm(said_by: Callable[[str], Any], line: str) -> None:
    """A program's own argument, another option's value and the command's own name are not the option."""
    assert "option" not in said_by(line).told()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sbatch -p gpu,cpu -t 10:00 job.sh -p other", {"partition": "gpu,cpu", "time": "10:00"}),
        ("sbatch -vpgpu --time=5 job.sh", {"partition": "gpu", "time": "5"}),
        ("sbatch --part gpu --time-min=1 --time 2-0 job.sh", {"partition": "gpu", "time": "2-0"}),
        ("sbatch --signal=B:TERM@30 --no-requeue job.sh", {"signal": "B:TERM@30", "requeue": ""}),
        ("sbatch -k --open-mode truncate --req job.sh", {"no-kill": "", "open-mode": "truncate", "requeue": ""}),
        ("sbatch --wrap=true", {"wrap": "true"}),
        ("sbatch --jit-ckpt --jit-ckpt=off job.sh", {"option": "off"}),
        ("sbatch -N1 : -N2 job.sh", {"heterogeneous": ""}),
        ("srun -N1 a --x : -N2 b", {"heterogeneous": ""}),
        ("sbatch job.sh :", {}),
        ("salloc -p gpu -N1 : -N1 bash", {"partition": "gpu", "heterogeneous": ""}),
    ],
)
def test_what_goes_with_the_option(said_by: Callable[[str], Any], line: str, told: dict[str, str]) -> None:
    """Partition, time limit, the settings that we would put, and a job of several components are known."""
    assert said_by(line).told() == told


@pytest.mark.parametrize(
    ("line", "script"),
    [("sbatch -vN2 job.sh x", "job.sh"), ("sbatch", ""), ("sbatch --wrap true", ""), ("sbatch -W a/b", "a/b")],
)
def test_the_script_is_found(said_by: Callable[[str], Any], line: str, script: str) -> None:
    """It is the first word that is neither an option nor the value of one."""
    assert said_by(line).script.decode() == script
