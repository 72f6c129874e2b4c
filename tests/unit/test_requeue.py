"""Back into the queue with the owner's rights, against a Slurm in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_plugin.requeue import bring_back, requeue_from_inside, requeue_job
from slurm_plugin.slurm_text import JobInfo
from tests.unit.fake_slurm import FakeSlurm


def slurm(**fields: object) -> FakeSlurm:
    """A Slurm with job 7."""
    job = JobInfo("7", str(fields.pop("state", "RUNNING")), excluded=("n9",), **fields)  # type: ignore[arg-type]
    return FakeSlurm({"7": job}, [])


def ask(fake: FakeSlurm, **options: object) -> tuple[bool, list[str]]:
    """Requeue job 7 without n2; the answer and what was said."""
    said: list[str] = []
    done = requeue_job(fake, "7", ["n2"], said.append, sleep=lambda _: None, **options)  # type: ignore[arg-type]
    return done, said


def test_the_job_goes_back_soon_and_keeps_away_from_bad_nodes() -> None:
    """Requeued once; start in a moment; nodes excluded before stay excluded."""
    fake = slurm()
    done, said = ask(fake)
    assert done
    assert fake.done == [("requeue", "7"), ("update", "7", "now+3", ("n9", "n2"))]
    assert said == ["job 7 goes back to the queue without n9,n2"]


def test_an_expedited_job_is_given_no_time() -> None:
    """Slurm lets it start at once; only its nodes are told."""
    fake = slurm(expedited=True)
    assert ask(fake)[0]
    assert fake.done == [("requeue", "7"), ("update", "7", "", ("n9", "n2"))]


@pytest.mark.parametrize("state", ["CANCELLED", "DEADLINE"])
def test_a_cancelled_job_is_left_alone(state: str) -> None:
    """Nobody brings it back."""
    fake = slurm(state=state)
    assert not ask(fake)[0]
    assert fake.done == []


def test_a_job_is_not_requeued_twice() -> None:
    """Somebody was faster: only the nodes are excluded. It runs again already: nothing is touched."""
    fake = slurm(state="PENDING", restarts=1)
    assert ask(fake)[0]
    assert fake.done == [("update", "7", "now+3", ("n9", "n2"))]
    fake = slurm(state="RUNNING", restarts=1)
    assert ask(fake, restarts=0)[0]
    assert fake.done == []


def test_a_restart_of_slurmctld_is_sat_out() -> None:
    """Questions that fail are asked again, and the trouble is told once."""
    fake = slurm()
    fake.refuse = 3
    done, said = ask(fake)
    assert done
    assert said.count("slurmctld does not answer; waiting for it") == 1


def test_without_slurm_it_gives_up_at_its_deadline() -> None:
    """False, not for ever."""
    fake = slurm()
    fake.refuse = 10**6
    times = iter([0.0, 10.0, 10_000.0])
    done, said = ask(fake, clock=lambda: next(times))
    assert not done
    assert said[-1] == "job 7 cannot be requeued: slurmctld does not answer"


def test_a_node_that_the_user_named_is_not_excluded() -> None:
    """`sbatch -w n2`: Slurm would hold the job for ever; it waits until n2 is well."""
    fake = slurm(required=("n1", "n2"))
    done, said = ask(fake)
    assert done
    assert fake.done == [("requeue", "7"), ("update", "7", "now+3", None)]
    assert said[0] == "the job asks for n2 by name, which therefore cannot be excluded"


def test_a_job_is_never_left_too_few_nodes() -> None:
    """Slurm would hold it for ever without a word; then the bad node is not excluded, and that is said."""
    fake = slurm(partition="main", width=3)
    fake.partitions["main"] = ("n1", "n2", "n3", "n9")
    done, said = ask(fake)
    assert done
    assert fake.done == [("requeue", "7"), ("update", "7", "now+3", None)]
    assert said[0] == "3 nodes are needed and main has 4: n2 cannot be excluded"
    fake = slurm(partition="main", width=2)
    fake.partitions["main"] = ("n1", "n2", "n3", "n9")
    ask(fake)
    assert fake.done[-1] == ("update", "7", "now+3", ("n9", "n2"))


def test_without_bad_nodes_the_partition_is_not_asked_for() -> None:
    """One question less, when all jobs of a site may fail at once."""

    class Busy(FakeSlurm):
        def partition_nodes(self, name: str) -> tuple[str, ...]:
            raise AssertionError(name)

    fake = Busy({"7": JobInfo("7", "RUNNING", excluded=("n9",), partition="main", width=2)}, [])
    assert requeue_job(fake, "7", [], print, sleep=lambda _: None)
    assert fake.done == [("requeue", "7"), ("update", "7", "now+3", None)]


def test_a_job_without_its_jit_srun_comes_back_or_ends() -> None:
    """At the limit, or with --no-requeue, it is ended: without its script it would hold its nodes for nothing."""
    fake, said = slurm(restarts=2), list[str]()
    assert bring_back(fake, "7", ["n2"], said.append, restarts=2, requeues=3)
    assert fake.done[0] == ("requeue", "7")
    fake = slurm(restarts=2)
    assert bring_back(fake, "7", ["n2"], said.append, restarts=2, requeues=2)
    assert fake.done == [("scancel", "7")]
    assert "limit of 2 requeues is reached; ending job 7" in said[-1]
    fake = slurm(may_requeue=False)
    assert bring_back(fake, "7", ["n2"], said.append, restarts=2, requeues=3)
    assert fake.done == [("scancel", "7")]


@pytest.mark.parametrize("fields", [{"restarts": 3}, {"state": "PENDING"}, {"state": "CANCELLED"}])
def test_a_job_that_somebody_has_seen_to_is_not_ended(fields: dict[str, object]) -> None:
    """Running again, on its way or cancelled."""
    fake = slurm(**fields)
    assert bring_back(fake, "7", [], lambda _: None, restarts=2, requeues=2)
    assert fake.done == []


def test_what_slurm_could_not_be_told_is_said() -> None:
    """Then somebody else must see to the job."""
    fake, now = slurm(), iter(range(0, 90000, 600))
    fake.refuse = 1 << 30
    assert not bring_back(fake, "7", [], print, restarts=0, requeues=0, clock=lambda: next(now), sleep=lambda _: None)


def test_a_request_that_slurm_forgets_is_made_again() -> None:
    """Killed before it wrote it down, slurmctld starts with the job running as if nothing had been asked."""
    fake, ended, said = slurm(restarts=2), iter([False, True]), list[str]()

    def ends() -> bool:
        over = next(ended)
        if not over:
            fake.jobs["7"] = replace(fake.jobs["7"], state="RUNNING", restarts=2)
        return over

    assert requeue_from_inside(fake, "7", ["n2"], said.append, restarts=2, ends=ends, sleep=lambda _: None)
    assert [what for what, *_ in fake.done] == ["requeue", "update", "requeue", "update"]
    assert "forgotten" in said[1]


@pytest.mark.parametrize("fields", [{"state": "PENDING"}, {"restarts": 3}, {"state": "CANCELLED"}])
def test_a_request_that_was_heard_is_made_once(fields: dict[str, object]) -> None:
    """Slow to end the script, running again elsewhere, or cancelled meanwhile."""
    fake = slurm(restarts=2)

    def ends() -> bool:
        fake.jobs["7"] = replace(fake.jobs["7"], **fields)  # type: ignore[arg-type]
        return False

    assert requeue_from_inside(fake, "7", ["n2"], print, restarts=2, ends=ends, sleep=lambda _: None)
    assert [what for what, *_ in fake.done].count("requeue") == 1
