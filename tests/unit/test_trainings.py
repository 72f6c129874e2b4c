"""trainings: which directory an srun of a script gets, now and after a way through the queue."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_plugin import contract
from slurm_plugin.journal import Journal
from slurm_plugin.trainings import Fingerprint, Training, candidates, find, fingerprint, leave_over, over

A, B = ("python", "train.py", "--config=a"), ("python", "train.py", "--config=b")


def known(name: str, command: tuple[str, ...], restarts: int = 0, ended: str = "", **environ: str) -> Training:
    """A training of this job that an earlier srun has begun."""
    return Training(name, Fingerprint(command, "/home", environ), restarts, ended, trained=True)


def first(begun: list[Training], command: tuple[str, ...], restarts: int, folder: str = "/home", **environ: str) -> str:
    """The directory that an srun would get first."""
    passed = over(begun, restarts, lambda ended: False)
    return next(candidates(begun, "7", Fingerprint(command, folder, environ), restarts, passed))


def test_the_first_one_has_the_jobs_name() -> None:
    """Then numbers follow; what is there already is not given again."""
    names = list(itertools.islice(candidates([], "7", Fingerprint(A, "/home"), 0), 3))
    assert names == ["7", "7.2", "7.3"]
    assert first([known("7", A)], B, 0) == "7.2"


def test_another_life_finds_its_own() -> None:
    """By the command line, whatever the order, and also when the training had ended well (then it is over)."""
    begun = [known("7", A, ended="done"), known("7.2", B)]
    assert first(begun, B, 1) == "7.2"
    assert first(begun, A, 1) == "7"


def test_the_folder_counts() -> None:
    """The same words in another folder are another training."""
    assert first([known("7", A)], A, 1, folder="/elsewhere") == "7"  # interrupted, and nothing resembles it more
    assert first([known("7", A, ended="done")], A, 1, folder="/elsewhere") == "7.2"


def test_a_loop_over_an_environment_variable() -> None:
    """The same words three times: the variable that differs between them tells which one is which."""
    begun = [known("7", A, SEED="1", ID="x"), known("7.2", A, SEED="2", ID="x")]
    assert first(begun, A, 0, SEED="3", ID="x") == "7.3"
    assert first(begun, A, 1, SEED="2", ID="y") == "7.2"
    assert first(begun, A, 1, SEED="1", ID="y") == "7"
    assert first(begun, A, 1, SEED="3", ID="y") == "7.3"


def test_a_loop_over_nothing() -> None:
    """Equal in all: in the order in which they were begun, for a script can only have meant that."""
    begun = [known("7", A, restarts=1, ended="done"), known("7.2", A)]
    assert first(begun, A, 1) == "7.2"


def test_one_training_whose_words_change() -> None:
    """A port drawn by lot does not cost the checkpoint."""
    torchrun = ("torchrun", "--nnodes=2", "--rdzv-id=17", "train.py")
    again = ("torchrun", "--nnodes=2", "--rdzv-id=4711", "train.py")
    assert first([known("7", torchrun)], again, 1) == "7"
    assert first([known("7", torchrun, ended="done")], again, 1) == "7.2"


def test_two_trainings_whose_words_change() -> None:
    """The nearer one counts; between equally near ones none does."""
    begun = [known("7", (*A, "--port=1")), known("7.2", (*B, "--port=2"))]
    assert first(begun, (*B, "--port=3"), 1) == "7.2"
    assert first(begun, (*A[:2], "--config=c", "--port=3"), 1) == "7.3"


def test_what_resembles_it_too_little_is_another_one() -> None:
    """A small program before the training does not take its place."""
    assert first([known("7", A)], ("hostname",), 1) == "7.2"
    assert first([known("7", A)], ("python", "prepare.py"), 1) == "7.2"


def test_the_script_tries_again_by_itself() -> None:
    """`srun train || srun train` goes on from the first one's checkpoint, a loop over SEED does not."""
    failed = [known("7", A, ended="stop", SEED="1")]
    assert first(failed, A, 0, SEED="1") == "7"
    assert first(failed, A, 0, SEED="2") == "7.2"
    assert first([known("7", A, ended="done", SEED="1")], A, 0, SEED="1") == "7.2"


def test_journals_of_before_are_taken_up() -> None:
    """A journal that an older version wrote says nothing of commands; the job's first training gets it."""
    assert first([Training("7", None, 0, "")], A, 1) == "7"


def test_what_ended_well_is_passed_over_for_what_did_not() -> None:
    """In the next life, also when the unfinished one was taken up before; what is not known for sure is done again."""
    done, unsure = known("7", A, ended="done"), Training("7.3", None, 0, "done")
    for unfinished in (
        known("7.2", B),
        known("7.2", B, ended="stop"),
        replace(known("7.2", B, 1), lives=frozenset({0, 1})),
    ):
        assert over([done, unfinished, unsure], 1, never) == {"7"}
        assert over([replace(done, trained=False), unfinished], 1, never) == set(), "it may have unpacked data"
    assert over([done, known("7.2", B, 1)], 1, lambda ended: False) == set(), "this life's own second training"


def never(ended: float) -> bool:
    """Nobody is asked where there is no doubt."""
    raise AssertionError(ended)


def test_what_ended_well_is_passed_over_when_slurm_forgot() -> None:
    """Asked for the last good end; put back on purpose it begins anew, and in its own life nobody asks."""
    done = [replace(known("7", A, ended="done"), when=5.0), replace(known("7.2", B, ended="done"), when=9.0)]
    assert over(done, 1, lambda ended: ended == 9.0) == {"7", "7.2"}
    assert over(done, 1, lambda ended: False) == set()
    assert over(done, 0, never) == set()
    assert over([], 0, never) == set()


