"""Decide what happens after a launch of the ranks has ended: Case -> Recovery.

Rule 1: pure; jit-srun gathers the facts and does what is decided.
Rule 2: a job that somebody cancelled never comes back, and a node known to be bad is never chosen again.
Rule 3: what fails without progress is not repeated for ever: each way of failing has a limit of its own below.

The rules are tried in the order of RULES; the first that has an opinion decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from slurm_plugin import contract
from slurm_plugin.journal import Checkpoint
from slurm_plugin.outcomes import Outcome
from slurm_plugin.slurm_text import ON_ITS_WAY, JobInfo

DEATHS: Final = 3  # failures at one minibatch, or launches in a row that left no checkpoint: chance ends at two
EXCEPTIONS: Final = (
    2  # exceptions at one minibatch: the script's own; after the first one a spare node is tried if there is one
)
LAUNCHES: Final = 8  # tries in a row to get a step from Slurm
LAUNCH_PAUSE: Final = 30.0  # seconds between two of them at most; the first pause is 2 s and each doubles
AWAY: Final = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes",
    "Message ",
)  # why srun got no step
LEAST_LEFT: Final = 30.0  # seconds of the allocation below which a relaunch would only be killed while it starts

HELD: Final = "Slurm holds a job with --requeue=expedite that fails on healthy nodes (REQUEUE_HOLD); scancel ends it"

Action = Literal["relaunch", "requeue", "stop", "done"]


@dataclass(frozen=True)
class Allocation:
    """The nodes that the job holds.

    Attributes:
        nodes: all of them, in Slurm's order.
        answering: those that answer now.
        need: how many of them a launch needs.
        drained: those on which Slurm would start no new job; what runs there may go on.
    """

    nodes: tuple[str, ...]
    answering: frozenset[str]
    need: int
    drained: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    """Everything that a decision rests on.

    Attributes:
        outcome: of the launch that has just ended; history: of those before it, oldest first.
        job: what Slurm says now, None when it does not answer.
        checkpoint: the newest committed one of this job (or the one it was told to resume from), None for none.
        restarts: how often the job has been through the queue.
        now: seconds since the epoch.
    """

    outcome: Outcome
    history: tuple[Outcome, ...]
    allocation: Allocation
    options: contract.Options
    job: JobInfo | None
    checkpoint: Checkpoint | None
    restarts: int
    now: float


@dataclass(frozen=True)
class Recovery:
    """What to do: start again on `nodes`, go back to the queue without `exclude`, or end; and why, in one line.

    A relaunch waits for `pause` seconds.
    """

    action: Action
    reason: str
    nodes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    pause: float = 0.0


def decide(case: Case) -> Recovery:
    """Decide; never raises."""
    recovery = next(filter(None, (rule(case) for rule in RULES)), None) or _go_on(case)
    if recovery.action == "stop" and case.job is not None and case.job.expedited:
        return replace(recovery, reason=f"{recovery.reason}; {HELD}")
    return recovery


def _ended_from_outside(case: Case) -> Recovery | None:
    job = case.job
    if job is None:
        return None
    if job.state in ("CANCELLED", "DEADLINE"):
        return Recovery("stop", f"the job was ended from outside ({job.state}); it stays ended")
    if job.restarts > case.restarts or job.state in ON_ITS_WAY:
        return Recovery("requeue", "the job is already on its way back to the queue", exclude=_excluded(case))
    return None


def _ended_well(case: Case) -> Recovery | None:
    return Recovery("done", "the script ended well") if case.outcome.code == 0 else None


def _ended_by_hand(case: Case) -> Recovery | None:
    return Recovery("stop", "interrupted from the keyboard") if case.outcome.interrupted else None


def _never_launched(case: Case) -> Recovery | None:
    """Nothing has happened: slurmctld was away, or has not yet heard from the nodes after its restart (seconds).

    At the very first launch another reason may be the user's (options of srun that cannot be met): not repeated.
    """
    out = case.outcome
    if not out.unlaunched or not (case.history or out.unlaunched.startswith(AWAY)):
        return None
    tries = 1 + sum(1 for _ in itertools.takewhile(lambda h: h.unlaunched, reversed(case.history)))
    if tries >= LAUNCHES:
        return Recovery("stop", f"Slurm gave no step {tries} times in a row: {out.unlaunched}")
    return replace(_go_on(case), pause=min(LAUNCH_PAUSE, 2.0**tries))


def _refused(case: Case) -> Recovery | None:
    if case.outcome.code != contract.EXIT_REFUSED:
        return None
    return Recovery("stop", "the ranks refused to start (their message says why); again would end the same way")


def _script_failed(case: Case) -> Recovery | None:
    """An exit code of the script's own, with no fault behind it: ours to pass on, not to repeat."""
    out = case.outcome
    own_codes = 0 < (out.code or 0) < 128 and out.code not in (contract.EXIT_COMMITTED, contract.EXIT_LOST)
    if out.fault or out.lost or out.committed is not None or not own_codes or _silent(case):
        return None
    # A relaunch of a script that has run before may fail to start for reasons of the cluster: that is tried again.
    if not out.trained and any(h.trained for h in case.history):
        return None
    return Recovery("stop", f"the script ended with exit code {out.code}")


