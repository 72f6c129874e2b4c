"""What the journal says about a job's launches."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin.outcomes import Outcome, hear, read

NODES = ["n1", "n2", "n3"]


def fault(
    kind: str = "death", ranks: list[int] | None = None, away: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    """Make a fault notice."""
    told = {"kind": kind, "ranks": ranks or [1], "unreachable": away or [], "minibatch": 7, "detail": "d", "when": 1.0}
    return {"event": "fault", "fault": told, "nodes": NODES, "phase": "training", **more}


def entries(*notices: dict[str, Any], attempt: int = 0, code: int | None = 83) -> list[dict[str, Any]]:
    """Make the entries of one launch."""
    told = [{"entry": "notice", "attempt": attempt, "notice": n} for n in notices]
    launch = {"entry": "launch", "attempt": attempt, "restarts": 2, "nodes": NODES}
    return [launch, *told, {"entry": "outcome", "attempt": attempt, "code": code, "interrupted": False}]


def test_a_saved_failure_is_read_in_full() -> None:
    """Nodes, minibatches, the fault's place and the commit all arrive."""
    started = {"event": "started", "minibatch": 5, "restored": "", "step": "4"}
    (out,) = read(entries(started, fault(), {"event": "committed", "directory": "/x", "minibatch": 7}))
    assert (out.nodes, out.restarts, out.code, out.step) == (("n1", "n2", "n3"), 2, 83, "4")
    assert (out.trained, out.began, out.reached, out.committed) == (True, 5, 7, 7)
    assert (out.fault, out.blamed, out.unreachable) == ("death", ("n2",), ())
    assert out.failed
    assert out.updated  # it got from 5 to 7


def test_an_unreachable_rank_names_its_node() -> None:
    """The node of an unreachable rank is known as such."""
    (out,) = read(entries(fault(ranks=[1, 2], away=[2])))
    assert (out.blamed, out.unreachable, out.everyone) == (("n2", "n3"), ("n3",), False)


def test_two_views_of_a_fault_are_merged() -> None:
    """After a change of coordinator the first kind counts and the nodes add up."""
    (out,) = read(entries(fault("exception", [0]), fault("death", [1, 2], [1])))
    assert (out.fault, out.blamed, out.unreachable) == ("exception", ("n1", "n2", "n3"), ("n2",))
    assert out.everyone is False


def test_everyone_is_everyone() -> None:
    """A fault that began with every rank is told apart from one on some."""
    assert read(entries(fault("exception", [2, 0, 1])))[0].everyone


def test_a_launch_that_nobody_saw_end_is_no_failure() -> None:
    """When jit-srun died with its node, what the ranks had told still counts, and no exit code is made up."""
    (out,) = read(entries({"event": "started", "minibatch": 0})[:-1])
    assert (out.code, out.trained, out.failed) == (None, True, False)


def test_a_planned_end_is_no_failure() -> None:
    """A signal is not held against the job."""
    assert not read(entries(fault("signal")))[0].failed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = ["event", "fault", "nodes", "minibatch", "phase", "reason", "error", "step", "ranks", "unreachable", "kind"]
fields = st.sampled_from(names)
events = st.sampled_from(["started", "update", "fault", "committed", "lost", "finished", "?"])


@given(events, st.dictionaries(fields, json_values | st.dictionaries(fields, json_values)))
def test_no_notice_raises(event: str, values: dict[str, Any]) -> None:
    """A rank may say anything; what cannot be understood is unknown."""
    out = hear(Outcome(0), {**values, "event": event})
    assert isinstance(out.place, int)
    assert all(isinstance(n, str) for n in (*out.blamed, *out.unreachable))


@given(
    st.lists(st.dictionaries(st.sampled_from(["entry", "attempt", "notice", "code", "nodes", "restarts"]), json_values))
)
def test_no_journal_raises(lines: list[dict[str, Any]]) -> None:
    """A journal may be damaged in any way."""
    read(lines)
