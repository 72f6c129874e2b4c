"""Verdicts: what evidence leads to."""

from __future__ import annotations

import re

import pytest

from slurm_plugin.evidence import BAD, NOTE, SUSPECT, Finding
from slurm_plugin.health import HEALTHY, Verdict, judge, reason
from slurm_plugin.slurm import REASON

GPU = Finding("gpu", BAD, "7 of 8 GPUs answer")
LINK = Finding("links", BAD, "link mlx5_0/1 was up and is down")
CRASH = Finding("tasks", SUSPECT, "rank 3 of step 0 died of SIGBUS")
FAILED = Finding("site", NOTE, "a check failed")


def test_nothing_and_notes_are_healthy() -> None:
    """A check that failed is no evidence."""
    assert judge([]) == Verdict(HEALTHY)
    assert judge([FAILED], score=100.0, threshold=1) == Verdict(HEALTHY)


def test_one_bad_fact_is_enough() -> None:
    """And its words are the evidence, whatever else was found."""
    assert judge([FAILED, CRASH, GPU]) == Verdict(BAD, "7 of 8 GPUs answer")
    assert judge([GPU, LINK]).evidence == "7 of 8 GPUs answer; link mlx5_0/1 was up and is down"
    many = [Finding("gpu", BAD, f"GPU {n}") for n in range(5)]
    assert judge([*many, many[0]]).evidence == "GPU 0; GPU 1 and 3 more"


@pytest.mark.parametrize("score", [1.0, 3.0, 1e9])
def test_no_suspicion_drains_by_default(score: float) -> None:
    """Whatever weighs on the node: without a threshold of the site it stays in service."""
    assert judge([CRASH], score=score) == Verdict(SUSPECT, CRASH.what)


@pytest.mark.parametrize(("score", "state"), [(1.0, SUSPECT), (2.4, SUSPECT), (2.6, BAD), (3.0, BAD), (9.0, BAD)])
def test_the_sites_threshold_counts(score: float, state: str) -> None:
    """Three that lie some hours back weigh a little less than three, and still are three."""
    assert judge([CRASH], score=score, threshold=3).state == state


def test_the_past_alone_condemns_nobody() -> None:
    """Old suspicions drain a node only together with a new one."""
    assert judge([], score=9.0, threshold=3) == Verdict(HEALTHY)


def test_reasons_fit_slurms_line() -> None:
    """They name us and the job, whatever a tool wrote, and reach scontrol whole."""
    assert reason(judge([GPU]), "17") == "jit-ckpt: 7 of 8 GPUs answer job 17"
    assert reason(judge([GPU])) == "jit-ckpt: 7 of 8 GPUs answer"
    wild = Verdict(BAD, "x" * 300 + '"\n=\\ü')
    for made in (reason(wild, "4294967295"), reason(Verdict(BAD, '"\n=\\ü'), "1")):
        assert re.fullmatch(REASON, made)
        assert made.startswith("jit-ckpt: ")
    assert reason(wild, "4294967295").endswith(" job 4294967295")