def _everyone_raised(case: Case) -> Recovery | None:
    if case.outcome.fault != "exception" or not case.outcome.everyone:
        return None
    return Recovery("stop", f"every rank raised an exception {_at(case)}: a bug in the script, not in a node")


def _nothing_saved(case: Case) -> Recovery | None:
    out = case.outcome
    if case.checkpoint is not None or (not out.trained and out.fault != "signal"):
        return None
    if out.fault != "signal" and not out.updated and out.reached <= max(0, out.began):
        return None  # no update was done: starting again loses nothing
    why = out.lost or "no rank left a checkpoint"
    if out.fault == "signal":
        return Recovery("stop", f"nothing could be saved before the planned end ({why}) and there is no checkpoint")
    if out.finished and not out.fault:
        return Recovery(
            "stop", f"the training came to its end, but {_what(out)}; there is no checkpoint to repeat it from"
        )
    return Recovery("stop", f"all replicas lost {_at(case)} ({why}) and there is no earlier checkpoint")


def _no_progress(case: Case) -> Recovery | None:
    out = case.outcome
    if not out.failed:
        return None
    same = _in_a_row(case, lambda h: h.place == out.place)
    raised = _in_a_row(case, lambda h: h.place == out.place and h.fault == out.fault)
    unsaved = _in_a_row(case, lambda h: h.committed is None) if out.committed is None else 0
    if same >= DEATHS:
        return Recovery("stop", f"{same} failures in a row {_at(case)}, no progress; the last: {_what(out)}")
    if unsaved >= DEATHS:
        return Recovery("stop", f"{unsaved} launches in a row failed and left no checkpoint; the last: {_what(out)}")
    if out.fault == "exception" and raised >= EXCEPTIONS:
        where = ",".join(dict.fromkeys(n for h in (*case.history[-1:], out) for n in h.blamed))
        return Recovery("stop", f"an exception {_at(case)} again (on {where}): a bug in the script; {_what(out)}")
    return None


def _planned_end(case: Case) -> Recovery | None:
    if case.outcome.fault != "signal":
        return None
    return _requeue(case, f"the job was told to end ({_what(case.outcome)})")


RULES: Final[tuple[Callable[[Case], Recovery | None], ...]] = (
    _ended_well,
    _ended_from_outside,
    _ended_by_hand,
    _never_launched,
    _refused,
    _script_failed,
    _everyone_raised,
    _nothing_saved,
    _no_progress,
    _planned_end,
)


def _go_on(case: Case) -> Recovery:
    """Choose where to go on: the same nodes, other nodes of the allocation, or the queue."""
    why = _what(case.outcome) + _price(case)
    unfit = _unfit(case)
    if unfit:
        return _requeue(case, f"{why}; {unfit}")
    bad, suspects = _bad(case), _suspects(case)
    usable = [n for n in case.allocation.nodes if n in case.allocation.answering and n not in bad]
    trusted = [n for n in usable if n not in suspects]
    if len(trusted) >= case.allocation.need:
        return _relaunch(case, why, trusted)
    back = _requeue(case, f"{why}; too few good nodes left in the allocation", suspects)
    if len(usable) >= case.allocation.need and (back.action == "stop" or case.outcome.fault == "exception"):
        return _relaunch(case, why, usable)
    return back


def _relaunch(case: Case, why: str, usable: list[str]) -> Recovery:
    """Keep the nodes that the ranks had, fill up with spares, and keep Slurm's order: it is the order of the ranks.

    A drained node works until its job ends, but whoever drained it had a reason: it comes last.
    """
    had, drained = case.outcome.nodes, case.allocation.drained
    best = sorted(usable, key=lambda n: (n in drained, n not in had))[: case.allocation.need]
    chosen = tuple(n for n in case.allocation.nodes if n in best)
    left_out, spares = [n for n in had if n not in best], [n for n in chosen if n not in had]
    where = f" without {','.join(left_out)}, with {','.join(spares)}" if left_out or spares else " on the same nodes"
    return Recovery("relaunch", why + ";" + where, nodes=chosen)


