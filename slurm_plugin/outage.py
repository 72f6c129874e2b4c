"""Sit out a slurmctld that does not answer: a question in, its answer out, later if need be.

While slurmctld is down nobody else can get the job's nodes: waiting costs nothing, and giving up would cost the job.

Rule 1: silence is waited for as long as `OUTAGE`; a refusal, by a slurmctld that answers, as long as the caller says.
Rule 2: which of the two it was is asked (Slurm.answers): the words of Slurm's commands do not tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import SlurmError

OUTAGE: Final = 3600.0  # seconds; an upgrade of slurmctld with a large database takes minutes
PAUSE: Final = 1.0  # seconds between two tries
SLACK: Final = 5.0  # seconds by which the clocks of two hosts may differ; Slurm tells its times in whole ones

T = TypeVar("T")


def ask(
    slurm: Slurm,
    question: Callable[[], T],
    log: Callable[[str], None],
    *,
    refusals: float = 0.0,
    outage: float = OUTAGE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Ask until there is an answer.

    Args:
        question: calls one method of `slurm`.
        log: gets one line for every new trouble.
        refusals: seconds to go on while Slurm answers and refuses; it is asked twice at least, since it may have come
            back between the question and `answers`.

    Raises:
        SlurmError: refused for too long, or no answer within `outage` seconds.
    """
    begin, said = clock(), ""
    refused: float | None = None
    while True:
        try:
            return question()
        except SlurmError as error:
            trouble = error
        away, now = not slurm.answers(), clock()
        if now >= begin + outage or (not away and refused is not None and now >= refused + refusals):
            raise trouble
        text = "slurmctld does not answer; waiting for it" if away else f"Slurm: {trouble}"
        if text != said and (away or refused is not None):
            said = text
            log(text)
        refused = None if away else now if refused is None else refused
        sleep(PAUSE)


def forgot(slurm: Slurm, log: Callable[[str], None], job: str, ended: float) -> bool:
    """Say whether slurmctld may have lost that a job has ended: it was started after that, and put the job back then.

    Killed within seconds of a change, it starts with an older state.

    Args:
        ended: seconds since the epoch.
    """
    try:
        booted = ask(slurm, slurm.booted, log)
        return ended - SLACK < booted <= ask(slurm, lambda: slurm.job(job), log).submitted
    except SlurmError:
        return False
