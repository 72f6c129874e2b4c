"""Marking a node through the door, against a Slurm in memory."""

from __future__ import annotations

import pytest

from slurm_plugin.marking import mark
from slurm_plugin.slurm_text import NodeInfo, SlurmError
from tests.unit.fake_slurm import FakeSlurm

REASON = "jit-ckpt: 7 of 8 GPUs answer job 17"


def slurm_with(state: str, reason: str = "") -> FakeSlurm:
    """One node in this state."""
    return FakeSlurm({}, [NodeInfo("n1", state, reason, "n1", 6818)])


@pytest.mark.parametrize("state", ["IDLE", "MIXED", "ALLOCATED", "IDLE*", "ALLOCATED+COMPLETING", "IDLE+CLOUD"])
def test_a_node_in_service_is_drained(state: str) -> None:
    """With the reason, once."""
    slurm = slurm_with(state)
    assert REASON in mark(slurm, "n1", REASON)
    assert slurm.done == [("drain", "n1", REASON)]


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN", "DOWN*+DRAIN", "FAIL", "DRAINED", "DOWN+FAIL"])
@pytest.mark.parametrize("reason", ["disk, see ticket 4711 [root@2026-11-29T20:00:00]", "jit-ckpt: older", ""])
def test_what_is_out_of_service_is_left_as_it_is(state: str, reason: str) -> None:
    """An administrator's drain keeps its reason, and so does an older one of ours."""
    slurm = slurm_with(state, reason)
    assert "left as it is" in mark(slurm, "n1", REASON)
    assert slurm.done == []


def test_a_slurm_that_does_not_answer_is_an_error() -> None:
    """The caller must know that the node may not be marked."""
    slurm = slurm_with("IDLE")
    slurm.refuse = 1
    with pytest.raises(SlurmError):
        mark(slurm, "n1", REASON)
    assert slurm.done == []
