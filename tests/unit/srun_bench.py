"""A bench for jit-srun: small programs named srun and scontrol before the real ones on the path."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]

SRUN = """#!{python}
import json, os, sys, time
sys.path.insert(0, {repo!r})
from pathlib import Path
from slurm_plugin import notice
here = Path({here!r})
attempt = os.environ["JIT_CKPT_ATTEMPT"] if "JIT_CKPT_LAUNCHER" in os.environ else "plain"
(here / f"srun-{{attempt}}").write_text(" ".join(sys.argv[1:]))
(here / f"mode-{{attempt}}").write_text(os.environ.get("SLURM_OPEN_MODE", ""))
play = json.loads((here / "play.json").read_text()).get(attempt, {{"code": 0}})
sys.stderr.write(play.get("said", ""))
for event in play.get("events", []):
    assert notice.send(os.environ["JIT_CKPT_LAUNCHER"], event, 10.0)
if play.get("save"):
    job = here / "state" / os.environ["JIT_CKPT_TRAINING"]
    (job / f"m{{play['save']}}-r{{attempt}}").mkdir()
    (job / f"claim-r{{attempt}}.json").write_text("{{}}")
print(play.get("says", ""), end="", flush=True)
end = time.monotonic() + play.get("stays", 0)
while time.monotonic() < end and not (here / "looked-for").exists():
    time.sleep(0.05)
sys.exit(play["code"])
"""

SCONTROL = """#!/bin/sh
echo "$*" >> {here}/asked
case "$*" in
"show job 7" | "show job 7_3") cat {here}/job ;;
"show step "*) touch {here}/looked-for ;;
"requeue 7") kill -TERM $PPID ;;
"show config") echo "SlurmdPort = {port}"; cat {here}/boot 2>/dev/null || : ;;
"show node "*) for n in n1 n2 n3; do echo "NodeName=$n Arch=x"; echo "   NodeAddr=127.0.0.1 Port={port}"; done ;;
esac
"""

JOB = """JobId=7 JobName=x
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   SubmitTime=2090-01-01T00:00:00
   StartTime=2026-01-01T00:00:00 EndTime=Unknown Deadline=N/A
   ReqNodeList=(null) ExcNodeList=n9
   NodeList=n[1-3]
   BatchHost=n1
"""


@dataclass
class Bench:
    """A job with three nodes that all answer."""

    here: Path
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, play: dict[str, object] | None = None, state: str = "RUNNING") -> tuple[int, str]:
        """Run jit-srun; its exit code and what it said."""
        (self.here / "play.json").write_text(json.dumps(play or {}))
        (self.here / "job").write_text(JOB.format(state=state))
        line = [sys.executable, "-m", "slurm_plugin.relaunch", *words]
        done = subprocess.run(line, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    def srun(self, *words: str, play: dict[str, object] | None = None) -> subprocess.CompletedProcess[str]:
        """Run srun as a batch script finds it."""
        (self.here / "play.json").write_text(json.dumps(play or {}))
        (self.here / "job").write_text(JOB.format(state="RUNNING"))
        line = ["/bin/sh", "-c", 'exec srun "$@"', "sh", *words]
        return subprocess.run(line, env=self.environ, capture_output=True, text=True, timeout=60, check=False)

    def decisions(self, training: str = "7") -> list[str]:
        """What was decided, in order."""
        lines = (self.here / "state" / training / "journal.jsonl").read_text().splitlines()
        return [e["action"] for e in map(json.loads, lines) if e["entry"] == "decision"]

    def asked(self, *beginnings: str) -> set[str]:
        """The questions to Slurm that begin so."""
        return {a for a in (self.here / "asked").read_text().splitlines() if a.startswith(beginnings)}

    def line(self, attempt: int | str) -> str:
        """The line that a launch was started with; "plain" for one that jit-srun knows nothing of."""
        return (self.here / f"srun-{attempt}").read_text()


@contextlib.contextmanager
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Programs, environment and a port that answers for every node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"python": sys.executable, "repo": str(REPO), "here": str(tmp_path), "port": server.getsockname()[1]}
        (tmp_path / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", "#!/bin/sh\n")):
            path = tmp_path / "bin" / name
            path.write_text(text.format(**words) if "{" in text else text)
            path.chmod(0o755)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "JIT_CKPT"))}
        environ |= {
            "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
            "PYTHONPATH": str(REPO),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURMD_NODENAME": "n1",  # jit-srun's address is that of this node: not every machine knows its own name
            "SLURM_SPANK_JIT_CKPT": f"dir={tmp_path}/state",
        }
        yield Bench(tmp_path, environ)


def fault(kind: str, rank: int, away: bool = False) -> dict[str, object]:
    """A fault of one of two ranks at minibatch 4."""
    told = {"kind": kind, "ranks": [rank], "unreachable": [rank] if away else [], "minibatch": 4, "detail": "gone"}
    return {"event": "fault", "fault": told, "nodes": ["n1", "n2"], "phase": "training"}


STARTED = {"event": "started", "minibatch": 0, "restored": ""}
COMMITTED = {"event": "committed", "directory": "/x", "minibatch": 4}
# A launch that has saved, and whose srun does not end before somebody asks for its step.
SAVED: dict[str, Any] = {"events": [STARTED, fault("death", 1), COMMITTED], "code": 0, "stays": 50}
ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
