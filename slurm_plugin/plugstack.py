"""Turn Slurm's plugstack.conf, with all that it includes, into its lines and the arguments that our plugin gets there.

Rule: only what Slurm would read is read, and a file that cannot be read has no lines.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from slurm_plugin import contract

LIBRARY: Final = "jit_ckpt.so"
# Where it is when Slurm is not asked: beside slurm.conf, or where slurmd puts what a configless controller sent.
USUAL: Final = ("/etc/slurm/plugstack.conf", "/run/slurm/conf/plugstack.conf")
CONF: Final = "conf="
SHIM: Final = "shim-dir="
DEEPEST: Final = 5  # includes within includes
LARGEST: Final = 1 << 20  # bytes of a configuration file, or of a hook's script


class Line(NamedTuple):
    """One line, and where it is: `origin` reads "path:7"."""

    text: str
    origin: str


def text(path: str) -> str | None:
    """Read a configuration file or script; None when that cannot be done."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(LARGEST).decode(errors="replace")
    except OSError:
        return None


def read(path: str, depth: int = 0) -> list[Line] | None:
    """Read the file and what it includes; None when it cannot be read."""
    own = text(path)
    if own is None:
        return None
    found: list[Line] = []
    for number, line in enumerate(own.splitlines(), 1):
        found.append(Line(line, f"{path}:{number}"))
        include = re.match(r"\s*include\s+(\S+)", line)
        if include and depth < DEEPEST:
            for name in sorted(glob.glob(os.path.join(os.path.dirname(path), include.group(1)))):
                found += read(name, depth + 1) or []
    return found


def first(environ: Mapping[str, str]) -> list[Line]:
    """Read the one that commands in this environment use; no lines when there is none."""
    named = environ.get("SLURM_CONF", "")
    for path in ([os.path.join(os.path.dirname(named), "plugstack.conf")] if named else []) + list(USUAL):
        lines = read(path)
        if lines is not None:
            return lines
    return []


def arguments(lines: Iterable[Line]) -> tuple[Sequence[str], str]:
    """Return the words after our plugin's path, and where they are; the first line that names it counts."""
    for line in lines:
        found = re.match(rf"\s*(?:optional|required)\s+\S*{re.escape(LIBRARY)}(?:\s+(.*))?$", line.text)
        if found:
            return (found.group(1) or "").split(), line.origin
    return (), ""


def site_file(words: Iterable[str], usual: str = contract.SITE) -> str:
    """Return the site's file that the plugin is told to read."""
    return next((word[len(CONF) :] for word in reversed([*words]) if word.startswith(CONF)), usual)
