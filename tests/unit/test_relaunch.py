"""jit-srun as a command, on the bench of srun_bench.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import srun_bench
from tests.unit.srun_bench import ARRAY, REPO, SAVED, STARTED, Bench, fault


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A job with three nodes that all answer."""
    with srun_bench.bench(tmp_path) as made:
        yield made


def test_a_job_without_failure_is_one_srun(bench: Bench) -> None:
    """Two nodes of three, one spare, the program and its arguments as given."""
    code, said = bench.run("-N2", "--mpi=none", "prog", "-N9")
    assert code == 0
    assert bench.line(0).endswith("-N 2 -w n1,n2 -n 2 --mpi=none prog -N9")
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
    assert "-w n1,n3" in bench.line(1)
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


def test_two_trainings_of_a_script_are_kept_apart(bench: Bench) -> None:
    """The second jit-srun of a job neither counts on nor reads what the first one left."""
    failed = {
        "0": {"events": [STARTED, fault("death", 1)], "save": 4, "code": 83},
        "1": {"events": [STARTED], "code": 0},
    }
    bench.run("-N2", "prog", "a", play=failed)
    bench.run("-N2", "prog", "b")
    assert bench.decisions("7") == ["relaunch", "done"]
    assert bench.decisions("7.2") == ["done"]


@pytest.mark.parametrize(("boot", "again"), [("2089-12-31T23:59:59", False), ("2090-01-01T00:00:01", True), ("", True)])
def test_what_ended_well_is_passed_over_when_slurmctld_forgot_it(bench: Bench, boot: str, again: bool) -> None:
    """It was started after that end and before it put the job back; one that is put back on purpose trains again."""
    for word in "ab":
        bench.run("-N2", "prog", word, play={"0": {"events": [STARTED], "code": 0}})
    (bench.here / "srun-0").unlink()
    (bench.here / "boot").write_text(f"BOOT_TIME               = {boot}\n")
    bench.environ["SLURM_RESTART_COUNT"] = "1"
    said = bench.run("-N2", "prog", "b")[1]
    assert ("ended well before the job came back" in said) == (not again)
    assert (bench.here / "srun-0").exists() == again
    assert bench.decisions("7.2") == ["done"] * (1 if again else 2)


def test_what_ended_well_is_passed_over_on_the_way_to_what_did_not(bench: Bench) -> None:
    """The second training of a script puts the job back; the first one is not trained twice for that."""
    bench.run("-N2", "prog", "a", play={"0": {"events": [STARTED], "code": 0}})
    bench.run("prog", "b", play={"0": {"events": [STARTED, fault("death", 1, away=True)], "save": 4, "code": 83}})
    bench.environ["SLURM_RESTART_COUNT"] = "1"
    (bench.here / "srun-0").unlink()
    assert "ended well before the job came back" in bench.run("-N2", "prog", "a")[1]
    assert not (bench.here / "srun-0").exists()
    assert bench.run("prog", "b")[0] == 0
    assert bench.decisions("7.2") == ["requeue", "done"]


def test_a_task_of_an_array_asks_only_for_itself(bench: Bench) -> None:
    """The last task has the array's own number, which brings the steps of all of them, on other hosts too."""
    bench.environ |= ARRAY
    bench.run("-N2", "prog", play={"0": SAVED})
    assert bench.asked("show job", "show step") == {"show job 7_3", "show step 7_3"}


def test_output_files_of_srun_are_kept_over_a_relaunch(bench: Bench) -> None:
    """srun --output would begin the file anew."""
    play = {"0": {"events": [STARTED, fault("death", 1)], "save": 4, "code": 83}, "1": {"code": 0}}
    bench.run("-N2", "-o", "log", "prog", play=play)
    assert (bench.here / "mode-0").read_text() == ""
    assert (bench.here / "mode-1").read_text() == "append"
