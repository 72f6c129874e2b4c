"""`python -m bench [GROUP ...]`: measure, print a table, write build/bench/<group>.json.

Groups: hot_path (what a minibatch pays), save (throughput of a checkpoint), hooks (what a job on a node waits for),
submit (what jobs without the option pay), detect (until a failure is known), recovery (until training goes on), gpu
(what it costs on a GPU; nothing without one). hooks, submit, detect and recovery bring up a real cluster (root).
Nothing that was started stays.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench.children import REPO
from bench.rows import BenchError, Row, table, write
from testbed import TestbedError

GROUPS: Final = ("hot_path", "save", "hooks", "submit", "detect", "recovery", "gpu")
BEGAN: Final = time.monotonic()


def say(line: str) -> None:
    """Print one line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}] {line}", flush=True)


def main() -> int:
    """Measure the groups asked for; 0 when all could be measured, whether or not the targets were met."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under three minutes, less certain")
    parser.add_argument("--out", type=Path, default=REPO / "build" / "bench")
    args = parser.parse_args()
    for unknown in set(args.groups) - set(GROUPS):
        parser.error(f"no group {unknown!r}; there are {', '.join(GROUPS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    failed = False
    rows: list[Row] = []
    try:
        for group in args.groups or GROUPS:
            try:
                rows += _group(group, args.quick, args.out)
            except (BenchError, TestbedError) as error:
                failed = True
                print(f"bench: {group}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("bench: interrupted; nothing is left running", file=sys.stderr)
        return 130
    if rows:
        print("\n" + table(rows))
    return 1 if failed else 0


def _group(group: str, quick: bool, out: Path) -> list[Row]:
    say(f"{group}: begins")
    before, begun = os.getloadavg(), time.monotonic()
    rows: list[Row] = import_module(f"bench.{group}").measure(say, quick)
    write(out / f"{group}.json", rows, _about(quick, before[0], time.monotonic() - begun))
    say(f"{group}: done, {out / f'{group}.json'}")
    return rows


def _about(quick: bool, load_before: float, seconds: float) -> dict[str, Any]:
    return {
        "quick": quick,
        "seconds": round(seconds, 1),
        "cpus": os.cpu_count(),
        "load": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},  # over a minute
        "python": platform.python_version(),
        "kernel": platform.release(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
