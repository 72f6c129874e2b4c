"""Turn what the doctor found into lines for people, one JSON value for scripts, and an exit code."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

Verdict = Literal["ok", "note", "problem", "unknown"]
LABELS: Final[Mapping[Verdict, str]] = {"ok": "ok", "note": "note", "problem": "PROBLEM", "unknown": "?"}
FINE, PROBLEMS, UNCHECKED = 0, 1, 2
WIDTH: Final = 110  # of the lines for people


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about, in a word or two.
        verdict: "ok"; "note" for what could be better; "problem"; "unknown" for what could not be looked at.
        says: what was seen.
        advice: what to change, and why; "" when there is nothing to do.
    """

    subject: str
    verdict: Verdict
    says: str
    advice: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when all is fine, 1 with a problem, 2 when there is none but something could not be checked."""
    verdicts = {finding.verdict for finding in findings}
    return PROBLEMS if "problem" in verdicts else UNCHECKED if "unknown" in verdicts else FINE


def to_text(findings: Sequence[Finding]) -> str:
    """Write one paragraph a finding."""
    return "\n".join(line for finding in findings for line in _paragraph(finding))


def to_json(findings: Sequence[Finding], facts: Mapping[str, object]) -> str:
    """Write everything for a script."""
    value = {"exit_code": exit_code(findings), "findings": [asdict(f) for f in findings], **facts}
    return json.dumps(value, indent=2, sort_keys=True)


def _paragraph(finding: Finding) -> list[str]:
    head = f"{LABELS[finding.verdict]:<8} {finding.subject}: "
    lines = textwrap.wrap(head + _plain(finding.says), WIDTH, subsequent_indent=" " * 9, break_long_words=False)
    if finding.advice:
        lines += textwrap.wrap(
            _plain(finding.advice), WIDTH, initial_indent=" " * 9 + "-> ", subsequent_indent=" " * 12,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


def _plain(text: str) -> str:
    """Keep control characters of what others wrote away from the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
