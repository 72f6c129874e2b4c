"""One rank whose hot path is measured; writes what it found to DIR/<rank>.json.

    loop.py spans DIR --width W --minibatches N     a training loop; the spans that jitmpi adds are timed in its thread
    loop.py tiny DIR --minibatches N                a loop that computes next to nothing, with and without protection

Rule: the code measured is the installed one, reached as by a training script; only the entry points are wrapped.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import jitmpi
from jitmpi.control import ControlPlane
from jitmpi.run import Run

RANK = int(os.environ["SLURM_PROCID"])
WORLD = int(os.environ["SLURM_NTASKS"])
LAYERS = 16
BATCH = 8
WARM = 20  # minibatches that are not counted: the first ones rebuild DDP's buckets and fill caches
LOOKED = 10  # minibatches after the timed ones in which the operations on tensors are looked at
BLOCK = 200  # minibatches of one block of the tiny loop: long enough for the clocks, short enough to take turns
ENTRIES = ("_boundary", "before_update", "after_update", "after_forward")


class Watch:
    """Adds up, for each minibatch, the time spent in the entry points of `Run`, and its CPU time there."""

    def __init__(self) -> None:
        self.spans: list[float] = []
        self.cpu: list[float] = []
        self.look: Touched | None = None
        self._now = self._cpu = 0.0

    def install(self) -> None:
        """Wrap the entry points; before `attach` hands them to the hooks."""
        for name in ENTRIES:
            setattr(Run, name, self._timed(getattr(Run, name), begins=name == "_boundary"))

    def _timed(self, inner: Callable[..., None], *, begins: bool) -> Callable[..., None]:
        def outer(*args: Any, **kwargs: Any) -> None:
            if begins:
                self.spans.append(self._now)
                self.cpu.append(self._cpu)
                self._now = self._cpu = 0.0
            if self.look is not None:
                with self.look:
                    inner(*args, **kwargs)
                return
            # The CPU clock is read outside the span: that is a system call, at whose end the kernel takes the processor
            # from a thread that has had its share, as computing threads have where there are more of them than cores.
            cpu = time.thread_time()
            begin = time.perf_counter()
            inner(*args, **kwargs)
            self._now += time.perf_counter() - begin
            self._cpu += time.thread_time() - cpu

        return outer


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of given tensors that any torch operation inside the spans is handed: a copy needs to be."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.operations = 0
        self._storages = {t.untyped_storage().data_ptr() for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._storages:
                self.nbytes += leaf.nbytes
        return func(*args, **(kwargs or {}))


class Agent:
    """CPU time of the agent's thread, and the size of what it is given to hand over."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        offer = ControlPlane.offer

        def sized(plane: ControlPlane, ranks: Any, kind: Any, parts: Any) -> bool:
            self.sizes.append(sum(map(len, parts)))
            return offer(plane, ranks, kind, parts)

        setattr(ControlPlane, "offer", sized)  # noqa: B010

    def cpu(self) -> float:
        """Return the seconds that the thread has computed so far; 0 without one."""
        for thread in threading.enumerate():
            if thread.name == "jit-ckpt" and thread.ident is not None:
                return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return 0.0


def main() -> None:
    """Measure one kind of loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("spans", "tiny"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--minibatches", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if WORLD > 1:
        dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    found = spans(args.width, args.minibatches) if args.kind == "spans" else tiny(args.minibatches)
    (args.out / f"{RANK}.json").write_text(json.dumps(found))
    if WORLD > 1:
        dist.destroy_process_group()


def spans(width: int, minibatches: int) -> dict[str, Any]:
    """Train a model without buffers and time what is added to each minibatch."""
    watch, agent = Watch(), Agent()
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)), nn.Dropout(0.1))
    model = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    count = WARM + minibatches + LOOKED
    loader = DataLoader(TensorDataset(torch.randn(count * BATCH, width)), BATCH, shuffle=True)
    watch.install()
    run = jitmpi.attach(model=model, optimizer=optimizer)
    cpu = timed_cpu = handed = 0.0
    for _ in run.epochs(1):
        for (x,) in run.minibatches(loader):
            if run.minibatch == WARM:
                cpu, handed = agent.cpu(), len(agent.sizes)
            elif run.minibatch == WARM + minibatches:
                timed_cpu, handed = agent.cpu() - cpu, sum(agent.sizes[int(handed) :])
                watch.look = Touched(_tensors(model, optimizer))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert watch.look is not None
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "spans": watch.spans[WARM + 1 : WARM + minibatches],
        "cpu": watch.cpu[WARM + 1 : WARM + minibatches],
        "agent_cpu": timed_cpu / minibatches,
        "handed_over": handed / minibatches,
        "copied": watch.look.nbytes / LOOKED,
    }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *states]


def tiny(minibatches: int) -> dict[str, Any]:
    """Take turns between a plain loop and a protected one; seconds a minibatch of wall clock and of CPU."""
    twins = [nn.Linear(16, 16) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in twins]
    data = TensorDataset(torch.randn(BLOCK, 16))
    run = jitmpi.attach(model=twins[1], optimizer=optimizers[1])
    found: dict[str, list[float]] = {"plain": [], "protected": [], "plain_cpu": [], "protected_cpu": []}
    turns = max(1, minibatches // BLOCK)
    for turn in run.epochs(turns + 1):  # the first one warms up
        for name in ("plain", "protected") if turn % 2 else ("protected", "plain"):
            loader = DataLoader(data, 1)
            batches: Iterator[Any] = iter(loader) if name == "plain" else run.minibatches(loader)
            which = int(name == "protected")
            wall, cpu = _block(batches, twins[which], optimizers[which])
            if turn:
                found[name].append(wall)
                found[f"{name}_cpu"].append(cpu)
    return found


def _block(batches: Iterator[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    if WORLD > 1:
        dist.barrier()  # all ranks measure the same kind at a time: a rank also works for its peers
    wall, cpu = time.perf_counter(), time.process_time()
    for (x,) in batches:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return (time.perf_counter() - wall) / BLOCK, (time.process_time() - cpu) / BLOCK


if __name__ == "__main__":
    main()
