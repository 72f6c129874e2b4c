"""session: attach is called once, in the main thread. (That it works is shown on the cluster.)"""

from __future__ import annotations

import threading

import pytest
import torch

from jitmpi import session
from jitmpi.config import Settings
from jitmpi.errors import AttachError
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


def test_a_second_attach_is_refused() -> None:
    """Two agents in one process would save two halves."""
    session._begun.append(SETTINGS)
    try:
        with pytest.raises(AttachError, match="twice"):
            begin()
    finally:
        session._begun.clear()
