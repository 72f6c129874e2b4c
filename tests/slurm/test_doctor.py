"""`jit-ckpt doctor` on the real cluster, run by a plain user with the distribution's Python."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from testbed import Cluster
from testbed.plugin import REPO

DOCTOR = ("/usr/bin/python3", "-B", "-m", "jitmpi.cli", "doctor", "--json")
PATIENCE = 150.0


@pytest.fixture
def home(out: Path) -> Path:
    """A folder in which the user may write."""
    out.mkdir()
    out.chmod(0o777)
    return out


def start(cluster: Cluster, home: Path, *words: str) -> subprocess.Popen[str]:
    return cluster.popen(
        "head", *DOCTOR, f"--dir={home}/ckpt", *words, user=True, env={"PYTHONPATH": str(REPO)}, stderr=subprocess.PIPE
    )


def answer(doctor: subprocess.Popen[str]) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    out, err = doctor.communicate(timeout=PATIENCE)
    assert out, err
    value = json.loads(out)
    return doctor.returncode, value, {finding["subject"]: finding for finding in value["findings"]}


def test_a_good_cluster_is_found_good(cluster: Cluster, home: Path) -> None:
    """Plugin, hooks, clocks, directory: all is seen in seconds, nothing is changed, and the exit code is 0."""
    code, value, findings = answer(start(cluster, home))
    assert (code, value["exit_code"]) == (0, 0), value
    assert {f["verdict"] for f in findings.values()} <= {"ok", "note"}
    for subject in ("plugin", "Epilog", "EpilogSlurmctld", "directory", "clock of the controller"):
        assert findings[subject]["verdict"] == "ok", findings
    assert list(home.iterdir()) == []


def test_the_probe_tells_which_pmi_keeps_survivors_alive(cluster: Cluster, home: Path) -> None:
    """Debian's Open MPI: pmix lets three ranks outlive the fourth, pmi2 makes no world, and files always do."""
    code, value, findings = answer(start(cluster, home, "--probe", "--", "--comment=probe"))
    assert code == 0, value
    assert "3 of 3 survivors lived on" in findings["srun --mpi=pmix"]["says"]
    assert findings["srun --mpi=pmi2"]["verdict"] == "note"
    assert "files: 3 of 3 survivors lived on" in findings["srun --mpi=none"]["says"]
    assert "MpiDefault=pmix" in findings["probe"]["says"]
    assert value["probe"]["carried"], "the job has the option"
    assert list(home.iterdir()) == []
    cluster.wait_idle(20)


def test_a_probe_that_is_interrupted_leaves_nothing(cluster: Cluster, home: Path) -> None:
    """SIGTERM while the job runs: it is cancelled, its folder removed."""
    doctor = start(cluster, home, "--probe")
    deadline = time.monotonic() + PATIENCE
    while not list(home.glob("ckpt/.jit-ckpt-probe-*/results.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    doctor.send_signal(signal.SIGTERM)
    _, said = doctor.communicate(timeout=60)
    assert (doctor.returncode, "nothing is left behind" in said) == (130, True), said
    assert list(home.iterdir()) == []
    cluster.wait_idle(20)
