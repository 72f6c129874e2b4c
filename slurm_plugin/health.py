"""Turn evidence against a node into one verdict: healthy, suspect or bad.

Rule 1: pure: the same evidence gives the same verdict.
Rule 2: only what cannot be a user's doing makes a node bad at once; what can be is counted, and drains a node only
        where the site has set a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from slurm_plugin.evidence import BAD, SUSPECT, Finding, plain

HEALTHY: Final = "healthy"
TOLD: Final = 2  # facts that a reason names; the log has all
LONGEST_REASON: Final = 200  # characters; what slurm.REASON takes


@dataclass(frozen=True)
class Verdict:
    """What the node is (HEALTHY, SUSPECT or BAD), and by what."""

    state: str
    evidence: str = ""


def judge(findings: Iterable[Finding], *, score: float = 0.0, threshold: int = 0) -> Verdict:
    """Judge a node.

    Args:
        score: how many suspicions weigh on it now, these findings among them; older ones count less.
        threshold: suspicions that make it bad; 0 for never.
    """
    found = list(findings)
    bad = [f.what for f in found if f.grade == BAD]
    if bad:
        return Verdict(BAD, _told(bad))
    suspect = [f.what for f in found if f.grade == SUSPECT]
    if not suspect:
        return Verdict(HEALTHY)
    # Weights shrink from the first second on, so three fresh suspicions weigh a little less than three.
    if threshold and score >= threshold - 0.5:
        return Verdict(BAD, f"suspected {round(score)} times, at last: {_told(suspect)}")
    return Verdict(SUSPECT, _told(suspect))


def reason(verdict: Verdict, job: str = "") -> str:
    """Write the reason that Slurm shows of a drained node."""
    behind = f" job {job}" if job else ""
    return plain(f"jit-ckpt: {verdict.evidence}", LONGEST_REASON - len(behind)) + behind


def _told(facts: list[str]) -> str:
    once = list(dict.fromkeys(facts))
    more = f" and {len(once) - TOLD} more" if len(once) > TOLD else ""
    return "; ".join(once[:TOLD]) + more
