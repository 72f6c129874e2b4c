"""Compare the disturbed run with the undisturbed one: are they the same bits, and what did the failure cost?

Rule: no I/O. A difference is a sentence in `problems`; no problems means that the promise was kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from demo.record import Loss, Record


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Attributes:
        bitwise_equal: final parameters and every loss of every rank, also those of minibatches run twice.
        replayed: minibatches begun before the failure and run again after it.
        lost: those of them whose update had already been made, so finished work was thrown away.
        problems: one sentence a broken promise.
    """

    bitwise_equal: bool
    replayed: int
    lost: int
    problems: tuple[str, ...]


def compare(calm: Record, rough: Record, minibatches: int) -> Verdict:
    """Judge `rough`, the run with the failure, by `calm`, the one without; both of `minibatches` minibatches."""
    differences = [*_parameters(calm, rough), *_losses(calm, rough, minibatches)]
    problems = list(differences)
    replayed = lost = 0
    if rough.manifest is None:
        problems.append("no checkpoint was committed")
    else:
        replayed, lost = _cost(rough)
        if replayed > 1 or lost > 0:
            problems.append(f"{replayed} minibatches were replayed and {lost} lost; the promise is one and none")
        if not rough.manifest.exact:
            problems.append(f"the checkpoint is not exact: {'; '.join(rough.manifest.notes)}")
    return Verdict(not differences, replayed, lost, tuple(problems))


def again(losses: Iterable[Loss]) -> tuple[int, ...]:
    """Return the minibatches that appear more than once, in order."""
    seen: set[int] = set()
    twice: set[int] = set()
    for line in losses:
        (twice if line.minibatch in seen else seen).add(line.minibatch)
    return tuple(sorted(twice))


def _cost(rough: Record) -> tuple[int, int]:
    """Return how many minibatches were begun again and how many of those had been finished.

    The interrupted minibatch is begun again by definition, also when no rank had come as far as its loss.
    """
    assert rough.manifest is not None
    start = rough.manifest.minibatch
    twice = {m for losses in rough.losses.values() for m in again(losses)}
    replayed = max([start, rough.manifest.fault.minibatch, *twice]) - min([start, *twice]) + 1
    return replayed, replayed - 1


def _parameters(calm: Record, rough: Record) -> list[str]:
    if not calm.sha256 or not rough.sha256:
        missing = [name for name, run in (("undisturbed", calm), ("disturbed", rough)) if not run.sha256]
        return [f"the {' and the '.join(missing)} run did not end: no final.json"]
    if calm.sha256 != rough.sha256:
        return [f"the final parameters differ: {calm.sha256[:16]} without and {rough.sha256[:16]} with the failure"]
    return []


def _losses(calm: Record, rough: Record, minibatches: int) -> list[str]:
    if not calm.losses or calm.losses.keys() != rough.losses.keys():
        return [f"losses of ranks {sorted(calm.losses)} without and of {sorted(rough.losses)} with the failure"]
    found = []
    for rank, lines in calm.losses.items():
        expected = {line.minibatch: line.loss for line in lines}
        if sorted(expected) != list(range(minibatches)):
            found.append(f"rank {rank} of the undisturbed run logged {len(expected)} of {minibatches} minibatches")
        missing = expected.keys() - {line.minibatch for line in rough.losses[rank]}
        if missing:
            found.append(f"rank {rank} of the disturbed run did not log minibatches {sorted(missing)[:5]}")
        for line in rough.losses[rank]:
            if expected.get(line.minibatch) != line.loss:
                found.append(f"rank {rank}, minibatch {line.minibatch}: the losses differ from there on")
                break
    return found
