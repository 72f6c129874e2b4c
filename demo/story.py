"""Turn marks and verdict into what people read (a short story) and what programs read (summary.json).

Rule: no I/O; every number in the text is one of the summary's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demo.record import DemoError, Record
from demo.timeline import Marks, Places, times_s
from demo.verdict import Verdict

PAST = {"relaunch": "relaunched", "requeue": "requeued"}


@dataclass(frozen=True)
class Failure:
    """What was done to the job: `kind` to `node`, where `rank` was, at `when` (seconds since the epoch)."""

    kind: str
    node: str
    rank: int
    when: float


def summary(rough: Record, verdict: Verdict, failure: Failure, marks: Marks, places: Places, floor_s: float,
            slurm: str) -> dict[str, Any]:  # fmt: skip
    """Return the content of summary.json; `slurm` is the version text of sinfo."""
    if rough.manifest is None:
        raise DemoError("the run committed no checkpoint, so there is no summary")
    versions: Mapping[str, str] = rough.manifest.versions
    return {
        "bitwise_equal": verdict.bitwise_equal,
        "minibatches_replayed": verdict.replayed,
        "minibatches_lost": verdict.lost,
        "failure": {
            "kind": failure.kind,
            "node": failure.node,
            "rank": failure.rank,
            "minibatch": rough.manifest.minibatch,  # the interrupted one
        },
        "nodes_before": list(places.before),
        "nodes_after": list(places.after),
        "recovery": recovery(rough),
        "times_s": times_s(marks, floor_s),
        "checkpoint": {
            "files": len(rough.checkpoint),
            "bytes": sum(rough.checkpoint.values()),
            "unique_bytes": sum(tensor.nbytes for tensor in rough.manifest.tensors),
        },
        "slurm": slurm.removeprefix("slurm ").strip(),
        "mpi": versions.get("mpi", ""),
        "torch": versions.get("torch", ""),
        "python": versions.get("python", ""),
    }


def recovery(rough: Record) -> str:
    """Return what jit-srun decided after the failure: "relaunch" or "requeue"."""
    for entry in rough.journal:
        action = str(entry.data.get("action", ""))
        if entry.kind == "decision" and action in ("relaunch", "requeue"):
            return action
    raise DemoError("jit-srun's journal holds no decision to relaunch or requeue")


def story(facts: Mapping[str, Any], minibatches: int) -> str:
    """Tell summary.json's facts in a dozen lines."""
    times, failure, files = facts["times_s"], facts["failure"], facts["checkpoint"]
    clock = 0.0
    lines = [f"  {clock:7.2f} s  failure    {failure['node']} (rank {failure['rank']}) lost its power "
             f"in minibatch {failure['minibatch']}"]  # fmt: skip
    after = ", ".join(facts["nodes_after"])
    for stage, name, text in (
        ("detect", "detected", "the other ranks knew"),
        ("settle", "settled", "each stood still with whole parameters in memory"),
        ("save", "saved", f"written once by the survivors: {files['unique_bytes'] / 1e6:.1f} MB of state, "
         f"{files['bytes'] / 1e6:.1f} MB in {files['files']} files"),
        ("commit", "committed", "the checkpoint counts from here on"),
        ("relaunch", PAST[facts["recovery"]], f"new ranks on {after}"),
        ("restore", "restored", "state, random numbers and data position are back"),
    ):  # fmt: skip
        clock += times[stage]
        lines.append(f"  {clock:7.2f} s  {name:10s} {text}")
    lines.append(f"  {times['first_update']:7.2f} s  replayed   minibatch {failure['minibatch']} is done again; "
                 f"a bare start of this script takes {times['floor']:.2f} s")  # fmt: skip
    replayed, lost = facts["minibatches_replayed"], facts["minibatches_lost"]
    lines.append(f"  Replayed {replayed} minibatch{'es' * (replayed != 1)} of {minibatches}, lost {lost}.")
    same = "bit for bit those of" if facts["bitwise_equal"] else "NOT those of"
    lines.append(f"  All losses and the final parameters are {same} the run without a failure.")
    return "\n".join(lines)
