"""README.md, section "Use it": its loop trains, its sbatch line submits, its commands answer, as they stand there."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from testbed import Cluster

ROOT = Path(__file__).resolve().parents[2]
USE_IT = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it")[2].partition("\n## ")[0]
PATIENCE = 150.0  # seconds for a job that fails once and goes on

# What stands around the README's loop in a plain data-parallel script, and in the place of its dots.
AROUND = """\
import os, signal, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

assert sys.argv[1:] == ["--epochs", "10"], sys.argv
rank = int(os.environ["SLURM_PROCID"])
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)

{loop}

print("rank", rank, "has done", run.minibatch, flush=True)
"""
BODY = """\
loss = torch.nn.functional.mse_loss(model(x), y)
if rank == 1 and run.minibatch == 5 and os.environ["JIT_CKPT_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
optimizer.zero_grad()
loss.backward()
optimizer.step()
scheduler.step()"""


def code_blocks(text: str) -> list[str]:
    """The indented blocks of a text, without their indentation."""
    return [
        textwrap.dedent(block).strip("\n") for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    ]


def script() -> str:
    """The README's loop, made whole."""
    (loop,) = (block for block in code_blocks(USE_IT) if "jitmpi.attach" in block)
    dots = re.search(r"^( +)\.\.\. .*$", loop, re.MULTILINE)
    assert dots, loop
    return AROUND.format(loop=loop.replace(dots.group(), textwrap.indent(BODY, dots.group(1))))


@pytest.fixture
def folder(out: Path) -> Path:
    """A user's folder: train.py, and the template next to it."""
    out.mkdir()
    (out / "train.py").write_text(script(), encoding="utf-8")
    shutil.copy(ROOT / "sbatch_templates" / "ddp.sbatch", out)
    return out


def test_as_a_user_types_it(cluster: Cluster, folder: Path) -> None:
    """The job of the README's sbatch line survives the death of a rank, and the README's commands tell of it."""
    (line,) = (block for block in code_blocks(USE_IT) if block.startswith("sbatch"))
    command = line.replace("/scratch/me", str(folder)).split()
    said = cluster.on("head", *command, cwd=str(folder)).stdout
    job = said.split()[-1]
    cluster.wait_state(job, "COMPLETED", PATIENCE)
    log = (folder / f"slurm-{job}.out").read_text(encoding="utf-8")
    assert "jit-srun: relaunch: " in log
    assert sorted(re.findall(r"^rank (\d) has done 80$", log, re.MULTILINE)) == ["0", "1", "2", "3"]
    checkpoints = folder / "ckpt" / job
    named = re.findall(r"`(jit-ckpt [^`]+)`", USE_IT)
    assert {"jit-ckpt ls DIR", "jit-ckpt show DIR", "jit-ckpt verify DIR"} <= set(named)
    for words in named:
        asked = words.replace("DIR", str(checkpoints)).split()
        shown = cluster.on("head", *asked, cwd=str(checkpoints)).stdout
        assert "m5-r0" in shown or words == "jit-ckpt config", (words, shown)
