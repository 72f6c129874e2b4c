"""Whether the option was given to Slurm's command or to the user's program."""

from __future__ import annotations

from collections.abc import Callable

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
def test_given_to_slurm(given_in: Callable[[str], bool], line: str) -> None:
    """An option before the script's name is found, whatever stands before it and however it is shortened."""
    assert given_in(line)


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
def test_not_given_to_slurm(given_in: Callable[[str], bool], line: str) -> None:
    """A program's own argument, another option's value and the command's own name are not the option."""
    assert not given_in(line)
