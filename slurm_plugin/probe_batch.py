"""The batch step of `jit-ckpt doctor --probe`: kill one rank under each PMI that srun offers, and note what followed.

    python3 -m slurm_plugin.probe_batch FOLDER      writes FOLDER/results.json, again after each trial

Rule: every trial ends by its deadline, whatever the ranks, MPI or srun do; what is left of it ends with the job.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_plugin import contract
from slurm_plugin.arguments import OURS

NODES, A_NODE = 2, 2  # the job's nodes, and ranks on each: the last rank dies, on the node without the batch step
TRIAL: Final = 130.0  # seconds for a trial: the ranks' own deadlines and the start of Python
LIST: Final = 20.0  # seconds for `srun --mpi=list`
STEP: Final = 20.0  # seconds for another step to begin beside the broken one
END: Final = 5.0  # seconds for srun to end its step when it is told to
LOOK: Final = 0.05  # seconds between two looks at the reports
TAIL: Final = 2000  # bytes kept of what a trial said
KNOWN: Final = ("pmix", "pmi2", "none")  # what jit-ckpt can use, the best first


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each PMI and write what happened."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    results: dict[str, Any] = {"node": os.environ.get("SLURMD_NODENAME", ""), "trials": [], "done": False}
    results["carried"] = contract.ENV_OPTIONS_JOB in os.environ
    results["listed"] = types(_said(["srun", "--mpi=list"], LIST))
    write(folder, results)
    for mpi in results["listed"] or KNOWN[-1:]:
        results["trials"].append(run(folder, mpi))
        write(folder, results)
    results["done"] = True
    write(folder, results)
    return 0


def types(listed: str) -> list[str]:
    """Read `srun --mpi=list`: of the types that it names, those that jit-ckpt can use."""
    words = re.findall(r"[\w]+", listed)
    return [name for name in KNOWN if name in words]


def write(folder: str, results: Mapping[str, Any]) -> None:
    """Replace the results at once, for the doctor to read at any time."""
    aside = os.path.join(folder, ".results")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        json.dump(results, file)
    os.replace(aside, os.path.join(folder, "results.json"))


def run(folder: str, mpi: str) -> dict[str, Any]:
    """Start the ranks under one PMI, begin another step once one has died, and wait for the end."""
    own = os.path.join(folder, mpi)
    os.mkdir(own, 0o700)
    environ = {**os.environ, contract.ENV_OPTIONS: f"dir={own}", contract.ENV_ATTEMPT: "0"}
    size, until = NODES * A_NODE, time.monotonic() + TRIAL
    line = [*step(mpi, size), sys.executable, "-B", "-m", "jitmpi.probe", own]
    with open(os.path.join(own, "said"), "w+b") as said:
        srun = subprocess.Popen(line, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        beside: dict[str, Any] = {}
        while srun.poll() is None and time.monotonic() < until:
            if not beside and all(r.get("seen") for r in reports(own) if r["rank"] < size - 1) and _died(own, size):
                beside = step_beside()
            time.sleep(LOOK)
        ended = srun.poll()
        if ended is None:
            _end(srun)
        said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL))
        words = said.read().decode(errors="replace")
    return {"mpi": mpi, "size": size, "code": ended, "said": words, "reports": reports(own), **beside}


def step(mpi: str, tasks: int) -> list[str]:
    """Return the srun command for a step, as jit-srun would write it."""
    return ["srun", *OURS, f"--nodes={NODES}", f"--ntasks={tasks}", f"--mpi={mpi}"]


def step_beside() -> dict[str, Any]:
    """Begin another step while the survivors of the first still live; say how long it took, or why it did not."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*step("none", NODES), "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=STEP, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError) as error:
        return {"beside_error": f"did not begin: {error}"}
    if done.returncode:
        return {"beside_error": done.stderr[-TAIL:].strip() or f"exit code {done.returncode}"}
    return {"beside": time.monotonic() - begin}


def reports(folder: str) -> list[dict[str, Any]]:
    """Read what the ranks have written so far, by rank."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(folder), "rank*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(Path(path).read_text()))
    return sorted(found, key=lambda report: int(report["rank"]))


def _died(folder: str, size: int) -> bool:
    return any(r.get("died") for r in reports(folder)) and len(reports(folder)) == size


def _end(srun: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        srun.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(END)
            return


def _said(command: Sequence[str], patience: float) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=patience, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
