"""Node epilog, as root after every job: judge the node by what happened during the job, mark it, and clear its spool.

Rule 1: of what jobs leave it reads only `<spool>/<job id>`, which root's plugin wrote, and follows no symbolic link.
Rule 2: it ends with 0, but for a bad node that Slurm could not be told of: then slurmd drains it by the exit code.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping

from slurm_plugin import contract, evidence
from slurm_plugin.evidence import Finding
from slurm_plugin.occasion import Occasion, act, kernel_begin, kernel_judged, verdict_of
from slurm_plugin.occasion import main as run_hook
from slurm_plugin.spool import SpoolError


def main() -> int:
    """Run as Slurm's Epilog."""
    return run_hook("epilog", end)


def end(occasion: Occasion) -> int:
    """Judge, mark and clear; EXIT_NODE_BAD for a bad node that could not be marked."""
    try:
        return judge(occasion)
    finally:
        if occasion.spool:
            trouble = clear(occasion.environ, occasion.spool.path, occasion.spool.owner)
            if trouble:
                occasion.say(trouble)


def judge(occasion: Occasion) -> int:
    """Turn the evidence of this job into a verdict on this node, and act on it."""
    since = kernel_begin(occasion) if occasion.job else None
    seen = occasion.look(since)
    told = act(occasion, verdict_of(occasion, [*seen.findings, *_tasks(occasion)]))
    if not told:
        return contract.EXIT_NODE_BAD
    kernel_judged(occasion, seen.last)
    return 0


def _tasks(occasion: Occasion) -> list[Finding]:
    if not occasion.spool or not occasion.job:
        return []
    try:
        return evidence.of_tasks(occasion.spool.read(f"{occasion.job}/{contract.TASKS}"))
    except SpoolError as error:
        occasion.say(str(error))
        return []


def clear(environ: Mapping[str, str], spool: str = contract.SPOOL, owner: int = 0) -> str:
    """Remove the folder of the job that `environ` names; return what hindered it, "" for nothing.

    Args:
        owner: the user id that must own the spool.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d{1,10}", job, re.ASCII):
        return f"SLURM_JOB_ID is {job!r}, not a number" if job else ""
    try:
        held = os.lstat(spool)
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != owner or held.st_mode & 0o022:
        return f"{spool} is not a directory that only its owner {owner} can write; left alone"
    folder = os.path.join(spool, job)
    try:
        if stat.S_ISDIR(os.lstat(folder).st_mode):
            _remove(folder)
        else:
            os.unlink(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot remove {folder}: {error.strerror}"
    return ""


def _remove(folder: str) -> None:
    """Remove a folder of files, links among them; what else is in it (nothing of ours) is left to shutil."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            import shutil  # here: it loads compression and more, and every job waits for its epilog

            shutil.rmtree(folder)  # does not follow links inside either
            return
        os.unlink(entry.path)
    os.rmdir(folder)


if __name__ == "__main__":
    sys.exit(main())
