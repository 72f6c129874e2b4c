"""Turn the results of a probe into findings: does this MPI, with this PMI and this Slurm, let the survivors live?

Rule: pure. A PMI that fails is a problem only where jobs would meet it: as the default, or with no other left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_plugin.examine import skew
from slurm_plugin.findings import Finding

SLOW: Final = 5.0  # seconds to see a closed connection; the kernel takes milliseconds
GRAIN: Final = 0.2  # seconds: how well the clocks of two hosts can be compared through a file system's time stamps
FIREWALL: Final = "Let the nodes reach each other on all TCP ports: the ranks listen on ports that the kernel chooses."


@dataclass(frozen=True)
class Trial:
    """What one PMI did.

    Attributes:
        world: the MPI library, "files" without one, "" when it never came up.
        survivors, of: how many of the ranks that were to live did.
        trouble: why the PMI cannot be used; "" when it can.
        seen: seconds until the last survivor knew of the death.
    """

    mpi: str
    world: str
    survivors: int
    of: int
    trouble: str
    says: str
    seen: float = 0.0


def trial(raw: Mapping[str, Any]) -> Trial:
    """Sum one trial up."""
    reports, size = list(raw.get("reports", [])), int(raw.get("size", 0))
    world = next((str(r["world"]) for r in reports if r.get("world")), "")
    alive = sum(r.get("state") == "survived" for r in reports)
    trouble = _trouble(raw, reports, size, alive)
    if trouble:
        return Trial(str(raw["mpi"]), world, alive, size - 1, trouble, trouble)
    seen = max(_seen(reports))
    says = f"{world}: {alive} of {size - 1} survivors lived on, and saw the closed connection after {seen:.2f} s"
    says += f"; a new step began in {raw['beside']:.1f} s"
    return Trial(str(raw["mpi"]), world, alive, size - 1, "", says, seen)


def _trouble(raw: Mapping[str, Any], reports: Sequence[Mapping[str, Any]], size: int, alive: int) -> str:
    errors = [str(r["error"]) for r in reports if r.get("error")]
    lonely = [r for r in reports if re.search(r"made a world of 1 rank", str(r.get("error", "")))]
    if lonely:
        return f"{len(lonely)} worlds of one rank instead of one of {size}: this MPI does not speak {raw['mpi']}"
    if errors:
        return errors[0]
    if not reports:
        return f"no rank started: {_last(raw)}"
    if not any(r.get("world") for r in reports):
        return f"MPI ended the ranks while it started: {_last(raw)}"
    if not any(r.get("died") for r in reports):
        return f"the ranks did not come as far as the kill: {_last(raw)}"
    if any(r.get("state") == "not seen" for r in reports):
        return "the survivors never saw the closed connection"
    if alive < size - 1:
        return f"{size - 1 - alive} of {size - 1} survivors were ended too: {_last(raw)}"
    if "beside" not in raw:
        return f"no new step could begin beside the broken one: {raw.get('beside_error', 'no reason given')}"
    return ""


def _last(raw: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in str(raw.get("said", "")).splitlines() if line.strip()]
    lines = [line for line in lines if line.startswith("jit-ckpt:")] or lines  # our own words say what to do
    return lines[-1] if lines else f"srun ended with {raw.get('code')} and said nothing"


def _seen(reports: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds from the kill until each survivor knew, corrected by what each clock is ahead of the file system's."""
    died = next(float(r["died"]) - float(r.get("offset", 0)) for r in reports if r.get("died"))
    return [max(0.0, float(r["seen"]) - float(r.get("offset", 0)) - died) for r in reports if r.get("seen")]


def judge(results: Mapping[str, Any], default: str, offset: float) -> list[Finding]:
    """Say what a probe found; `default` is MpiDefault, `offset` how far this clock is ahead of the file system's."""
    trials = [trial(raw) for raw in results.get("trials", [])]
    good = [t for t in trials if not t.trouble]
    best = next((t.mpi for t in good if t.mpi == default), good[0].mpi if good else "")
    found = [_finding(t, default, best) for t in trials]
    reports = [r for raw in results.get("trials", []) for r in raw.get("reports", [])]
    found += _nodes(reports, offset)
    if not best:
        advice = "Show this to the maintainers, with the versions above; until then jobs end with the first failure."
        return [*found, Finding("probe", "problem", "with no PMI of this site do survivors live", advice)]
    return [*found, Finding("probe", "ok", _use(best, default, [t.mpi for t in good]))]


def _finding(found: Trial, default: str, best: str) -> Finding:
    subject = f"srun --mpi={found.mpi}"
    if not found.trouble:
        return Finding(subject, "note" if found.seen > SLOW else "ok", found.says)
    advice = FIREWALL if "connect" in found.trouble and "world" not in found.trouble else ""
    if found.mpi == default:
        use = f"--mpi={best}" if best else "another PMI"
        advice = advice or f"It is the site's MpiDefault: start ranks with `jit-srun {use}`, or set MpiDefault={best}."
        return Finding(subject, "problem", found.trouble, advice)
    return Finding(subject, "note", found.trouble, advice or "Do not use it for jobs with --jit-ckpt.")


def _nodes(reports: Sequence[Mapping[str, Any]], offset: float) -> list[Finding]:
    """Compare the nodes' clocks with this one's, each seen against the file system's."""
    clocks = {str(r["node"]): float(r["offset"]) for r in reports if "offset" in r}
    return [skew(f"clock of {node}", ahead - offset, GRAIN) for node, ahead in sorted(clocks.items())]


def _use(best: str, default: str, good: Sequence[str]) -> str:
    here = f"use jit-srun as it is (MpiDefault={default})" if best == default else f"use `jit-srun --mpi={best}`"
    others = [f"--mpi={mpi}" for mpi in good if mpi != best]
    return here + (f"; {' and '.join(others)} would do as well" if others else "")
