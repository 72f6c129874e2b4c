"""Train a byte-level language model on the sources of the Python standard library: data-parallel, several processes.

Plain PyTorch but for what jitmpi needs: the import, `attach`, and the two loops of `main` that go through `run`.

    sbatch --jit-ckpt ddp.sbatch                ranks from Slurm, gloo on CPU, nccl on CUDA
    python train.py --minibatches 40            one process, an ordinary loop

Every rank appends the loss of each minibatch, exactly, to <out>/loss-rank<r>.jsonl; rank 0 ends with <out>/final.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import jitmpi

# What the ranks have from Slurm; MASTER_ADDR and MASTER_PORT come from jit-srun.
RANK = int(os.environ.get("SLURM_PROCID", "0"))
WORLD = int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
LOCAL_RANK = int(os.environ.get("SLURM_LOCALID", "0"))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`count` windows spread over the text; each starts at a random place in its own stretch, drawn by the worker."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text, self.context, self.count = text, context, count
        self.stretch = (len(text) - context - 1) // count
        if self.stretch < 1:
            raise SystemExit(f"the text has {len(text)} bytes, too few for {count} windows of {context}: train shorter")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stretch + int(torch.randint(self.stretch, ()))
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        more: Tensor = self.drop(self.mlp(self.norm2(x)))
        return x + more


class ByteModel(nn.Module):
    """A decoder-only transformer over the 256 byte values: (batch, context) bytes -> (batch, context, 256) logits."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.drop(self.bytes(x) + self.places(places)))))
        return logits


def read_text() -> Tensor:
    """Return the standard library's sources, joined in the order of their names, as bytes (uint8)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages", "test"} & set(p.parts))
    joined = b"\n".join(p.read_bytes() for p in sorted(files))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def warmup_cosine(warmup: int, total: int, step: int) -> float:
    """Return the learning rate's factor: linear up over `warmup` minibatches, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def digest(model: nn.Module) -> bytes:
    """Return the SHA-256 of all parameters, raw bytes in the order of their names."""
    total = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        total.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return total.digest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/lm"), help="folder for the losses and final.json")
    parser.add_argument("--minibatches", type=int, default=1000, help="in all; a multiple of --epochs")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--batch", type=int, default=8, help="windows a rank and minibatch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader processes a rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU, a rank")
    parser.add_argument("--report", type=int, default=10, help="minibatches between two progress lines")
    args = parser.parse_args()
    if args.minibatches % args.epochs:
        parser.error(f"--minibatches {args.minibatches} is not a multiple of --epochs {args.epochs}")
    return args


def note(log: TextIO, args: argparse.Namespace, minibatch: int, epoch: int, loss: float) -> None:
    """Append the loss to the rank's file, bit for bit; rank 0 tells people now and then."""
    line = {"minibatch": minibatch, "epoch": epoch, "loss": loss.hex(), "time": time.time()}
    log.write(json.dumps(line) + "\n")
    if RANK == 0 and minibatch % args.report == 0:
        print(f"minibatch {minibatch:5d} of {args.minibatches}  epoch {epoch}  loss {loss:.4f}", flush=True)


def finish(model: nn.Module, args: argparse.Namespace, device: torch.device) -> None:
    """Check that every rank ended with the parameters of rank 0, which writes final.json."""
    mine = digest(model)
    first = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    if WORLD > 1:
        dist.broadcast(first, src=0)
    same = bytes(first.tolist()) == mine
    print(f"rank {RANK}: parameters {mine.hex()[:16]} {'equal' if same else 'DIFFER from'} rank 0's", flush=True)
    if RANK == 0:
        final = {"sha256": mine.hex(), "minibatches": args.minibatches, "world": WORLD}
        (args.out / "final.json").write_text(json.dumps(final) + "\n")
    if WORLD > 1:
        dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


def start_group(device: torch.device) -> None:
    """Join the other ranks."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=RANK, world_size=WORLD, timeout=timedelta(minutes=10))


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model, equal on every rank; leave the rank with random numbers of its own for dropout and windows."""
    torch.manual_seed(args.seed)
    model: nn.Module = ByteModel(args.layers, args.width, args.heads, args.context, args.dropout).to(device)
    if WORLD > 1:
        model = DistributedDataParallel(model, device_ids=[LOCAL_RANK] if device.type == "cuda" else None)
    torch.manual_seed(args.seed + 1 + RANK)
    return model


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if WORLD > 1:
        start_group(device)
    model = build_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    warmup = max(1, args.minibatches // 10)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(warmup, args.minibatches, step))

    steps = args.minibatches // args.epochs
    windows = Windows(read_text(), args.context, steps * args.batch * WORLD)
    sampler: DistributedSampler[Any] = DistributedSampler(windows, num_replicas=WORLD, rank=RANK, seed=args.seed)
    loader = DataLoader(windows, batch_size=args.batch, sampler=sampler, num_workers=args.workers)

    run = jitmpi.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    with open(args.out / f"loss-rank{RANK}.jsonl", "a", buffering=1) as log:
        for epoch in run.epochs(args.epochs):
            sampler.set_epoch(epoch)
            for x, y in run.minibatches(loader):
                logits = model(x.to(device))
                loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
                note(log, args, run.minibatch, epoch, loss.item())
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    finish(model, args, device)


if __name__ == "__main__":
    main()
