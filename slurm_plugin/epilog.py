"""Node epilog: remove what jit-ckpt kept on this node for the job that has ended. Runs as root after every job.

Rule 1: it touches only `<spool>/<job id>` in a spool that root owns, and follows no symbolic link.
Rule 2: it always ends with 0: a bug here must not drain a node.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping

from slurm_plugin import contract


def main() -> int:
    """Run as Slurm's Epilog."""
    try:
        trouble = clear(os.environ)
        if trouble:
            sys.stderr.write(f"jit-ckpt: epilog: {trouble}\n")
    except Exception as error:  # Rule 2
        sys.stderr.write(f"jit-ckpt: epilog: {error!r}\n")
    return 0


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
            shutil.rmtree(folder)  # does not follow links inside either
        else:
            os.unlink(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot remove {folder}: {error.strerror}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
