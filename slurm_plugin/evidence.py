"""What speaks against a node: one `Finding` a fact, and what the ends of a job's tasks on it say.

Rule 1: data and pure functions; who gathers the facts is in the checks, what follows from them is in health.
Rule 2: the ends of a user's processes are never more than a suspicion: a program can die of anything by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

BAD: Final = "bad"  # the node cannot be trusted with a job
SUSPECT: Final = "suspect"  # broken hardware looks like this, and so do other things
NOTE: Final = "note"  # nothing is known against the node; for the log only

LONGEST: Final = 100  # characters of one fact: a few must fit into the reason that sinfo shows

# Signals that both broken hardware and broken programs cause. KILL and TERM are what people, Slurm and the kernel's
# out-of-memory killer send: they say nothing about a node.
TELLING: Final = {4: "SIGILL", 7: "SIGBUS", 11: "SIGSEGV"}
FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0  # above are the batch script, the extern and the interactive step
_TASK: Final = re.compile(rb"(\d{1,10}) (\d{1,10}) (-?\d{1,10}) \d{1,20}(?:\.\d{1,9})?")


@dataclass(frozen=True)
class Finding:
    """One fact: the check that found it, how much it weighs, and what it is in a few words."""

    check: str
    grade: str
    what: str


def plain(text: str, longest: int = LONGEST) -> str:
    """Make one printable line of whatever a tool wrote, without what has a meaning for scontrol (quotes, "=")."""
    return one_line(text.replace("=", ":").translate({34: "'", 92: "/", 96: "'"}), longest)


def one_line(text: str, longest: int) -> str:
    """Make one printable line of any text."""
    line = re.sub(r"[^\x20-\x7e]", "?", re.sub(r"\s+", " ", text).strip())
    return line if len(line) <= longest else line[: longest - 3] + "..."


def of_tasks(text: bytes) -> list[Finding]:
    """Read `<step id> <task rank> <wait status> <unix time>` lines (spank/spool.c) into at most one suspicion."""
    for line in text.splitlines():
        found = _TASK.fullmatch(line)
        if not found:
            continue
        step, rank, status = (int(n) for n in found.groups())
        name = TELLING.get(status & 0x7F) if status >= 0 else None
        if name and step < FIRST_SPECIAL_STEP:
            return [Finding("tasks", SUSPECT, f"rank {rank} of step {step} died of {name}")]
    return []
