"""What a command line says to Slurm's command, and what only to the user's program."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_plugin.arguments import parse

# Options that --help writes without "=" although they take a value, always or in sbatch.
VALUED = {"container", "container-id", "export", "mem", "wait", "wrap"}


@pytest.mark.parametrize("tool", ["sbatch", "salloc", "srun"])
def test_the_flags_of_the_installed_slurm_are_known(said_by: Callable[[str], Any], tool: str, tmp_path: Path) -> None:
    """One that is not would swallow the word behind it: the option, or the program."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=a\nPartitionName=p Nodes=a\n")
    line, environ = [tool, "--help"], {**os.environ, "SLURM_CONF": str(conf)}
    text = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=30, check=True).stdout
    found = re.findall(r"^ +(?:-(\w), )?--([a-z0-9-]+)(?![a-z0-9=-])", text, re.MULTILINE)
    assert len(found) > 15
    for letter, name in found:
        for word in [f"--{name}"] * (name not in VALUED) + [f"-{letter}"] * bool(letter):
            assert "option" in said_by(f"{tool} {word} --jit-ckpt job.sh").told(), word
            if tool == "srun":
                assert parse([word, "program"], {}).rest == (word, "program")


@pytest.mark.parametrize(
    "line",
    [
        "sbatch --jit-ckpt job.sh",
        "sbatch --container-remap-root --jit-ckpt job.sh",
        "/opt/slurm/bin/sbatch.real -W --wait --jit-ckpt job.sh",
        "/opt/.sbatch-wrapped -W --wait --jit-ckpt job.sh",
        "srun --container dir --no-container-mount-home --wait 5 --wait-for-children --jit-ckpt hostname",
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
        ("srun.real -N1 a --x : -N2 b", {"heterogeneous": ""}),
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
