"""One launch, with small processes in place of srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_plugin import notice
from slurm_plugin.launch import Ended, Launch, Signals
from slurm_plugin.notice import Listener
from slurm_plugin.slurm_text import JobInfo
from tests.unit.fake_slurm import FakeSlurm

FAULT = {"event": "fault", "fault": {"kind": "death", "ranks": [1], "unreachable": [1]}, "step": "5"}
COMMITTED = {"event": "committed", "directory": "/x", "minibatch": 3}
FOREVER = "import time; time.sleep(60)"


def until(path: Path) -> str:
    """A program that goes on when there is such a file; alone, one that ends then."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)\n"


def wait(true: Callable[[], object]) -> None:
    """Wait until it is so; after a minute go on, so that what was waited for fails and nothing hangs."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)


def launch(
    program: str,
    notices: list[dict[str, Any]] | None = None,
    *,
    committed: Callable[[], bool] = lambda: False,
    reachable: bool = True,
    patience: float = 60.0,
    meanwhile: Callable[[], None] = lambda: None,
    training: bool = True,
    slurm: FakeSlurm | None = None,
) -> tuple[Ended, list[dict[str, Any]], FakeSlurm]:
    """Run a program as if it were srun; say the notices, then do `meanwhile`."""
    slurm, events = slurm or FakeSlurm({"7": JobInfo("7", "RUNNING")}, []), list[dict[str, Any]]()
    listener = Listener("127.0.0.1")
    with Signals() as signals:
        run = Launch(
            [sys.executable, "-c", program],
            os.environ,
            nodes=["n1", "n2"],
            slurm=slurm,
            job_id="7",
            signals=signals,
            listener=listener,
            record=events.append,
            committed=committed,
            reachable=lambda: reachable,
            patience=patience,
            say=lambda text: None,
            early=0.2,
            training=training,
        )

        def speak() -> None:
            for event in notices or []:
                notice.send(listener.launcher("127.0.0.1"), event, 10.0)
            meanwhile()

        thread = threading.Thread(target=speak)
        thread.start()
        ended = run.run()
        thread.join(120)
    listener.close()
    return ended, events, slurm


def test_an_exit_code_passes_and_a_signal_becomes_128_more() -> None:
    """The end of srun is the end of the launch."""
    assert launch("raise SystemExit(3)")[0] == Ended(3)
    assert launch("import os; os.kill(os.getpid(), 9)")[0] == Ended(137)


def test_notices_are_recorded_in_order(tmp_path: Path) -> None:
    """Everything that arrives before the end is kept."""
    notices, told = [{"event": "started", "minibatch": 0}, {"event": "finished"}], tmp_path / "told"
    _, events, _ = launch(until(told), notices, meanwhile=told.touch)
    assert [e["event"] for e in events] == ["started", "finished"]


def test_ranks_that_do_not_leave_after_a_commit_are_ended() -> None:
    """A dead node keeps srun waiting; the step gets SIGKILL through Slurm, srun itself, and no code is made up."""
    ended, _, slurm = launch(FOREVER, [FAULT, COMMITTED], reachable=False)
    assert ended == Ended(None)
    assert slurm.done == [("cancel", "7", "5", "KILL")]


def test_a_commit_counts_although_its_notice_was_lost() -> None:
    """The claim on the file system ends the waiting as the notice would."""
    ended, _, _ = launch(FOREVER, [FAULT], committed=lambda: True, reachable=False)
    assert ended == Ended(None)


def test_ranks_that_never_say_how_it_went_are_given_up() -> None:
    """After their own deadlines and a margin; the reason is told."""
    ended, _, _ = launch(FOREVER, [FAULT], patience=-29.5, reachable=False)
    assert ended.code is None
    assert "no word" in ended.silent


def test_a_signal_for_the_ranks_is_passed_to_srun(tmp_path: Path) -> None:
    """USR1 reaches srun, which forwards it."""
    ready = tmp_path / "ready"
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(42))\n"
        f"open({str(ready)!r}, 'w')\n"
        "time.sleep(60)"
    )

    def tell() -> None:
        wait(ready.exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    assert launch(program, meanwhile=tell)[0] == Ended(42)


def test_term_reaches_the_ranks_and_does_not_make_srun_kill_them(tmp_path: Path) -> None:
    """srun would answer TERM by SIGKILL for the ranks; they get a TERM of their own through Slurm."""
    slurm, told = FakeSlurm({"7": JobInfo("7", "RUNNING")}, []), tmp_path / "told"

    def tell() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait(lambda: slurm.done)
        told.touch()

    ended, _, _ = launch(until(told), [{"event": "started", "minibatch": 0, "step": "5"}], meanwhile=tell, slurm=slurm)
    assert ended == Ended(0)
    assert slurm.done == [("cancel", "7", "5", "TERM")]


def test_handlers_are_put_back() -> None:
    """Outside jit-srun's life the process has its old handlers."""
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not before
        assert subprocess.run(["true"], check=False).returncode == 0
    assert signal.getsignal(signal.SIGTERM) is before


