"""The recovery decision, by plain cases and by all that hypothesis can think of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin.contract import Options
from slurm_plugin.journal import Checkpoint
from slurm_plugin.outcomes import Outcome
from slurm_plugin.recovery import Allocation, Case, decide
from slurm_plugin.slurm_text import JobInfo

NODES = ("n1", "n2", "n3", "n4", "n5")
SAVED = Outcome(
    0,
    nodes=NODES[:4],
    code=83,
    trained=True,
    began=0,
    reached=7,
    updated=True,
    fault="death",
    blamed=("n2",),
    committed=7,
)
RUNNING = JobInfo("1", "RUNNING", nodes=NODES, end=10_000.0)


def case(outcome: Outcome = SAVED, *history: Outcome, silent: tuple[str, ...] = (), **changes: Any) -> Case:
    """Make a case: four of five nodes in use, and what is given instead."""
    names = changes.pop("nodes", NODES)
    job = changes.pop("job", RUNNING)
    own = None if outcome.committed is None else Checkpoint(outcome.attempt, outcome.committed)
    return Case(
        outcome=outcome,
        history=history,
        allocation=Allocation(names, frozenset(names) - set(silent), changes.pop("need", 4)),
        options=Options("/x", **changes.pop("options", {})),
        job=job,
        checkpoint=changes.pop("checkpoint", own),
        restarts=changes.pop("restarts", 0),
        now=changes.pop("now", 0.0),
    )


def test_a_dead_process_on_a_healthy_node_is_started_again_at_once() -> None:
    """Same allocation, same nodes."""
    recovery = decide(case())
    assert (recovery.action, recovery.nodes) == ("relaunch", NODES[:4])


def test_a_dead_node_is_replaced_by_a_spare() -> None:
    """The spare takes its place; the order of the nodes stays Slurm's."""
    for dead in (case(replace(SAVED, unreachable=("n2",))), case(silent=("n2",))):
        recovery = decide(dead)
        assert (recovery.action, recovery.nodes) == ("relaunch", ("n1", "n3", "n4", "n5"))


def test_an_expedited_job_that_stops_is_told_that_slurm_holds_it() -> None:
    """Slurm 25.11: such a job does not end as failed by itself; one that Slurm brings back is left to it."""
    job = replace(RUNNING, expedited=True)
    assert "REQUEUE_HOLD" in decide(case(replace(SAVED, code=3, fault="", committed=None), job=job)).reason
    assert "REQUEUE_HOLD" not in decide(case(job=job)).reason
    assert "on its way" in decide(case(job=replace(job, state="EXPEDITING"))).reason


def test_a_drained_node_is_left_where_there_is_another() -> None:
    """A spare comes before it; without one it works on, unless the failure began there."""
    job = replace(RUNNING, nodes=NODES)
    drained = replace(case(job=job).allocation, drained=frozenset(["n3"]))
    assert decide(replace(case(), allocation=drained)).nodes == ("n1", "n2", "n4", "n5")
    tight = replace(case(nodes=NODES[:4]).allocation, drained=frozenset(["n3"]))
    assert decide(replace(case(), allocation=tight)).nodes == NODES[:4]
    blamed = decide(replace(case(replace(SAVED, blamed=("n3",))), allocation=tight))
    assert (blamed.action, blamed.exclude) == ("requeue", ("n3",))


def test_a_launch_that_got_no_step_is_tried_again_and_counts_for_nothing() -> None:
    """Neither as a failure without progress nor as a relaunch, with a growing pause; but not for ever."""
    away = Outcome(0, nodes=NODES[:4], code=1, unlaunched="Unable to contact slurm controller (connect failure)")
    for many, pause in ((0, 2.0), (1, 4.0), (6, 30.0)):
        recovery = decide(case(away, *[away] * many, options={"relaunches": 1}))
        assert (recovery.action, recovery.nodes, recovery.pause) == ("relaunch", NODES[:4], pause)
    assert decide(case(away, *[away] * 7)).action == "stop"
    assert decide(case(SAVED, *[away] * 9)).action == "relaunch"


def test_a_step_that_cannot_be_had_at_all_is_not_asked_for_again() -> None:
    """At the first launch that is the script's srun line; later the same line has worked before."""
    never = Outcome(0, nodes=NODES[:4], code=1, unlaunched="Requested node configuration is not available")
    assert decide(case(never)).action == "stop"
    assert decide(case(never, SAVED, checkpoint=Checkpoint(0, 7))).action == "relaunch"


