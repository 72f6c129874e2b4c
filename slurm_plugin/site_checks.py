"""Run the site's own checks: the executables of one folder, all at once, each under the same deadline.

    exit code 0: the node is fine    1: it is bad, and the first line printed says why    other: the check failed, which
    says nothing about the node

Rule: they run as root, so a folder or file that anybody but root can write runs nothing and is told in the log.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Final

from slurm_plugin.child import ENVIRONMENT, Answer, Child
from slurm_plugin.evidence import BAD, NOTE, Finding

CHECK: Final = "site"
PUT_ASIDE: Final = re.compile(
    r"\..*|.*~|.*\.(bak|orig|rpm(new|orig|save)|dpkg-\w+|ucf-\w+)"
)  # by editors, package managers


def begin(folder: str, deadline: float, environ: Mapping[str, str], owner: int = 0) -> Callable[[], list[Finding]]:
    """Start them; what is returned waits for them until `deadline` and gives the findings.

    Args:
        environ: what they learn of the occasion, besides a plain PATH.
    """
    started: list[tuple[str, Child]] = []
    notes: list[Finding] = []
    try:
        if fault := _untrusted(folder, owner, stat.S_ISDIR):
            return lambda: [Finding(CHECK, NOTE, fault)]
        names = sorted(name for name in os.listdir(folder) if not PUT_ASIDE.fullmatch(name))
    except FileNotFoundError:
        return list
    for name in names:
        path = os.path.join(folder, name)
        try:
            if fault := _untrusted(path, owner, stat.S_ISREG):
                notes.append(Finding(CHECK, NOTE, fault))
            elif os.stat(path).st_mode & stat.S_IXUSR:
                started.append((name, Child.start([path], {**ENVIRONMENT, **environ})))
        except OSError as error:
            notes.append(Finding(CHECK, NOTE, f"{path} cannot be run: {error.strerror}"))

    def end() -> list[Finding]:
        answers = ((name, child.end(deadline)) for name, child in started)
        return notes + [found for name, answer in answers if (found := judge(name, answer))]

    return end


def judge(name: str, answer: Answer) -> Finding | None:
    """Say what the end of one check means."""
    lines = answer.text.strip().splitlines()
    said = f": {lines[0]}" if lines else ""
    if answer.code == 0:
        return None
    if answer.code == 1:
        return Finding(CHECK, BAD, f"{name}{said}")
    how = "was not done in time" if answer.code is None else f"ended with {answer.code}"
    return Finding(CHECK, NOTE, f"{name} {how}, which says nothing of the node{said}")


def _untrusted(path: str, owner: int, kind: Callable[[int], bool]) -> str:
    found = os.lstat(path)
    if not kind(found.st_mode):
        return f"{path} is not of the right kind; not run"
    if found.st_uid != owner or found.st_mode & 0o022:
        return f"{path} can be written by others than its owner {owner}; not run"
    return ""
