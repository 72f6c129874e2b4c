"""Turn the environment into one `Settings`; the only module that reads os.environ."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jitmpi.errors import ConfigError
from slurm_plugin import contract


@dataclass(frozen=True)
class Settings:
    """What this rank was started with.

    Attributes:
        job_id: how Slurm addresses the job: "123", or "100_7" for an array task.
        training: the name of this training's directory, "" for the job's id.
        rank, size: those of the Slurm step, or of torchrun inside it; the world must have exactly this size.
        node: Slurm's name of this node.
        attempt: number of this launch in the job's life.
        launcher: "host:port:key" of jit-srun, "" without one.
        step_id: Slurm's number of this step inside the job.
        mpi_type: the PMI that srun offers ("pmix", "pmi2"), "none" without one.
        step_nodes, job_nodes: Slurm's text of the nodes of this step and of the job, "n[1-4]".
        torchrun: whether torchrun started this process (one Slurm task a node, several ranks below it).
    """

    options: contract.Options
    job_id: str
    rank: int
    size: int
    node: str
    attempt: int
    launcher: str
    step_id: str = "0"
    mpi_type: str = "none"
    restarts: int = 0
    training: str = ""
    step_nodes: str = ""
    job_nodes: str = ""
    torchrun: bool = False

    @property
    def job_directory(self) -> str:
        """Where the checkpoints of this training lie."""
        return os.path.join(self.options.dir, self.training or self.job_id)


def read(environ: Mapping[str, str] | None = None) -> Settings | None:
    """Read the settings of this rank; None outside Slurm or without `--jit-ckpt`.

    Raises:
        ConfigError: the option is there but something that must come with it is not.
    """
    env = os.environ if environ is None else environ
    text = env.get(contract.ENV_OPTIONS) or env.get(contract.ENV_OPTIONS_JOB) or ""
    if not text or "SLURM_PROCID" not in env:
        return None
    try:
        options = contract.parse_options(text)
        rank, size = _place(env)
        restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        attempt = int(env.get(contract.ENV_ATTEMPT) or restarts)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"jit-ckpt: the job's environment cannot be used: {error}") from error
    job_id = env.get("SLURM_JOB_ID", "")
    if env.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    if not job_id:
        raise ConfigError("jit-ckpt: SLURM_JOB_ID is not set; start the ranks with srun or jit-srun")
    node = env.get("SLURMD_NODENAME") or socket.gethostname()
    launcher, step_id = env.get(contract.ENV_LAUNCHER, ""), env.get("SLURM_STEP_ID") or "0"
    options = contract.in_job(options, job_id)
    training = env.get(contract.ENV_TRAINING, "")
    if os.path.basename(training) != training or training.startswith("."):
        raise ConfigError(f"jit-ckpt: {contract.ENV_TRAINING} is {training!r}, which is not the name of a folder")
    return Settings(
        options,
        job_id,
        rank,
        size,
        node,
        attempt,
        launcher,
        step_id,
        mpi_type=_mpi_type(env),
        restarts=restarts,
        training=training,
        step_nodes=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""),
        job_nodes=env.get("SLURM_JOB_NODELIST", ""),
        torchrun=_by_torchrun(env),
    )


def _by_torchrun(env: Mapping[str, str]) -> bool:
    """Whether the ranks are not Slurm's tasks but those that torchrun started below them."""
    return "TORCHELASTIC_RUN_ID" in env


def _place(env: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and size of the world."""
    if not _by_torchrun(env):
        return int(env["SLURM_PROCID"]), int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
    if env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise ConfigError("torchrun has restarted the ranks itself; give it --max-restarts=0: jit-srun restarts them")
    return int(env["RANK"]), int(env["WORLD_SIZE"])


def _mpi_type(env: Mapping[str, str]) -> str:
    if _by_torchrun(env):
        return "none"  # its ranks share the task's place in the PMI, so MPI would take all of them for the same one
    # srun takes SLURM_MPI_TYPE out of the tasks' environment when it is "none" (Slurm's src/interfaces/mpi.c).
    if env.get("SLURM_MPI_TYPE"):
        return env["SLURM_MPI_TYPE"]
    if "PMIX_RANK" in env:
        return "pmix"
    return "pmi2" if "PMI_RANK" in env or "PMI_FD" in env else "none"
