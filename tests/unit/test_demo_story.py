"""demo.story: summary.json has the promised keys and the story tells its numbers."""

from __future__ import annotations

from demo.record import Entry, Record
from demo.story import Failure, recovery, story, summary
from demo.timeline import Marks, Places
from demo.verdict import Verdict
from jitmpi.events import Fault, Manifest, TensorInfo

VERSIONS = {"torch": "2.9", "python": "3.13.1", "mpi": "Open MPI 5.0.7"}
TENSORS = (TensorInfo("model/w", (1000, 1000), "float32", 4_000_000),)
FAULT = Fault("death", (2,), (2,), 15, "", 21.0)
MANIFEST = Manifest("7", 0, 15, 4, "/c", FAULT, (), TENSORS, (), 0, 0, True, (), {}, VERSIONS)
JOURNAL = (Entry(1.0, "launch", {}), Entry(21.6, "decision", {"action": "relaunch"}))
ROUGH = Record(JOURNAL, {}, "aa", MANIFEST, {"rank0.h5": 4_010_000, "checkpoint.h5": 20_000})
MARKS = Marks(1.0, 5.0, 20.0, 21.1, 21.2, 21.4, 21.5, 22.0, 29.0, 30.0, 40.0)
PLACES = Places(("n1", "n2"), ("n1", "n5"), "n2", ("n5",))
FACTS = summary(
    ROUGH, Verdict(True, 1, 0, ()), Failure("poweroff", "n2", 2, 20.0), MARKS, PLACES, 4.0, "slurm 24.11.5\n"
)


def test_the_summary_has_exactly_the_promised_keys() -> None:
    """Whoever reads summary.json finds each key and no other."""
    assert set(FACTS) == {
        "bitwise_equal", "minibatches_replayed", "minibatches_lost", "failure", "nodes_before", "nodes_after",
        "recovery", "times_s", "checkpoint", "slurm", "mpi", "torch", "python",
    }  # fmt: skip
    assert set(FACTS["failure"]) == {"kind", "node", "rank", "minibatch"}
    assert set(FACTS["times_s"]) == {
        "detect", "settle", "save", "commit", "relaunch", "restore", "first_update", "floor",
    }  # fmt: skip
    assert FACTS["checkpoint"] == {"files": 2, "bytes": 4_030_000, "unique_bytes": 4_000_000}
    assert FACTS["slurm"] == "24.11.5"


def test_recovery_is_what_jit_srun_decided() -> None:
    """The first decision that brings the job back counts."""
    assert recovery(ROUGH) == "relaunch"


def test_the_story_tells_the_failure_and_the_outcome() -> None:
    """Times add up along the story, and the end says whether the promise was kept."""
    text = story(FACTS, 60)
    assert "n2 (rank 2) lost its power in minibatch 15" in text
    assert "9.00 s  restored" in text
    assert "Replayed 1 minibatch of 60, lost 0" in text
    assert "bit for bit" in text
    assert "NOT" in story({**FACTS, "bitwise_equal": False}, 60)
