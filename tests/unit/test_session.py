"""session: attach is called once, in the main thread. (That it works is shown on the cluster.)"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitmpi import session
from jitmpi.config import Settings
from jitmpi.errors import AttachError
from jitmpi.events import Member
from jitmpi.torch_state import TrainingState
from slurm_plugin.contract import Options

SETTINGS = Settings(Options(dir="/nowhere"), "1", 0, 1, "n1", 0, "")


def begin() -> None:
    session._begin_once(SETTINGS, TrainingState(torch.nn.Linear(1, 1)))


def test_attach_in_a_thread_is_refused() -> None:
    """Only the main thread may take signals; said before anything is started."""
    said: list[str] = []

    def work() -> None:
        with pytest.raises(AttachError, match="main thread") as caught:
            begin()
        said.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said


def test_what_cannot_be_saved_trains_without_the_option_and_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of which a part cannot be protected runs on a laptop as any other."""
    model = torch.nn.Linear(2, 1)
    model.mask = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    monkeypatch.setattr(session.config, "read", lambda: None)
    run = session.attach(model=model, optimizer=optimizer)
    for x in run.minibatches([torch.ones(1, 2)] * 3):
        model(x).sum().backward()
        optimizer.step()
    assert run.minibatch == 3
    with pytest.raises(AttachError, match="model/mask: a tensor of layout"):
        session._begin_once(SETTINGS, TrainingState(model, optimizer))
    assert not session._begun


def test_a_second_attach_is_refused() -> None:
    """Two agents in one process would save two halves."""
    session._begun.append(SETTINGS)
    try:
        with pytest.raises(AttachError, match="twice"):
            begin()
    finally:
        session._begun.clear()


class World:
    """A world that is only closed."""

    def __init__(self, held: bool) -> None:
        self.held, self.closed = held, 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("held", "mpi", "nodes", "warned"),
    [
        (True, "pmix", "n1 n1", True),
        (True, "pmix", "n1 n2", False),
        (True, "pmi2", "n1 n1", False),
        (False, "pmix", "n1 n1", False),
    ],
)
def test_mpi_that_stays_open_where_that_costs_the_job_is_said(
    held: bool, mpi: str, nodes: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPI ends before training; where the script holds it, Slurm's pmix and ranks that share a node are a danger."""
    world = World(held)
    members = [Member(rank, node, "10.0.0.1", 1) for rank, node in enumerate(nodes.split())]
    session._close(world, replace(SETTINGS, mpi_type=mpi), members)  # type: ignore[arg-type]
    assert world.closed == 1
    assert ("Slurm's pmix ends all others" in capsys.readouterr().err) is warned


class Said(World):
    """A world in which rank 0 has said something."""

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        return [value, b"", b""]


@pytest.mark.parametrize(
    ("there", "launcher", "attempt"),
    [
        ([], "", 2),
        (["claim-r0.json", "m9-r0"], "", 2),
        (["claim-r2.json"], "", 3),
        ([".m9-r6-e1-c0", "claim-r4.json"], "", 7),
        (["claim-r2.json"], "n1:1:ab", 2),
    ],
)
def test_a_launch_that_nobody_has_numbered_gets_a_number_of_its_own(
    tmp_path: Path, there: list[str], launcher: str, attempt: int
) -> None:
    """srun again and again in salloc: each start may save, and none finds the files of another in its way."""
    for name in there:
        (tmp_path / "1" / name).mkdir(parents=True)
    settings = replace(SETTINGS, options=Options(str(tmp_path)), launcher=launcher, attempt=2)
    assert session._count(Said(held=False), settings).attempt == attempt  # type: ignore[arg-type]
