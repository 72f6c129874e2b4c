"""config: what a rank's environment says, started by srun or by torchrun below it."""

from __future__ import annotations

import pytest

from jitmpi import config
from jitmpi.errors import ConfigError

STEP = {
    "JIT_CKPT": "dir=/c",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n2",
    "PMIX_RANK": "1",
}
TORCHRUN = {**STEP, "TORCHELASTIC_RUN_ID": "none", "RANK": "9", "WORLD_SIZE": "16", "TORCHELASTIC_RESTART_COUNT": "0"}


def read(environ: dict[str, str]) -> config.Settings:
    """The settings of a protected rank."""
    settings = config.read(environ)
    assert settings is not None
    return settings


def test_a_task_of_srun() -> None:
    """Slurm's rank and size, and the PMI that srun offers."""
    settings = read(STEP)
    assert (settings.rank, settings.size, settings.mpi_type, settings.torchrun) == (1, 2, "pmix", False)
    assert (settings.job_directory, settings.step_nodes) == ("/c/7", "n[1-2]")


def test_a_rank_of_torchrun() -> None:
    """torchrun's rank and size; no MPI, for all ranks of a node share the place of one task."""
    settings = read(TORCHRUN)
    assert (settings.rank, settings.size, settings.mpi_type, settings.torchrun) == (9, 16, "none", True)
    assert settings.node == "n2"


def test_torchrun_must_not_restart_the_ranks_itself() -> None:
    """An attempt commits once; the second life of its ranks could not save."""
    with pytest.raises(ConfigError, match="--max-restarts=0"):
        read({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})


def test_a_scripts_second_training_has_its_own_directory() -> None:
    """By the name that jit-srun gives, which is that of a folder and nothing else."""
    assert read({**STEP, "JIT_CKPT_TRAINING": "7.2"}).job_directory == "/c/7.2"
    for name in ("../8", "/c", "..", "a/b"):
        with pytest.raises(ConfigError, match="JIT_CKPT_TRAINING"):
            read({**STEP, "JIT_CKPT_TRAINING": name})
