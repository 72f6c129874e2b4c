"""One rank of `jit-ckpt doctor --probe`: meet the others as a training does, let one die, and tell how the rest fare.

    python3 -m jitmpi.probe FOLDER       started by srun; writes FOLDER/rank<r>.json, again at each step on the way

Rule 1: it goes the way of a real job: the same world, closed before anything happens, and the same control plane.
Rule 2: every wait has a deadline, and the end is os._exit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from jitmpi import comm, config, meet
from jitmpi.control import Gone
from jitmpi.errors import JitError
from slurm_plugin.contract import Options

MEET: Final = 60.0  # seconds for the ranks to become a world and to link
NOTICE: Final = 30.0  # seconds for the closed connection to show
LIVE: Final = 8.0  # seconds that a survivor has to live on; Slurm and MPI libraries that kill do it within two or three
MET, SURVIVED, NOT_MET, NOT_SEEN = "met", "survived", "not met", "not seen"


class Report:
    """What this rank says of itself, in a file that is whole at any time."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, f"rank{rank}.json")
        self._values: dict[str, Any] = {"rank": rank}

    def say(self, **values: Any) -> None:
        """Add to it, for the reader to see now."""
        self._values |= values
        aside = f"{self._path}.{os.getpid()}"
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(self._values, file)
        os.replace(aside, self._path)

    def offset(self) -> float:
        """Seconds that this host's clock is ahead of the file system's."""
        return time.time() - os.stat(self._path).st_mtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank to its end."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    found = config.read()
    if found is None:
        print("jit-ckpt: jitmpi.probe is started by `jit-ckpt doctor --probe`", file=sys.stderr)
        return 2
    settings = replace(found, options=Options(dir=folder))
    report = Report(folder, settings.rank)
    report.say(node=settings.node, option=found.options.dir)
    report.say(offset=report.offset())
    try:
        return play(settings, report)
    except JitError as error:
        report.say(state=NOT_MET, error=str(error))
        print(f"jit-ckpt: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)  # an orderly end would call MPI_Finalize in a world that is not whole


def play(settings: config.Settings, report: Report) -> int:
    """Meet, see the last rank die, live on."""
    deadline = time.monotonic() + MEET
    world = comm.open_world(settings)
    report.say(world=world.name)
    plane, _members = meet.connect(world, settings, deadline)
    report.say(state=MET, linked=len(plane.peers))
    world.exchange(b"", deadline)
    world.close()
    victim = settings.size - 1
    if settings.rank == victim:
        time.sleep(0.2)  # the others are in their wait
        report.say(died=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    until, seen = time.monotonic() + NOTICE, 0.0
    while not seen and time.monotonic() < until:
        events = plane.poll(until - time.monotonic())
        seen = time.time() if any(isinstance(e, Gone) and e.rank == victim for e in events) else 0.0
    report.say(state=NOT_SEEN) if not seen else report.say(seen=seen)
    time.sleep(LIVE)
    if seen:
        report.say(state=SURVIVED)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