def test_a_dead_node_without_a_spare_goes_through_the_queue_without_it() -> None:
    """It is excluded, so that the job cannot land on it again."""
    recovery = decide(case(replace(SAVED, unreachable=("n2",)), nodes=NODES[:4]))
    assert (recovery.action, recovery.exclude) == ("requeue", ("n2",))


def test_a_death_after_the_end_of_training_is_not_called_a_loss_of_all_replicas() -> None:
    """What is said fits what happened: the results are there, one process did not end well."""
    late = replace(SAVED, code=137, fault="", blamed=(), committed=None, finished=True)
    recovery = decide(case(late))
    assert recovery.action == "stop"
    assert "came to its end" in recovery.reason
    assert "137" in recovery.reason


def test_a_batch_host_that_was_cut_off_itself_does_not_exclude_the_others() -> None:
    """It saw most nodes go and come back: excluding them could leave the job pending for ever."""
    others = replace(SAVED, unreachable=("n2", "n3", "n4"))
    assert decide(case(others, nodes=NODES[:4])).exclude == ()
    assert decide(case(others, nodes=NODES[:4], silent=("n3",))).exclude == ("n3",)  # dead: the controller answers
    assert decide(case(others, nodes=NODES[:4], silent=("n2", "n3", "n4"), job=None)).exclude == ()  # still cut off


def test_a_node_that_was_cut_off_stays_out_although_it_answers_again() -> None:
    """Old ranks may live on there; only in a new allocation it counts again."""
    before = replace(SAVED, unreachable=("n5",), nodes=("n1", "n2", "n3", "n5"))
    now = replace(SAVED, attempt=1, reached=9, blamed=("n1",), unreachable=("n1",))
    assert decide(case(now, before)).action == "requeue"
    assert decide(case(replace(now, restarts=1), before, restarts=1)).nodes == NODES[1:]


@pytest.mark.parametrize("state", ["CANCELLED", "DEADLINE"])
@pytest.mark.parametrize("kind", ["death", "signal", "exception", "hang", ""])
def test_a_cancelled_job_stays_cancelled(state: str, kind: str) -> None:
    """Whatever the ranks say."""
    job = replace(RUNNING, state=state, completing=True)
    assert decide(case(replace(SAVED, fault=kind), job=job)).action == "stop"


@pytest.mark.parametrize("job", [replace(RUNNING, restarts=1), replace(RUNNING, state="PENDING", completing=True)])
def test_a_job_that_is_already_on_its_way_back_is_left_to_go(job: JobInfo) -> None:
    """Slurm or a surviving rank was faster."""
    assert decide(case(job=job)).action == "requeue"


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED"])
def test_an_allocation_that_is_over_means_the_queue(state: str) -> None:
    """Time limit and preemption are planned ends: saved, requeued, not relaunched."""
    job = replace(RUNNING, state=state, completing=True)
    assert decide(case(replace(SAVED, fault="signal"), job=job)).action == "requeue"
    assert decide(case(job=job)).action == "requeue"


def test_what_ends_soon_is_not_started_again_here() -> None:
    """Neither in an allocation that Slurm wants back nor in one with seconds left."""
    assert decide(case(job=replace(RUNNING, preempted=True))).action == "requeue"
    assert decide(case(now=9_980.0)).action == "requeue"
    assert decide(case(now=9_000.0)).action == "relaunch"


def test_a_good_end_is_the_end() -> None:
    """Exit code 0 is done, also when a rank was lost on its way out."""
    assert decide(case(Outcome(0, nodes=NODES[:4], code=0, finished=True))).action == "done"
    assert decide(case(replace(SAVED, code=0))).action == "done"


@pytest.mark.parametrize("code", [1, 3, 85, 127])
def test_an_exit_code_of_the_script_is_passed_on(code: int) -> None:
    """Without a fault it is not ours to repeat; 85 says so itself."""
    plain = Outcome(0, nodes=NODES[:4], code=code, trained=True)
    assert decide(case(plain, checkpoint=Checkpoint(0, 3))).action == "stop"
    assert decide(case(replace(plain, trained=False))).action == "stop"


