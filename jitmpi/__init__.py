"""Just-in-time checkpoints for data-parallel training under Slurm.

    import jitmpi
    run = jitmpi.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(10):
        for x, y in run.minibatches(loader):
            ...

Importing this package starts no MPI and imports no torch; `attach` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitmpi.run import Run

__all__ = ["attach"]
__version__ = "0.1.0"


def attach(**objects: Any) -> Run:
    """Protect a training run; see `jitmpi.session.attach` for the arguments."""
    from jitmpi import session

    return session.attach(**objects)