DYING = "import sys, time; print('srun: error: n2: task 1: Killed', file=sys.stderr, flush=True); time.sleep(60)"


def test_a_task_that_ends_before_training_ends_the_launch() -> None:
    """Nobody else can know of it yet: the others would wait for it for ever."""
    ended, events, _ = launch(DYING, reachable=False)
    assert ended == Ended(None)
    (event,) = events
    assert (event["event"], event["phase"], event["nodes"]) == ("fault", "starting", ["n1", "n2"])
    assert (event["fault"]["kind"], event["fault"]["ranks"]) == ("death", [1])


def test_a_death_before_training_is_known_from_its_consequences() -> None:
    """The other tasks' exit codes, and srun's own, tell nothing about the script when one task was killed."""
    words = ("n1: task 0: Exited with exit code 14", "n2: task 1: Segmentation fault")
    program = f"import sys; [print('srun: error:', w, file=sys.stderr) for w in {words}]; sys.exit(14)"
    ended, events, _ = launch(program)
    assert ended == Ended(14)
    assert [(e["event"], e["fault"]["kind"], e["fault"]["ranks"]) for e in events] == [("fault", "death", [1])]
    assert launch(program.replace("Segmentation fault", "Exited with exit code 14"))[1] == []


def test_a_death_in_what_is_no_training_is_left_to_srun() -> None:
    """Any program of a batch script may lose a task; it is not started again."""
    ended, events, slurm = launch(DYING.replace("sleep(60)", "sleep(0.6)"), training=False)
    assert (ended.code, events, slurm.done) == (0, [], [])


def test_once_training_has_begun_the_ranks_have_the_word(tmp_path: Path) -> None:
    """A dead task is then seen and saved from by its peers."""
    told = tmp_path / "told"
    program = until(told) + DYING.replace("sleep(60)", "sleep(0.6)")
    ended, events, _ = launch(program, [{"event": "started", "minibatch": 0}], meanwhile=told.touch)
    assert ended == Ended(0)
    assert [e["event"] for e in events] == ["started"]


def test_the_smaller_side_of_a_cut_does_not_end_the_larger_ones_save(tmp_path: Path) -> None:
    """It says that it lost; what the others commit a moment later counts."""
    lost = {"event": "lost", "reason": "no minibatch is held", "error": "", "majority": False}
    ended, events, _ = launch(FOREVER, [FAULT, lost, COMMITTED], reachable=False)
    assert ended == Ended(None)
    assert [e["event"] for e in events] == ["fault", "lost", "committed"]
    end = tmp_path / "end"

    def later() -> None:
        time.sleep(2)
        end.touch()

    ended, _, _ = launch(until(end), [FAULT, lost], meanwhile=later, reachable=False)
    assert ended == Ended(0), "the step was ended at once"
