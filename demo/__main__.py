"""`python -m demo`: run the example twice on a real Slurm cluster, tell what the failure cost, draw it.

Writes build/demo/{summary.json, timeline.png, loss.png} and ends with 0 only if the promise was kept: the same bits,
one minibatch done again, none lost. The cluster is taken down however this ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from demo import draw, play
from demo.record import DemoError, Record
from demo.story import Failure, story, summary
from demo.timeline import Places, find_marks, floor, lanes, stages
from demo.verdict import compare
from testbed import Cluster, TestbedError

SIZES: Final = "--batch 4 --workers 1 --report 5"  # about half a second a minibatch for 4 ranks on 2 cores
BUILD: Final = play.REPO / "build" / "demo"
RESULTS: Final = ("summary.json", "timeline.png", "loss.png")
BEGAN: Final = time.monotonic()


def say(line: str) -> None:
    """Print one line with the seconds since the demo began."""
    print(f"[{time.monotonic() - BEGAN:6.1f}] {line}", flush=True)


def show(line: str) -> None:
    """Print one line of the job's output."""
    say(f"    {line}")


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--minibatches", type=int, default=50, help="of each run; even")
    parser.add_argument("--sizes", default=SIZES, help="options of examples/lm/train.py")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return demonstrate(args.minibatches, args.sizes)
    except (DemoError, TestbedError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the cluster is down", file=sys.stderr)
        return 130


def demonstrate(minibatches: int, sizes: str) -> int:
    """Run the job without and with a failure and judge the two; return the exit status."""
    for name in RESULTS:
        (BUILD / name).unlink(missing_ok=True)  # or a demo that fails would leave those of an earlier one
    say("bringing up a Slurm cluster of 5 nodes")
    cluster = Cluster("demo", nodes=play.RANKS + play.SPARES, plugin=True)
    cluster.down()  # what a demo that was killed has left
    with cluster:
        version = cluster.version()
        say(f"Slurm {version} is up; first the job without a failure")
        calm, _ = run(cluster, "calm", minibatches, sizes, None)
        say("the same job again, and this time a node will lose its power")
        rough, failed = run(cluster, "rough", minibatches, sizes, minibatches // 2)
        say("taking the cluster down")
    if failed is None:
        raise DemoError("the job ended before the power was cut; use more minibatches")
    return judge(calm, rough, failed, minibatches, version)


def run(
    cluster: Cluster, name: str, minibatches: int, sizes: str, cut: int | None
) -> tuple[Record, tuple[Failure, Places] | None]:
    """Run the job once; cut a node's power at minibatch `cut`. Return the record and what failed where."""
    job = play.submit(cluster, name, minibatches, sizes)
    power = None if cut is None else play.PowerCut(cluster, job, cut, say)
    try:
        play.follow(cluster, job, show, power.look if power else lambda minibatch: None)
    finally:
        record = play.keep(job, BUILD / name)
    if power is None or power.failure is None:
        return record, None
    before, after = play.launch_nodes(job, 0), play.launch_nodes(job)
    spare = tuple(node for node in cluster.node_names if node not in before)
    return record, (power.failure, Places(before, after, power.failure.node, spare))


def judge(calm: Record, rough: Record, failed: tuple[Failure, Places], minibatches: int, version: str) -> int:
    """Compare, tell, draw and write; return the exit status."""
    failure, places = failed
    verdict = compare(calm, rough, minibatches)
    for problem in verdict.problems:
        print(f"demo: {problem}", file=sys.stderr)
    marks, floor_s = find_marks(rough, failure.when), floor(calm)
    facts = summary(rough, verdict, failure, marks, places, floor_s, version)
    (BUILD / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    draw.draw_timeline(BUILD / "timeline.png", marks, lanes(marks, places, rough.losses), stages(marks), floor_s)
    draw.draw_loss(BUILD / "loss.png", calm.losses, rough.losses, facts["failure"]["minibatch"], verdict.bitwise_equal)
    print("\n" + story(facts, minibatches) + "\n")
    for name in RESULTS:
        print(f"  {_short(BUILD / name)}")
    return 1 if verdict.problems else 0


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
