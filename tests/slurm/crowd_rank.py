"""One rank of one of many jobs: it trains until FOLDER/strike appears, leaves what looks like a checkpoint, and goes.

Started as `crowd_rank.py FOLDER`; in its second launch it ends well at once. Without jit-srun it tells nobody.
"""

import json
import os
import sys
import time
from pathlib import Path

from slurm_plugin import contract, notice

PATIENCE = 600.0  # seconds until the stroke
FOLDER = Path(sys.argv[1])
ATTEMPT = int(os.environ.get(contract.ENV_ATTEMPT, "0"))
LAUNCHER = os.environ.get(contract.ENV_LAUNCHER, "")
JOB = FOLDER / "state" / f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def tell(**event: object) -> None:
    """Send a notice as the runtime does."""
    assert not LAUNCHER or notice.send(LAUNCHER, {**event, "step": os.environ["SLURM_STEP_ID"]}, 60.0)


def main() -> int:
    """Live until the stroke."""
    tell(event="started", minibatch=5 * ATTEMPT, restored="")
    (FOLDER / f"up-{JOB.name}-{ATTEMPT}").touch()
    if ATTEMPT:
        tell(event="finished")
        return 0
    end = time.monotonic() + PATIENCE
    while not (FOLDER / "strike").exists():
        if time.monotonic() > end:
            return 99
        time.sleep(0.5)
    (JOB / "m5-r0").mkdir(parents=True)
    (JOB / "claim-r0.json").write_text(json.dumps({"minibatch": 5}))
    fault = {"kind": "death", "ranks": [0], "unreachable": [], "minibatch": 5, "detail": "the crowd's stroke"}
    tell(event="fault", fault=fault, nodes=[os.environ["SLURMD_NODENAME"]], phase="training")
    tell(event="committed", directory=str(JOB / "m5-r0"), minibatch=5)
    return contract.EXIT_COMMITTED


if __name__ == "__main__":
    sys.exit(main())
