"""Start the processes of a measurement and see to it that none of them outlives it.

Rule: every wait has a deadline; a child that fails is an error with the end of what it said.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from bench.rows import BenchError

REPO = Path(__file__).resolve().parent.parent
END = 5.0  # seconds for a killed process to be gone


@contextlib.contextmanager
def started(
    lines: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], log: IO[str], *, pipes: bool = False
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run one process a command line, in the checkout; kill what is left at the end.

    Args:
        log: gets their standard error, and their standard output unless `pipes` is set.
        pipes: give them pipes on standard input and output.
    """
    children: list[subprocess.Popen[str]] = []
    source, sink = (subprocess.PIPE, subprocess.PIPE) if pipes else (subprocess.DEVNULL, log)
    try:
        for line, environ in zip(lines, environs, strict=True):
            children.append(
                subprocess.Popen(line, env=environ, cwd=REPO, text=True, stdin=source, stdout=sink, stderr=log)
            )
        yield children
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait(END)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def wait(children: Sequence[subprocess.Popen[str]], timeout: float, log: IO[str]) -> None:
    """Wait until all have ended well.

    Raises:
        BenchError: one failed, or they took longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while any(child.poll() is None for child in children):
        failed = next((c for c in children if c.poll()), None)
        if failed is not None or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [child.poll() for child in children]
    if any(codes) or None in codes:
        raise BenchError(f"the measured processes ended with {codes} (None: not within {timeout:g} s)\n{tail(log)}")


def tail(log: IO[str], size: int = 3000) -> str:
    """Return the end of a log."""
    log.flush()
    text = Path(log.name).read_text(encoding="utf-8", errors="replace")
    return text[-size:]
