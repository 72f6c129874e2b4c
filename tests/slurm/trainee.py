"""A small data-parallel job for the fault tests: random everywhere, and failures where a test asks for them.

    trainee.py --out DIR [--inject ACTION:PLACE:RANK:MINIBATCH[:ATTEMPT]]...

ACTION is kill, stop, raise, leave, full or quota (the disk, for save only), stick (the GPU's stream, as behind a
collective that waits for a dead peer) or assert (the GPU fails and answers no more); PLACE is start, data, forward,
backward, update, between, save or restore; RANK is a number or "all". An injection happens once: in the launch with
number ATTEMPT (default 0; "any" for every launch).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import jitmpi

PLACE = ("RANK", "WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
RANK = int(os.environ.get(PLACE[0], "0"))
WORLD = int(os.environ.get(PLACE[1]) or os.environ.get("SLURM_NTASKS") or "1")
ATTEMPT = os.environ.get("JIT_CKPT_ATTEMPT", "0")


@dataclass(frozen=True)
class Injection:
    """One failure to come."""

    action: str
    place: str
    rank: str
    minibatch: int
    attempt: str

    @classmethod
    def parse(cls, text: str) -> Injection:
        action, place, rank, minibatch, *attempt = text.split(":")
        return cls(action, place, rank, int(minibatch), attempt[0] if attempt else "0")

    def due(self, place: str, minibatch: int) -> bool:
        here = self.rank in ("all", str(RANK)) and self.attempt in ("any", ATTEMPT)
        return here and self.place == place and self.minibatch == minibatch

    def happen(self) -> None:
        print(f"trainee: rank {RANK}: {self.action} in {self.place} of {self.minibatch} at {time.time()}", flush=True)
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "raise":
            raise ValueError(f"injected into rank {RANK}")
        elif self.action == "leave":
            sys.exit(7)
        elif self.action == "stick":
            torch.cuda._sleep(1 << 40)  # clock ticks: some ten minutes
        elif self.action == "assert":
            torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")].cpu()


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences with random augmentation: what a worker draws must be the same after a resume."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        self.base = torch.randint(0, 64, (512, 16), generator=torch.Generator().manual_seed(1))
        self.hook = hook

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.hook("data")
        x = self.base[index].clone()
        x[random.randrange(16)] = int(np.random.randint(64))
        x[int(torch.randint(16, (1,)))] = 0
        return x, self.base[index]


class Small(nn.Module):
    """A transformer layer with dropout and a BatchNorm, whose statistics change outside the update."""

    def __init__(self, hook: Callable[[str], None], width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 64)
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embed(x))
        if self.training:
            self.hook("forward")
            h.register_hook(lambda grad: self.hook("backward"))
        return self.out(self.norm(h.transpose(1, 2)).transpose(1, 2))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--inject", action="append", default=[], type=Injection.parse)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds each minibatch rests (outside evaluation)")
    parser.add_argument("--wait", type=int, help="minibatch behind which all wait until there is a file OUT/go")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: all ranks share the first GPU")
    parser.add_argument("--amp", action="store_true", help="half precision with a GradScaler")
    parser.add_argument("--disks", help="for quota: folder with the image of a file system with a quota for each rank")
    parser.add_argument("--slow-save", type=float, default=0.0, help="seconds before each write of a share")
    return parser.parse_args()


def instrument(args: argparse.Namespace) -> None:
    """Let failures happen inside save and restore, where the training script has no line of its own."""
    from jitmpi import save
    from jitmpi.torch_state import TrainingState

    write, load = save.save, TrainingState.load

    def slow_save(plan: Any, **more: Any) -> Any:
        time.sleep(args.slow_save)
        for injection in args.inject:
            if injection.due("save", injection.minibatch):
                injection.happen()
                if injection.action == "full":
                    cover(plan.directory, "-t", "tmpfs", "-o", "size=16k,mode=700", "full")
                if injection.action == "quota":
                    cover(plan.directory, "-o", "loop", f"{args.disks}/{RANK}")
        return write(plan, **more)

    def failing_load(self: TrainingState, *rest: Any) -> None:
        for injection in args.inject:
            if injection.due("restore", injection.minibatch):
                injection.happen()
        load(self, *rest)

    save.save = slow_save
    TrainingState.load = failing_load  # type: ignore[method-assign]


def cover(folder: str, *disk: str) -> None:
    """Let this node see a disk without space where the state goes (root; each node has its own mounts)."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.ismount(folder):
        subprocess.run(["mount", *disk, folder], check=True)


def main() -> None:
    args = options()
    os.makedirs(args.out, exist_ok=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD))
    for injection in args.inject:
        if injection.due("start", 0):
            injection.happen()
    if args.device == "cuda":
        torch.use_deterministic_algorithms(True)
    if WORLD > 1:
        dist.init_process_group("gloo")
    instrument(args)
    run: Any = None

    def hook(place: str) -> None:
        minibatch = run.minibatch if run is not None else -1
        for injection in args.inject:
            if injection.due(place, minibatch):
                injection.happen()

    torch.manual_seed(10 + RANK)
    random.seed(20 + RANK)
    np.random.seed(30 + RANK)
    model = Small(hook, args.width).to(args.device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    data = Noisy(hook if args.workers == 0 else lambda place: None)
    sampler: Any = DistributedSampler(data, WORLD, RANK, seed=3) if WORLD > 1 else None
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)

    scaler = torch.amp.GradScaler(args.device, growth_interval=10) if args.amp else None
    run = jitmpi.attach(model=wrapped, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    optimizer.register_step_pre_hook(lambda *_: hook("update"))
    log = open(f"{args.out}/loss-{RANK}.jsonl", "a", buffering=1)  # noqa: SIM115 - one line a minibatch until the end
    for epoch in run.epochs(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in run.minibatches(loader):
            x, y = x.to(args.device), y.to(args.device)
            with torch.autocast(args.device, torch.float16, enabled=args.amp):
                loss = nn.functional.cross_entropy(wrapped(x).flatten(0, 1), y.flatten())
            row = {"minibatch": run.minibatch, "loss": loss.item().hex(), "attempt": ATTEMPT, "time": time.time()}
            log.write(json.dumps(row) + "\n")
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
            run.state["seen"] = run.state.get("seen", 0) + len(x)
            time.sleep(args.pause)
            while run.minibatch == args.wait and not os.path.exists(f"{args.out}/go"):
                time.sleep(0.05)
            hook("between")
    finish(args, model, run)


def finish(args: argparse.Namespace, model: nn.Module, run: Any) -> None:
    """Write what the run ended with."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    random_end = [random.random(), float(np.random.rand()), float(torch.rand(1, device=args.device))]
    result = {"sha256": digest.hexdigest(), "minibatch": run.minibatch, "seen": run.state["seen"], "random": random_end}
    with open(f"{args.out}/final-{RANK}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
