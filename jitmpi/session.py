"""Begin a protected run in this process: world, control plane, restore, hooks.

Rule: everything that needs all ranks alive happens here, in this order; what comes after is the agent's.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from jitmpi import (
    comm,
    commit,
    config,
    leave,
    meet,
    preflight,
    process,
    replay,
    replicas,
    resume,
    store,
    tidy,
    torchrun,
)
from jitmpi.agent import Agent
from jitmpi.buffers import BufferShadow
from jitmpi.config import Settings
from jitmpi.errors import AttachError, BootstrapError, ConfigError, JitError, SaveError
from jitmpi.events import Member
from jitmpi.record import Recorder
from jitmpi.run import Run
from jitmpi.torch_state import TrainingState
from jitmpi.vault import Vault
from slurm_plugin.contract import EXIT_REFUSED

FINALIZE = 60.0  # seconds for MPI_Finalize; it waits for every rank, and takes milliseconds
BOOTSTRAP = 300.0  # seconds for all ranks to come up; on a slow file system importing torch alone takes a minute
_begun: list[Settings] = []  # of this process: at most one


def attach(
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> Run:
    """Protect a training run and return the object that its loop uses.

    Call it once, after the model is wrapped (DistributedDataParallel) and the optimizer made. On a restart it loads the
    newest good checkpoint into the objects. What makes a protected start impossible ends the process with one line and
    exit code 85; without `--jit-ckpt`, or outside Slurm, nothing of the kind can happen.

    Args:
        model: the module that is trained, wrapped or not; or a list: several that are trained (a GAN's), or one and an
            averaged copy of it (EMA).
        optimizer: one optimizer, or a list of them; None when the script has none.
        scheduler: one learning-rate scheduler, or a list of them.
        scaler: a GradScaler.

    Raises:
        AttachError: an optimizer that is none, or a model that is no module.
    """
    state = TrainingState(model, optimizer, scheduler, scaler)
    try:
        settings = config.read()
        run = Run(state) if settings is None else _begin_once(settings, state)
    except JitError as error:
        sys.stderr.write(f"jit-ckpt: the training was not started: {error}\n")
        sys.stderr.flush()
        leave.end(EXIT_REFUSED)
        raise
    state.on_update(run.before_update, run.after_update)
    if settings is not None:
        state.on_forward(run.after_forward)
    if run.resumed and run.minibatch > 0:
        notes = replay.rehearse_parts(state.parts, run.minibatch)
        if notes and settings is not None:
            leave.say(settings, "; ".join(notes))
    return run


def _begin_once(settings: Settings, state: TrainingState) -> Run:
    if threading.current_thread() is not threading.main_thread():
        raise AttachError("attach was called in a thread; signals can be taken in the main thread only: call it there")
    if _begun:
        raise AttachError("attach was called twice; one call protects all: optimizer and scheduler may be lists")
    replicas.refuse_divided(state.model, state.optimizers)
    state.check()
    _begun.append(settings)
    if settings.rank in (0, settings.size - 1):  # one of two may be the one that dies before it can say so
        attached = {"event": "attached", "rank": settings.rank, "nodes": settings.step_nodes}
        leave.notify(settings, {**attached, "step": settings.step_id})
    return _begin(settings, state)


def _begin(settings: Settings, state: TrainingState) -> Run:
    """Bring this rank into the world, restore it, and start its agent."""
    watchdog = threading.Timer(BOOTSTRAP, _too_late, (settings,))
    watchdog.daemon = True
    watchdog.start()
    world = comm.open_world(settings)
    try:
        return _protect(world, settings, state, watchdog)
    except BootstrapError as error:  # a rank or node was lost meanwhile: unlike bad input, worth another start
        leave.give_up(settings, f"the ranks did not come up: {error}")


def _too_late(settings: Settings) -> None:
    comm.dismiss()
    leave.give_up(settings, f"the ranks did not come up in {BOOTSTRAP:.0f} s")


def _protect(world: comm.World, settings: Settings, state: TrainingState, watchdog: threading.Timer) -> Run:
    _preflight(world, settings, state)
    settings = _count(world, settings)
    plane, members = meet.connect(world, settings, time.monotonic() + BOOTSTRAP)
    watchdog.cancel()
    staging = commit.staging(settings.job_directory, settings.attempt)
    shadow = BufferShadow(state.model, state.copies)
    vault = Vault(state, shadow)
    agent = Agent(settings, members, plane, vault, staging=staging, versions=_versions(world))
    if settings.torchrun:
        agent.on_trouble = torchrun.stop
    agent.start(process.take_signals(plane.wakeup_fd, ignored=settings.torchrun))
    cursor, restored = resume.resume(world, state, settings)
    run = Run(state, Recorder(agent, shadow, vault.clock), shadow, cursor)
    world.exchange(b"", time.monotonic() + resume.EXCHANGE)
    _close(world, settings, members)
    process.install(agent)
    begun = cursor.minibatch if cursor is not None else 0
    agent.began(begun)
    if settings.rank == 0:
        if unseen := replicas.unseen(state.model, state.copies, state.optimizers):
            leave.say(settings, unseen)
        step = settings.step_id
        agent.tell({"event": "started", "rank": 0, "minibatch": begun, "restored": restored, "step": step})
    return run


def _close(world: comm.World, settings: Settings, members: Sequence[Member]) -> None:
    """End MPI while every rank lives: with it open, one death of several ranks on a node ends the step under pmix."""
    timer = threading.Timer(FINALIZE, leave.give_up, (settings, f"MPI_Finalize did not return in {FINALIZE:.0f} s"))
    timer.daemon = True
    timer.start()
    world.close()
    timer.cancel()
    crowded = len({member.node for member in members}) < len(members)
    if world.held and crowded and settings.mpi_type.startswith("pmix") and settings.rank == 0:
        leave.say(
            settings,
            "the script had opened MPI before attach, so it stays open: when a rank dies, Slurm's pmix ends all others "
            "at once and nothing can be saved. Leave MPI to jitmpi, or start with another PMI (docs/mpi.md)",
        )


def _preflight(world: comm.World, settings: Settings, state: TrainingState) -> None:
    """Let rank 0 check for all that this state can be stored in this directory, and all that it is theirs too."""
    problem = b""
    if settings.rank == 0:
        try:
            infos = [info for info, _ in state.tensors()]
            store.check(infos)
            preflight.check(settings.job_directory, resume.STATE_COPIES * sum(info.nbytes for info in infos))
        except (ConfigError, SaveError) as error:
            problem = str(error).encode()
    answer = world.exchange(problem, time.monotonic() + BOOTSTRAP)[0]
    if answer:
        raise ConfigError(answer.decode())
    rows = replicas.rows(state.tensors())
    if len(set(world.exchange(replicas.digest(rows), time.monotonic() + BOOTSTRAP))) > 1:
        tables = world.exchange(json.dumps(rows).encode(), time.monotonic() + BOOTSTRAP)
        raise AttachError(replicas.difference([json.loads(table) for table in tables]))


def _count(world: comm.World, settings: Settings) -> Settings:
    """Number a launch that jit-srun did not number, as in salloc: an attempt commits once, whatever came before."""
    if settings.launcher:
        return settings
    own = max(settings.attempt, tidy.next_attempt(settings.job_directory)) if settings.rank == 0 else 0
    first = world.exchange(b"%d" % own, time.monotonic() + BOOTSTRAP)[0]
    return replace(settings, attempt=int(first))


def _versions(world: comm.World) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpi": world.name,
    }
