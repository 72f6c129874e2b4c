"""Two nodes do not enter MPI_Init at the same moment where Slurm's pmix plugin would hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jitmpi import turns
from jitmpi.config import Settings
from slurm_plugin.contract import Options

HERE = Settings(Options(dir="/d"), "7", 0, 2, "n3", 0, "", mpi_type="pmix", step_nodes="n[3-4]", job_nodes="n[1-4]")
THERE = replace(HERE, node="n4", rank=1)


@pytest.mark.parametrize("now", [1_800_000_000 + tenth / 10 for tenth in range(40)])
def test_two_nodes_begin_apart_whenever_they_come(now: float) -> None:
    """At any two moments within a period, one second is between them, less the time in which a node still begins."""
    here = now + turns.wait(HERE, now)
    for late in range(20):
        there = now + late / 10
        there += turns.wait(THERE, there)
        assert abs(there - here) >= turns.PERIOD / 2 - turns.OPEN - 1e-6


def test_nobody_waits_longer_than_a_period() -> None:
    """It is a start that costs, and nothing later."""
    assert all(0 <= turns.wait(s, t / 7) <= turns.PERIOD for s in (HERE, THERE) for t in range(100))


@pytest.mark.parametrize(
    "change",
    [
        {"mpi_type": "pmi2"},
        {"mpi_type": "none"},
        {"node": "n1", "step_nodes": "n[1,4]"},  # the job's first node: the numbers agree
        {"step_nodes": "n[2-4]"},  # a ring
        {"step_nodes": "n3"},
        {"step_nodes": "", "job_nodes": ""},
        {"job_nodes": ""},
        {"step_nodes": "n[3-"},
        {"node": "elsewhere"},
    ],
)
def test_no_other_start_is_delayed(change: dict[str, str]) -> None:
    """Every other launch begins at once."""
    assert all(turns.wait(replace(HERE, **change), t / 7) == 0 for t in range(100))
