"""One rank of the job whose failures are timed: small data-parallel training that notes when each update was done.

    train.py --out DIR --minibatches N

Writes DIR/updates-<rank>.jsonl: {"attempt", "minibatch", "time", "pid"} after every update.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import jitmpi

RANK = int(os.environ["SLURM_PROCID"])
WORLD = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ["SLURM_NTASKS"])
ATTEMPT = int(os.environ.get("JIT_CKPT_ATTEMPT") or 0)
WIDTH = 256
BATCH = 8
PACE = 0.02  # seconds that a minibatch rests: the machine is shared by all ranks and by Slurm


class Numbers(Dataset[torch.Tensor]):
    """Made when asked for: a large data set in memory would make the death of its process slow."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), 1.0 + index % 7)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--minibatches", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(16)]  # a million parameters
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Dropout(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Numbers(args.minibatches * BATCH * WORLD)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, WORLD, RANK)
    loader = DataLoader(data, BATCH, sampler=sampler)
    run = jitmpi.attach(model=model, optimizer=optimizer)
    with open(f"{args.out}/updates-{RANK}.jsonl", "a", buffering=1, encoding="utf-8") as log:
        for _ in run.epochs(1):
            for x in run.minibatches(loader):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                done = {"attempt": ATTEMPT, "minibatch": run.minibatch, "time": time.time(), "pid": os.getpid()}
                log.write(json.dumps(done) + "\n")
                time.sleep(PACE)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
