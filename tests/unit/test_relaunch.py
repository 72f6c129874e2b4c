"""jit-srun as a command, with small programs named srun and scontrol before the real ones on the path."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

SRUN = """#!{python}
import json, os, sys
sys.path.insert(0, {repo!r})
from pathlib import Path
from slurm_plugin import notice
here = Path({here!r})
attempt = os.environ.get("JIT_CKPT_ATTEMPT", "plain")
(here / f"srun-{{attempt}}").write_text(" ".join(sys.argv[1:]))
play = json.loads((here / "play.json").read_text()).get(attempt, {{"code": 0}})
sys.stderr.write(play.get("said", ""))
for event in play.get("events", []):
    assert notice.send(os.environ["JIT_CKPT_LAUNCHER"], event, 10.0)
if play.get("save"):
    job = here / "state" / "7"
    (job / f"m{{play['save']}}-r{{attempt}}").mkdir()
    (job / f"claim-r{{attempt}}.json").write_text("{{}}")
sys.exit(play["code"])
"""

SCONTROL = """#!/bin/sh
echo "$*" >> {here}/asked
case "$*" in
"show job 7") cat {here}/job ;;
"show config") echo "SlurmdPort = {port}" ;;
"show node "*) for n in n1 n2 n3; do echo "NodeName=$n Arch=x"; echo "   NodeAddr=127.0.0.1 Port={port}"; done ;;
esac
"""

JOB = """JobId=7 JobName=x
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
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

    def decisions(self) -> list[str]:
        """What was decided, in order."""
        lines = (self.here / "state" / "7" / "journal.jsonl").read_text().splitlines()
        return [e["action"] for e in map(json.loads, lines) if e["entry"] == "decision"]

    def srun(self, attempt: int) -> str:
        """The line that a launch was started with."""
        return (self.here / f"srun-{attempt}").read_text()


@pytest.fixture
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


def test_a_job_without_failure_is_one_srun(bench: Bench) -> None:
    """Two nodes of three, one spare, the program and its arguments as given."""
    code, said = bench.run("-N2", "--mpi=none", "prog", "-N9")
    assert code == 0
    assert bench.srun(0).endswith("-N 2 -w n1,n2 -n 2 --mpi=none prog -N9")
    assert "spare: n3" in said
    assert bench.decisions() == ["done"]


def test_a_failure_is_relaunched_and_the_code_of_the_last_launch_counts(bench: Bench) -> None:
    """Death of a node: the spare takes over; then the script ends with 3."""
    play = {
        "0": {"events": [STARTED, fault("death", 1, away=True)], "save": 4, "code": 83},
        "1": {"events": [STARTED], "code": 3},
    }
    code, said = bench.run("-N2", "prog", play=play)
    assert code == 3
    assert "-w n1,n3" in bench.srun(1)
    assert bench.decisions() == ["relaunch", "stop"]
    assert "relaunch: death on n2 (node does not answer): gone; without n2, with n3" in said
    assert "stop: the script ended with exit code 3" in said


def test_a_requeue_excludes_the_node_and_the_next_life_goes_on_counting(bench: Bench) -> None:
    """The journal carries the attempts over the queue."""
    play = {"0": {"events": [STARTED, fault("death", 1, away=True)], "save": 4, "code": 83}}
    bench.run("prog", play=play)
    asked = (bench.here / "asked").read_text()
    assert "requeue 7\nupdate JobId=7 StartTime=now+3 ExcNodeList=n9,n2\n" in asked
    bench.environ["SLURM_RESTART_COUNT"] = "1"
    assert bench.run("prog")[0] == 0
    assert (bench.here / "srun-1").exists()
    assert bench.decisions() == ["requeue", "done"]


def test_a_cancelled_job_is_not_requeued(bench: Bench) -> None:
    """Although its ranks have saved."""
    play = {"0": {"events": [STARTED, fault("signal", 1)], "save": 4, "code": 83}}
    assert bench.run("prog", play=play, state="CANCELLED")[0] == 83
    assert "requeue" not in (bench.here / "asked").read_text()
    assert bench.decisions() == ["stop"]


def test_lost_replicas_show_the_original_error(bench: Bench) -> None:
    """The ranks' own words are on standard error and the job ends with their code."""
    lost = {"event": "lost", "reason": "no replica", "error": "ZeroDivisionError"}
    play = {"0": {"events": [STARTED, fault("exception", 1), lost], "code": 84}}
    code, said = bench.run("prog", play=play)
    assert code == 84
    assert "ZeroDivisionError" in said
    assert "all replicas lost" in said


@pytest.mark.parametrize("name", ["SLURM_SPANK_JIT_CKPT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_without_us_it_is_srun(bench: Bench, name: str) -> None:
    """No option, no job, no nodes: the same arguments go to srun, with one line that says so."""
    del bench.environ[name]
    code, said = bench.run("-N2", "prog", play={"plain": {"code": 5}})
    assert code == 5
    assert (bench.here / "srun-plain").read_text() == "-N2 prog"
    assert "plain srun" in said


@pytest.mark.parametrize("words", [["-N2-3", "prog"], ["-N4", "prog"], ["-N2"], ["-w", "n7", "prog"]])
def test_what_cannot_be_started_is_refused_with_its_reason(bench: Bench, words: list[str]) -> None:
    """85, one line, nothing started."""
    code, said = bench.run(*words)
    assert code == 85
    assert said.startswith("jit-srun: ")
    assert len(said.splitlines()) == 1


def test_help_works_anywhere(bench: Bench) -> None:
    """Also without Slurm."""
    bench.environ = {"PATH": "/nonexistent", "PYTHONPATH": str(REPO)}
    code, said = bench.run("--help")
    assert code == 0
    assert said.startswith("usage: jit-srun")


def test_an_unusable_directory_is_named_before_anything_starts(bench: Bench) -> None:
    """Training is not started blindly."""
    (bench.here / "state").write_text("a file")
    code, said = bench.run("prog")
    assert code == 85
    assert str(bench.here / "state") in said
    assert not (bench.here / "srun-0").exists()


def test_a_slurmctld_that_goes_away_before_the_first_launch_costs_nothing(bench: Bench) -> None:
    """srun finds nobody to ask for a step and ends with 1: that is not the script's exit code."""
    away = "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller (connect failure)\n"
    code, _ = bench.run("prog", play={"0": {"said": away, "code": 1}, "1": {"events": [STARTED], "code": 0}})
    assert code == 0
    assert bench.decisions() == ["relaunch", "done"]
