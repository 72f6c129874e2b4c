"""One rank on a GPU that trains two twins in turns, one of them protected; writes what it found to DIR/0.json.

    gpu.py DIR --width W --layers L

Rule: a block of minibatches is timed to the end of its last kernel; how far Python runs ahead inside it is left as in
a real loop, for that is what the fence before the update changes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jitmpi
from jitmpi.device import HostReader

BLOCK = 20  # minibatches
TURNS = 15  # of one block of each twin; the first one warms up
BATCH, LENGTH = 16, 256
COPIES = 5  # of the state to the host


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    twins = [_model(args.width, args.layers) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in twins]
    data = TensorDataset(torch.randn(BLOCK * BATCH, LENGTH, args.width, pin_memory=False))
    run = jitmpi.attach(model=twins[1], optimizer=optimizers[1])
    found: dict[str, Any] = {"plain": [], "protected": []}
    for turn in run.epochs(TURNS):
        for name in ("plain", "protected") if turn % 2 else ("protected", "plain"):
            loader = DataLoader(data, BATCH)
            which = int(name == "protected")
            batches: Iterator[Any] = run.minibatches(loader) if which else iter(loader)
            wall = _block(batches, twins[which], optimizers[which])
            if turn:
                found[name].append(wall)
    found["parameters"] = sum(p.numel() for p in twins[0].parameters())
    found["read"], found["plain_copy"] = _copies(twins[0])
    (args.out / "0.json").write_text(json.dumps(found))


def _model(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()


def _block(batches: Iterator[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for (x,) in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x.cuda(non_blocking=True)).float().square().mean()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / BLOCK


def _copies(model: nn.Module) -> tuple[list[float], list[float]]:
    """Return bytes a second of the parameters leaving through our reader, and by one plain copy to pinned memory."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    reader, pinned = HostReader(), torch.empty_like(flat, device="cpu", pin_memory=True)
    reader.prepare(flat.device)
    ours, plain = [], []
    for _ in range(COPIES):
        begin = time.perf_counter()
        for _ in reader.chunks(flat, 0, flat.shape[0]):
            pass
        ours.append(flat.nbytes / (time.perf_counter() - begin))
        begin = time.perf_counter()
        pinned.copy_(flat)
        plain.append(flat.nbytes / (time.perf_counter() - begin))
    return ours, plain


if __name__ == "__main__":
    main()
