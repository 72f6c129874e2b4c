"""Plain srun in a batch script: packaging/srun and slurm_plugin/adopt.py, on the bench of srun_bench.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import srun_bench
from tests.unit.srun_bench import ARRAY, REPO, SAVED, STARTED, Bench, fault

ATTACHED = {"event": "attached", "rank": 0, "nodes": "n[1-2]", "step": "0"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A job with three nodes that all answer, and our srun first in the PATH of its script."""
    with srun_bench.bench(tmp_path) as made:
        (tmp_path / "shim").mkdir()
        (tmp_path / "jit-ckpt.conf").write_text(f"keep = 3\npython={sys._base_executable}\n")
        set_shim(made, str(REPO))
        made.environ["PATH"] = f"{tmp_path}/shim:{made.environ['PATH']}"
        yield made


def set_shim(bench: Bench, code: str) -> None:
    """Install the shim with this folder of code."""
    text = (REPO / "packaging" / "srun").read_text()
    text = text.replace("/usr/lib/jit-ckpt/python", code).replace("/etc/jit-ckpt.conf", f"{bench.here}/jit-ckpt.conf")
    (bench.here / "shim" / "srun").write_text(text)
    (bench.here / "shim" / "srun").chmod(0o755)


def test_what_never_attaches_is_left_alone(bench: Bench) -> None:
    """The same words, output and exit code; nothing said and nothing written."""
    done = bench.srun("-n1", "prog", "a b", play={"0": {"says": "hello\n", "code": 7}})
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "")
    assert bench.line(0) == "-n1 prog a b"
    assert not (bench.here / "state").exists()


def test_a_task_of_an_array_asks_only_for_itself(bench: Bench) -> None:
    """As jit-srun does."""
    bench.environ |= ARRAY
    bench.srun("-N2", "prog", play={"0": {**SAVED, "events": [ATTACHED, *SAVED["events"]]}})
    assert bench.asked("show job", "show step") == {"show job 7_3", "show step 7_3"}


def test_ranks_that_train_are_started_again(bench: Bench) -> None:
    """The first time as the script says, then on nodes that jit-srun chooses; the journal has both."""
    play = {
        "0": {"events": [ATTACHED, STARTED, fault("death", 1, away=True)], "save": 4, "code": 83},
        "1": {"events": [ATTACHED, STARTED], "code": 0},
    }
    done = bench.srun("-N2", "--mpi=none", "prog", play=play)
    assert done.returncode == 0, done.stderr
    assert bench.line(0) == "-N2 --mpi=none prog"
    assert bench.line(1).endswith("-N 2 -w n1,n3 -n 2 --mpi=none prog")
    assert bench.decisions() == ["relaunch", "done"]


def test_spare_nodes_are_kept_aside_from_the_start(bench: Bench) -> None:
    """spares=1 of three nodes: two for a script that names no number."""
    bench.environ["SLURM_SPANK_JIT_CKPT"] += ",spares=1"
    bench.environ |= {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6"}
    assert bench.srun("prog").returncode == 0
    assert bench.line(0) == "-N 2 -n 4 prog"


@pytest.mark.parametrize("words", [["--pty", "sh"], ["--jobid=9", "x"], ["-N1-2", "x"], ["a", ":", "b"], []])
def test_some_lines_are_no_trainings(bench: Bench, words: list[str]) -> None:
    """A terminal, another job, a number of nodes that is not fixed, several components: srun itself, at once."""
    done = bench.srun(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert bench.line("plain") == " ".join(words)


@pytest.mark.parametrize("trouble", ["python", "code", "old python", "options", "scontrol"])
def test_any_failure_of_ours_is_srun(bench: Bench, trouble: str) -> None:
    """No interpreter, no code, one too old for it, options of another version, no answer of Slurm."""
    if trouble == "python":
        (bench.here / "jit-ckpt.conf").write_text("python = /nonexistent\n")
    elif trouble == "code":
        set_shim(bench, "/nonexistent")
    elif trouble == "old python":
        (bench.here / "code" / "slurm_plugin").mkdir(parents=True)
        (bench.here / "code" / "slurm_plugin" / "__init__.py").write_text("syntax error\n")
        set_shim(bench, f"{bench.here}/code")
    elif trouble == "options":
        bench.environ["SLURM_SPANK_JIT_CKPT"] = "dir=/x,of-a-later-version=1"
    elif trouble == "scontrol":
        (bench.here / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    done = bench.srun("-n1", "prog", play={"plain": {"says": "hello\n", "code": 7}})
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "")
    assert bench.line("plain") == "-n1 prog"


def test_the_interpreter_is_that_of_the_sites_file(bench: Bench) -> None:
    """Also where its line is the last one and has no end."""
    own = bench.here / "python"
    own.write_text(f'#!/bin/sh\n: >{bench.here}/used\nexec {sys._base_executable} "$@"\n')
    own.chmod(0o755)
    (bench.here / "jit-ckpt.conf").write_text(f"keep = 3\npython = {own}")
    assert bench.srun("prog").returncode == 0
    assert (bench.here / "used").exists()


@pytest.mark.parametrize("step", ["", "-5", "4294967291"])
def test_a_batch_script_may_have_a_step_number(bench: Bench, step: str) -> None:
    """As in Slurm 26.05: its srun is taken over all the same."""
    bench.environ["SLURM_STEP_ID"] = step
    assert bench.srun("prog", play={"0": {"events": [ATTACHED, STARTED], "code": 0}}).returncode == 0
    assert bench.decisions() == ["done"]


@pytest.mark.parametrize(
    ("name", "value"), [("SLURM_SPANK_JIT_CKPT", ""), ("SLURM_STEP_ID", "0"), ("JIT_CKPT_ATTEMPT", "0")]
)
def test_it_is_srun_where_it_has_nothing_to_do(bench: Bench, name: str, value: str) -> None:
    """In a job without the option, in a task of a step, and below jit-srun."""
    bench.environ[name] = value
    assert bench.srun("prog", play={"plain": {"code": 3}}).returncode == 3
    assert bench.line("plain") == "prog"


def test_a_directory_that_cannot_be_used_ends_the_protection_only(bench: Bench) -> None:
    """The ranks run on; one line says that they will not be started again."""
    (bench.here / "state").write_text("a file")
    done = bench.srun("prog", play={"0": {"events": [ATTACHED, STARTED], "code": 5}})
    assert done.returncode == 5
    assert "not started again after a failure: cannot write into" in done.stderr


def test_variables_reach_the_ranks_whatever_export_says(bench: Bench) -> None:
    """--export=NONE of the script stays, with our three names added."""
    bench.srun("--export=NONE", "prog")
    assert bench.line(0) == "--export=JIT_CKPT_ATTEMPT,JIT_CKPT_LAUNCHER,JIT_CKPT_TRAINING prog"
