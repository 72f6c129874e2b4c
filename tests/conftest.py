"""Skip what this machine cannot run, and say why; let no example of Hypothesis fail for its time."""

from __future__ import annotations

import pytest

from testbed import machine

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # few tests need it
    pass
else:
    # A busy machine stops any example for seconds: a time says nothing of the code.
    settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


def _no_gpu() -> str:
    import torch  # here, because most runs need none of it

    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `slurm` without root or Slurm, and tests marked `gpu` without CUDA."""
    for mark, missing in (("slurm", machine.missing), ("gpu", _no_gpu)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else ""
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))
