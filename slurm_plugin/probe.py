"""Submit the probe: a job of two nodes in which one rank is killed; its results in, and nothing left behind.

Rule 1: needs no rights but those of a user who may submit a job, and never outlives its own deadline.
Rule 2: however it ends (an error, Ctrl-C, the deadline), the job is cancelled and its folder removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_plugin import observe, plugstack, probe_batch
from slurm_plugin.slurm import Run, ScontrolSlurm, run_command
from slurm_plugin.slurm_text import SlurmError

SUBMIT: Final = 60.0  # seconds for sbatch
LOOK: Final = 1.0  # seconds between two looks at the job
GONE: Final = 20.0  # seconds for a cancelled job to leave its nodes
MINUTES: Final = 8  # the job's time limit: three trials at their longest
VISIBLE: Final = 10.0  # seconds for the results of an ended job to show through a cache of NFS
OVER: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
PREFIX: Final = ".jit-ckpt-probe-"

SCRIPT: Final = """#!/bin/sh
PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONPATH
exec {python} -B -m slurm_plugin.probe_batch {folder}
"""


class ProbeError(Exception):
    """The probe could not be carried out; the text says why, in Slurm's words where they are Slurm's."""


def probe(
    directory: str,
    python: str,
    *,
    loaded: bool,
    sbatch: Sequence[str] = (),
    wait: float,
    say: Callable[[str], None],
    run: Run = run_command,
    look: float = LOOK,
    visible: float = VISIBLE,
) -> dict[str, Any]:
    """Run the probe and return what the job found, see `probe_batch`.

    Args:
        directory: on a file system that every node sees.
        python: the interpreter of the jobs.
        loaded: whether sbatch knows --jit-ckpt.
        sbatch: further options for sbatch; they win over ours.
        wait: seconds for the job to start and end.

    Raises:
        ProbeError: no job, no start in time, no results.
    """
    made = _missing(directory)
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=directory)
    except OSError as error:
        raise ProbeError(f"{directory}: {error.strerror}") from error
    try:
        job, run = _submit(folder, python, loaded, sbatch, run)
        try:
            return _await(folder, job, time.monotonic() + wait, say, run, look, visible)
        finally:
            _end(job, run, look)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for new in made:
            with contextlib.suppress(OSError):
                os.rmdir(new)


def _submit(folder: str, python: str, loaded: bool, sbatch: Sequence[str], run: Run) -> tuple[str, Run]:
    """Return the job and the way to ask for it: on the cluster that sbatch was told to submit to (-M)."""
    script = os.path.join(folder, "job.sh")
    words = {"root": observe.ROOT, "python": python, "folder": folder}
    Path(script).write_text(SCRIPT.format(**{key: shlex.quote(str(word)) for key, word in words.items()}))
    # relaunch=off: the probe's own sruns must stay what they are.
    option = [f"--jit-ckpt=dir={folder},relaunch=off"] if loaded else ["--no-kill"]
    line = ["sbatch", "--parsable", f"--nodes={probe_batch.NODES}", f"--ntasks-per-node={probe_batch.A_NODE}"]
    line += [f"--time={MINUTES}", "--job-name=jit-ckpt-doctor", f"--output={folder}/out", *option, *sbatch, script]
    try:
        said = run(line, SUBMIT)
    except SlurmError as error:
        raise ProbeError(str(error)) from error
    job, _, cluster = said.strip().splitlines()[-1].partition(";")
    there = [f"--clusters={cluster}"] if cluster else []
    return job, lambda command, patience: run([command[0], *there, *command[1:]], patience)


def _await(
    folder: str, job: str, deadline: float, say: Callable[[str], None], run: Run, look: float, visible: float
) -> dict[str, Any]:
    slurm, state, over = ScontrolSlurm(run), "", 0.0
    while True:
        results = _read(folder)
        if results.get("done"):
            return results
        now = time.monotonic()
        if over and now > over + visible:
            raise ProbeError(_silent(folder, job, state, results))
        if now > deadline:
            raise ProbeError(
                f"job {job} was not done in time and is cancelled; it is {state or 'unknown'}: give --wait"
            )
        with contextlib.suppress(SlurmError):  # slurmctld may be busy; the deadline stands
            info = slurm.job(job)
            if info.state != state:
                state = info.state
                say(f"job {job} is {state}" + (f" on {','.join(info.nodes)}" if info.nodes else ""))
            over = over or (now if state in OVER else 0.0)
        time.sleep(look)


def _silent(folder: str, job: str, state: str, results: dict[str, Any]) -> str:
    out = (plugstack.text(os.path.join(folder, "out")) or "").strip()
    if results or out:
        return f"job {job} ended as {state} before its results were whole; it said: {out[-1000:] or 'nothing'}"
    return (
        f"job {job} ended as {state}, and nothing of it shows in {folder}: the nodes do not see this host's folder; "
        "give --dir=FOLDER on a shared file system"
    )


def _end(job: str, run: Run, look: float) -> None:
    """Cancel the job if it still is there, and wait until its processes have left the folder."""
    slurm, until = ScontrolSlurm(run), time.monotonic() + GONE
    while time.monotonic() < until:
        try:
            info = slurm.job(job)
            if info.state not in OVER:
                run(["scancel", job], SUBMIT)
            elif not info.completing:
                return
        except SlurmError:
            if slurm.answers():
                return  # Slurm has forgotten it
        time.sleep(look)


def _read(folder: str) -> dict[str, Any]:
    os.listdir(folder)  # makes NFS ask its server
    try:
        found = json.loads(plugstack.text(os.path.join(folder, "results.json")) or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _missing(directory: str) -> list[str]:
    """Return the folders that the directory still needs, the deepest first."""
    return [p for p in [directory, *map(str, Path(directory).parents)] if not os.path.isdir(p)]