def test_a_start_that_fails_with_its_node_is_tried_elsewhere() -> None:
    """A code of srun's own, with a node that does not answer, is the node's fault."""
    plain = Outcome(0, nodes=NODES[:4], code=1)
    assert decide(case(plain, silent=("n3",))).nodes == ("n1", "n2", "n4", "n5")
    assert decide(case(Outcome(0, nodes=NODES[:4], code=137))).action == "relaunch"


def test_all_replicas_lost_ends_the_job_or_goes_back() -> None:
    """Nothing to go back to: stop. An older checkpoint: back to it, saying what that costs."""
    lost = replace(SAVED, committed=None, lost="no replica of shard 0", code=84)
    stop = decide(case(lost))
    assert stop.action == "stop"
    assert "all replicas lost" in stop.reason
    back = decide(case(lost, checkpoint=Checkpoint(-1, 3)))
    assert back.action == "relaunch"
    assert "4 minibatches are lost" in back.reason


def test_nothing_is_lost_by_a_failure_before_training() -> None:
    """A first start that fails is simply started again, and three times at most."""
    died = Outcome(0, nodes=NODES[:4], code=137, fault="death", blamed=("n1",))
    assert decide(case(died)).action == "relaunch"
    assert decide(case(replace(died, attempt=1), died)).action == "relaunch"
    assert decide(case(replace(died, attempt=2), died, replace(died, attempt=1))).action == "stop"


def test_nothing_is_lost_by_a_failure_in_the_first_minibatch() -> None:
    """Before the first update the state is the one that the script begins with: it begins again, twice at most."""
    first = replace(SAVED, committed=None, updated=False, reached=0, code=84, lost="nothing new")
    assert decide(case(first)).action == "relaunch"
    assert decide(case(first, first, first)).action == "stop"
    assert decide(case(replace(first, updated=True, reached=1))).action == "stop"


def test_a_bug_on_every_rank_stops_at_once() -> None:
    """An exception on all ranks is the script's."""
    assert decide(case(replace(SAVED, fault="exception", everyone=True))).action == "stop"


def test_an_exception_gets_one_more_chance_on_another_node() -> None:
    """The spare first, if there is one; the second time at the same minibatch it is the script's own."""
    raised = replace(SAVED, fault="exception", updated=False)
    first = decide(case(raised))
    assert (first.action, first.nodes) == ("relaunch", ("n1", "n3", "n4", "n5"))
    assert decide(case(raised, nodes=NODES[:4])).nodes == NODES[:4]
    second = replace(raised, attempt=1, blamed=("n3",))
    assert decide(case(second, raised)).action == "stop"
    assert decide(case(replace(second, reached=9), raised)).action == "relaunch"


def test_deaths_at_one_minibatch_end_at_three() -> None:
    """The second on one node moves to the spare, or through the queue without one; the third stops."""
    second = replace(SAVED, attempt=1)
    assert decide(case(second, SAVED)).nodes == ("n1", "n3", "n4", "n5")
    assert decide(case(second, SAVED, nodes=NODES[:4])).exclude == ("n2",)
    assert decide(case(replace(SAVED, attempt=2), SAVED, second)).action == "stop"
    moved = replace(SAVED, attempt=2, reached=8, committed=8)
    assert decide(case(moved, SAVED, second)).action == "relaunch"


def test_planned_ends_and_unseen_ends_are_not_failures_in_a_row() -> None:
    """A job that goes through the queue every day at its time limit is not stuck."""
    planned = replace(SAVED, fault="signal")
    assert decide(case(planned, planned, planned, planned)).action == "requeue"
    unseen = Outcome(1, nodes=NODES[:4], trained=True)
    assert decide(case(replace(SAVED, attempt=3), SAVED, unseen)).action == "relaunch"


def test_limits_are_kept() -> None:
    """relaunches in one allocation, then the queue; requeues, then the end."""
    assert decide(case(options={"relaunches": 0})).action == "requeue"
    assert decide(case(options={"relaunch": "off"})).action == "requeue"
    assert decide(case(options={"relaunch": "off", "requeues": 2}, restarts=2)).action == "stop"
    many = [replace(SAVED, attempt=n, reached=n) for n in range(10)]
    assert decide(case(replace(SAVED, attempt=10, reached=99), *many)).action == "requeue"


