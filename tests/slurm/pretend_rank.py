"""A rank that imitates the runtime: it tells jit-srun what a real one would, and leaves what looks like a checkpoint.

Started as `pretend_rank.py FOLDER`. The test plays fate: it writes FOLDER/fault<attempt>.json (the event to report)
after it has done the damage, or FOLDER/finish.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from slurm_plugin import contract, notice

FOLDER = Path(sys.argv[1])
RANK, SIZE = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
ATTEMPT = int(os.environ["JIT_CKPT_ATTEMPT"])
JOB = FOLDER / "state" / os.environ["SLURM_JOB_ID"]
SIGNALS: list[int] = []


def tell(event: dict[str, object]) -> None:
    """Send a notice as the runtime does."""
    assert notice.send(os.environ["JIT_CKPT_LAUNCHER"], {**event, "step": os.environ["SLURM_STEP_ID"]}, 5.0)


def note(name: str, **facts: object) -> None:
    """Leave a file for the test."""
    path = FOLDER / f".{name}.{RANK}.{ATTEMPT}"
    path.write_text(json.dumps(facts))
    path.rename(FOLDER / name)


def save(minibatch: int) -> None:
    """Leave what a commit leaves."""
    directory = JOB / f"m{minibatch}-r{ATTEMPT}"
    directory.mkdir()
    (JOB / f"claim-r{ATTEMPT}.json").write_text(json.dumps({"minibatch": minibatch}))
    tell({"event": "committed", "directory": str(directory), "minibatch": minibatch})


def report(event: dict[str, object]) -> int:
    """Play the coordinator: report the fault, save or not, return the exit code."""
    tell(event)
    if event.get("lose"):
        tell({"event": "lost", "reason": "no replica left", "error": "Traceback: pretended"})
        return contract.EXIT_LOST
    save(int(event["fault"]["minibatch"]))  # type: ignore[index]
    return contract.EXIT_COMMITTED


def main() -> int:
    """Live until fate strikes."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda got, _: SIGNALS.append(got))
    note(f"rank{RANK}-{ATTEMPT}", pid=os.getpid(), node=os.environ["SLURMD_NODENAME"], port=os.environ["MASTER_PORT"])
    if RANK == 0:
        tell({"event": "started", "minibatch": 10 * ATTEMPT, "restored": ""})
        tell({"event": "update", "minibatch": 10 * ATTEMPT})
    end = time.monotonic() + 100
    while time.monotonic() < end:
        time.sleep(0.03)
        if (FOLDER / "finish").exists():
            if RANK == 0:
                tell({"event": "finished"})
            return int((FOLDER / "finish").read_text() or 0)
        if (FOLDER / f"left{ATTEMPT}").exists():
            return int((FOLDER / f"left{ATTEMPT}").read_text())
        event = {}
        if (FOLDER / f"fault{ATTEMPT}.json").exists():
            event = json.loads((FOLDER / f"fault{ATTEMPT}.json").read_text())
        elif SIGNALS:
            note(f"signal{RANK}-{ATTEMPT}", signal=SIGNALS[0])
            fault = {"kind": "signal", "ranks": [RANK], "unreachable": [], "minibatch": 10 * ATTEMPT + 5}
            event = {"event": "fault", "fault": {**fault, "detail": "a signal"}, "nodes": [], "phase": "training"}
        if event and event.get("coordinator", 0) == RANK:
            code = report(event)
            left = FOLDER / f".left{ATTEMPT}"
            left.write_text(str(code))
            left.rename(FOLDER / f"left{ATTEMPT}")
            return code
    return 99


if __name__ == "__main__":
    sys.exit(main())