def _requeue(case: Case, why: str, suspects: tuple[str, ...] = ()) -> Recovery:
    if case.job is not None and not (case.job.batch and case.job.may_requeue):
        return Recovery("stop", f"{why}; the job may not go back to the queue (sbatch --requeue allows it)")
    if case.restarts >= case.options.requeues:
        return Recovery("stop", f"{why}; the limit of {case.options.requeues} requeues is reached")
    return Recovery("requeue", why, exclude=tuple(dict.fromkeys(_excluded(case) + suspects)))


def _unfit(case: Case) -> str:
    """Say why this allocation is no place to go on in, "" if it is one."""
    job, here = case.job, [h for h in case.history if h.restarts == case.outcome.restarts]
    launches = sum(not h.unlaunched for h in here)
    if case.options.relaunch == "off":
        return "relaunch=off"
    if launches >= case.options.relaunches:
        return f"the limit of {case.options.relaunches} relaunches in one allocation is reached"
    if job is None:
        return ""
    if job.preempted:
        return "the job is being preempted"
    if job.state != "RUNNING":
        return f"the allocation is over ({job.state})"
    if job.end and job.end - case.now < LEAST_LEFT:
        return f"the allocation ends in {max(0.0, job.end - case.now):.0f} s"
    return ""


def _silent(case: Case) -> tuple[str, ...]:
    return tuple(n for n in case.outcome.nodes if n not in case.allocation.answering)


def _bad(case: Case) -> tuple[str, ...]:
    """Nodes to stay away from: dead or cut off now, or at any time in this allocation (old ranks may live on there)."""
    here = [h for h in case.history if h.restarts == case.outcome.restarts]
    named = [n for h in [*here, case.outcome] for n in h.unreachable]
    silent = [n for n in case.allocation.nodes if n not in case.allocation.answering]
    return tuple(dict.fromkeys([*named, *_silent(case), *silent]))


def _excluded(case: Case) -> tuple[str, ...]:
    """Bad nodes to exclude from the next allocation, in which no old rank can be.

    Whoever loses more than half of the others may be the one that was cut off. Then only what does not answer although
    Slurm's controller does is bad; a job that excludes half of a cluster might never run again.
    """
    bad, answering = _bad(case), case.allocation.answering
    if 2 * sum(n in bad for n in case.outcome.nodes) <= len(case.outcome.nodes):
        return bad
    return tuple(n for n in bad if n not in answering) if case.job is not None else ()


def _suspects(case: Case) -> tuple[str, ...]:
    """The one node on which an exception was raised, or on which the last two failures at the same place began.

    One failure is enough on a node that is drained.
    """
    out = case.outcome
    if not out.failed or len(out.blamed) != 1 or out.everyone or len(out.nodes) < 2:
        return ()
    if out.fault == "exception" or out.blamed[0] in case.allocation.drained:
        return out.blamed
    before = [h for h in case.history if h.failed][-1:]
    return out.blamed if before and (before[0].place, before[0].blamed) == (out.place, out.blamed) else ()


def _in_a_row(case: Case, alike: Callable[[Outcome], bool]) -> int:
    """Count this failure and the ones just before it that are like it; launches that nobody saw end do not count."""
    count = 1
    for old in reversed(case.history):
        if old.failed:
            if not alike(old):
                break
            count += 1
        elif old.code == 0 or old.fault == "signal":
            break
    return count


def _what(out: Outcome) -> str:
    """Say in a few words how a launch ended."""
    if out.unlaunched:
        return f"Slurm gave no step ({out.unlaunched})"
    if not out.fault:
        return f"the ranks ended with code {out.code}" if out.code is not None else "the ranks are gone"
    nodes = out.unreachable or out.blamed
    place = f" on {','.join(nodes)}" if nodes else ""
    gone = " (node does not answer)" if out.unreachable else ""
    detail = f": {out.detail}" if out.detail else ""
    return f"{out.fault}{place}{gone}{detail}"


def _at(case: Case) -> str:
    return f"at minibatch {case.outcome.place}" if case.outcome.place >= 0 else "while starting"


def _price(case: Case) -> str:
    """Say what the failure costs when this launch could not save."""
    out, checkpoint = case.outcome, case.checkpoint
    if out.committed is not None or not out.trained or checkpoint is None:
        return ""
    lost = out.reached - checkpoint.minibatch
    many = f", {lost} minibatches are lost" if lost > 0 else ""
    return f"; not saved ({out.lost or 'no word from the ranks'}), back to minibatch {checkpoint.minibatch}{many}"