def test_a_job_that_may_not_be_requeued_is_not() -> None:
    """An interactive job, or one with --no-requeue, ends with the reason."""
    for job in (replace(RUNNING, batch=False), replace(RUNNING, may_requeue=False)):
        stop = decide(case(replace(SAVED, fault="signal"), job=job))
        assert stop.action == "stop"
        assert "--requeue" in stop.reason


def test_a_keyboard_interrupt_is_the_users_word() -> None:
    """Ctrl-C twice ends the job."""
    assert decide(case(replace(SAVED, interrupted=True, code=130))).action == "stop"


nodes = st.lists(st.sampled_from(NODES), unique=True, max_size=5).map(tuple)
numbers = st.integers(-1, 4)
outcomes = st.builds(
    Outcome,
    attempt=st.just(0),
    restarts=st.integers(0, 2),
    nodes=nodes,
    code=st.none() | st.sampled_from([0, 1, 3, 83, 84, 85, 130, 137]),
    trained=st.booleans(),
    began=numbers,
    reached=numbers,
    updated=st.booleans(),
    fault=st.sampled_from(["", "death", "hang", "exception", "signal", "?"]),
    blamed=nodes,
    unreachable=nodes,
    everyone=st.booleans(),
    committed=st.none() | st.integers(0, 4),
    lost=st.sampled_from(["", "why"]),
    interrupted=st.booleans(),
)
jobs = st.none() | st.builds(
    JobInfo,
    job_id=st.just("1"),
    state=st.sampled_from(["RUNNING", "CANCELLED", "PENDING", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETED", "?"]),
    restarts=st.integers(0, 3),
    preempted=st.booleans(),
    end=st.sampled_from([0.0, 10.0, 1e6]),
    batch=st.booleans(),
    may_requeue=st.booleans(),
)
cases = st.builds(
    Case,
    outcome=outcomes,
    history=st.lists(outcomes, max_size=5).map(tuple),
    allocation=st.builds(Allocation, nodes=nodes, answering=nodes.map(frozenset), need=st.integers(1, 5)),
    options=st.builds(
        Options,
        st.just("/x"),
        requeues=st.integers(0, 3),
        relaunches=st.integers(0, 4),
        relaunch=st.sampled_from(["on", "off"]),
    ),
    job=jobs,
    checkpoint=st.none() | st.builds(Checkpoint, st.integers(-1, 3), st.integers(0, 5)),
    restarts=st.integers(0, 3),
    now=st.sampled_from([0.0, 100.0]),
)


@given(cases)
def test_promises_hold_in_every_case(given_case: Case) -> None:
    """Never raises; always gives a reason; never brings a cancelled job back; never picks a bad node or too few."""
    recovery = decide(given_case)
    out, held, job = given_case.outcome, given_case.allocation, given_case.job
    assert recovery.reason
    if job is not None and job.state == "CANCELLED":
        assert recovery.action == ("done" if out.code == 0 else "stop")
    if recovery.action == "relaunch":
        assert len(recovery.nodes) == len(set(recovery.nodes)) == held.need
        assert set(recovery.nodes) <= set(held.nodes) & held.answering - set(out.unreachable)
        assert given_case.options.relaunch == "on"
        assert job is None or (job.state == "RUNNING" and not job.preempted)
        assert out.code not in (0, 85)
    else:
        assert recovery.nodes == ()
    if (
        recovery.action == "requeue"
        and job is not None
        and job.state != "PENDING"
        and job.restarts <= given_case.restarts
    ):
        assert job.batch
        assert job.may_requeue
        assert given_case.restarts < given_case.options.requeues
        assert set(out.unreachable) & (set(held.nodes) - held.answering) <= set(recovery.exclude)


@given(st.lists(st.sampled_from(["death", "exception", "hang"]), min_size=3, max_size=3), st.booleans())
def test_nothing_fails_at_one_place_for_ever(kinds: list[str], saved: bool) -> None:
    """Whatever the kind, and saved or not, the third failure at the same place is the last."""
    made = [replace(SAVED, attempt=n, fault=k, committed=7 if saved else None) for n, k in enumerate(kinds)]
    assert decide(case(made[2], *made[:2], checkpoint=Checkpoint(0, 5))).action == "stop"