def test_a_script_that_requeues_itself_to_train_in_pieces() -> None:
    """Each piece has its directory; one that is interrupted is taken up, and the pieces before are history."""
    pieces = [known("7", A, 0, "done"), known("7.2", A, 1, "done")]
    assert first(pieces, A, 2) == "7.3"
    assert first([*pieces, known("7.3", A, 2)], A, 3) == "7.3"
    taken_up = replace(known("7.3", A, 3, "done"), lives=frozenset({2, 3}))
    assert first([*pieces, taken_up], A, 3) == "7.4", "the next piece of a life that began with an interrupted one"


def test_one_that_is_over_leaves_the_next_equal_one_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loop over nothing: the first is over, the second was interrupted, and each is seen once in a life."""
    mine = Fingerprint(A, "/home")
    launch = {"entry": "launch", "attempt": 0, "restarts": 0, "nodes": ["n1"], **mine.to_entry()}
    started = {"entry": "notice", "attempt": 0, "notice": {"event": "started", "minibatch": 0}}
    write(tmp_path, "7", launch, started, {"entry": "outcome", "attempt": 0, "code": 0, "time": 12.5})
    write(tmp_path, "7.2", launch)

    def next_of(life: int) -> str:
        begun = find(str(tmp_path), "7")
        return next(candidates(begun, "7", mine, life, over(begun, life, never)))

    assert [t.when for t in find(str(tmp_path), "7")] == [12.5, 0.0]
    assert next_of(1) == "7"
    assert leave_over(Journal(str(tmp_path), "7", print), 1) == 0
    assert "ended well before the job came back" in capfd.readouterr().err
    assert next_of(1) == "7.2"
    write(tmp_path, "7.2", {**launch, "attempt": 1, "restarts": 1})
    assert [t.lives for t in find(str(tmp_path), "7")] == [{0}, {0, 1}]
    assert next_of(2) == "7"


@pytest.mark.parametrize("ended", ["", "requeue", "stop", "done"])
def test_another_clusters_job_of_this_number_is_nobodys(tmp_path: Path, ended: str) -> None:
    """Its checkpoint would be a wrong one; a federation's numbers are unique, and its jobs move between clusters."""
    there = fingerprint(A, "/home", {"SLURM_CLUSTER_NAME": "there"})
    launch = {"entry": "launch", "attempt": 0, "restarts": 0, "nodes": ["n1"], **there.to_entry()}
    decision = {"entry": "decision", "attempt": 0, "action": ended}
    fed = str((1 << 26) + 7)
    for job in ("7", fed):
        write(tmp_path, job, launch, *([decision] if ended else []))
    here = replace(there, cluster="here")
    for restarts in (0, 1):
        known_here = find(str(tmp_path), "7", "here")
        passed = over(known_here, restarts, lambda when: True)
        assert next(candidates(known_here, "7", here, restarts, passed)) == "7.2"
    assert find(str(tmp_path), "7", "there") == find(str(tmp_path), "7")
    assert find(str(tmp_path), fed, "here") == find(str(tmp_path), fed)


def test_passing_variables_do_not_count() -> None:
    """Slurm's own, and where the ranks meet, differ in each life."""
    here = {"SLURM_NODELIST": "n1", "MASTER_PORT": "1", "SEED": "5", "_": "/bin/srun"}
    there = {"SLURM_NODELIST": "n2", "MASTER_PORT": "2", "SEED": "5", "_": "/usr/bin/srun"}
    assert fingerprint(A, "/", here) == fingerprint(A, "/", there)
    assert list(fingerprint(A, "/", here).environ) == ["SEED"]


def write(root: Path, name: str, *entries: dict[str, Any]) -> None:
    """A journal."""
    (root / name).mkdir(exist_ok=True)
    with open(root / name / contract.JOURNAL, "a", encoding="utf-8") as journal:
        journal.writelines(json.dumps(e) + "\n" for e in entries)


def test_journals_are_read(tmp_path: Path) -> None:
    """The last launch, its end, and what its jit-srun was known by; other folders do not count."""
    mine = Fingerprint(A, "/home", {"SEED": "ab12cd"})
    launch = {"entry": "launch", "attempt": 0, "restarts": 0, "nodes": ["n1"]}
    fault = {"event": "fault", "fault": {"kind": "death", "ranks": [1], "unreachable": [1]}, "nodes": ["n2", "n3"]}
    lost = {"entry": "notice", "attempt": 1, "notice": fault}
    write(tmp_path, "7", {**launch, **mine.to_entry()}, {"entry": "decision", "attempt": 0, "action": "requeue"})
    write(
        tmp_path,
        "7.2",
        {**launch, **mine.to_entry()},
        {**launch, "attempt": 1, "restarts": 1, "nodes": ["n2", "n3"]},
        lost,
    )
    write(tmp_path, "7.10", launch, {"entry": "decision", "attempt": 0, "action": "done"})
    write(tmp_path, "77", launch)
    write(tmp_path, "7.x", launch)
    (tmp_path / "7.3").mkdir()
    assert find(str(tmp_path), "7") == [
        Training("7", mine, 0, "", ("n1",), lives=frozenset({0})),
        Training("7.2", mine, 1, "", ("n2", "n3"), ("n3",), lives=frozenset({0, 1})),
        Training("7.10", None, 0, "done", ("n1",), lives=frozenset({0})),
    ]
    assert find(str(tmp_path / "nowhere"), "7") == []
