"""Three real gloo processes: a run taken up at minibatch k, in new objects or new processes, has the bits of one that
was never left.

The file is also the program that the ranks run: test_replay.py RANK FOLDER PART.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from jitmpi import codec, device, loader, random_state
from jitmpi.buffers import BufferShadow
from jitmpi.events import TensorInfo
from jitmpi.replay import rehearse_once, rehearse_parts
from jitmpi.torch_state import TrainingState

WORLD, WIDTH, MINIBATCHES = 3, 32, 8  # with two ranks a + b has only one order
LIMIT = 240  # seconds for one part


@dataclass(frozen=True)
class Case:
    """One kind of training run, and the minibatches at which it is taken up."""

    name: str
    resumed: tuple[int, ...]
    workers: int = 0
    micro: int = 1  # micro-batches, all but the last under no_sync
    scaled: bool = False
    norm: bool = False
    autocast: bool = False
    averaged: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("plain", (0, 1, 4, 7)),
    Case("workers, batch norm, accumulation", (1, 3, 4), workers=2, micro=2, norm=True),
    Case("scaler with skipped steps", (3, 5), scaled=True),
    Case("averaged copy, batch norm", (1, 5), norm=True, averaged=True),
    Case("static graph, views", (1, 2), ddp={"static_graph": True, "gradient_as_bucket_view": True}),
    Case(
        "unused parameters, autocast, batch norm", (5,), norm=True, autocast=True, ddp={"find_unused_parameters": True}
    ),
]


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tokens with random augmentation from every stream."""

    def __len__(self) -> int:
        return 36  # six batches a rank and epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = torch.randint(20, (8,), generator=torch.Generator().manual_seed(index))
        shift = random.randrange(5) + int(torch.randint(5, ())) + int(np.random.randint(5))
        return (line + shift) % 20, line


class Model(nn.Module):
    """A small transformer with dropout; with batch statistics if asked."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.out = nn.Linear(WIDTH, 20)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.layer(self.embed(x))
        return {"parts": [self.out(self.norm(hidden.transpose(1, 2)).transpose(1, 2))]}


@dataclass
class Snapshot:
    """S(m) as a survivor and this rank's context would give it."""

    infos: list[TensorInfo]
    raw: dict[str, bytes]
    scalars: bytes
    context: dict[str, bytes]
    start: dict[str, bytes]
    epoch: int
    index: int


class Training:
    """One process's training objects, made anew like after a restart."""

    def __init__(self, case: Case, rank: int) -> None:
        torch.manual_seed(5)
        self.case = case
        self.model = DistributedDataParallel(Model(case.norm), bucket_cap_mb=0.01, **case.ddp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=MINIBATCHES + 1)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=case.scaled)
        self.average = AveragedModel(self.model.module, use_buffers=True)
        models = [self.model, self.average] if case.averaged else self.model
        self.state = TrainingState(models, self.optimizer, self.scheduler, self.scaler)
        self.shadow = BufferShadow(self.state.model, self.state.copies)
        data = Text()
        self.sampler = DistributedSampler(data, WORLD, rank)
        self.loader = DataLoader(data, 2, sampler=self.sampler, drop_last=True, num_workers=case.workers)
        random_state.seed(1000 + rank)
        self.losses: list[float] = []
        self.boundaries: dict[int, Snapshot] = {}

    def run(self, m: int = 0, snapshot: Snapshot | None = None, *, rehearse: bool = True) -> None:
        """Train up to the last minibatch, from a snapshot if there is one."""
        if snapshot is not None:
            random_state.seed(4)
            self.state.load(lambda info: snapshot.raw[info.name], snapshot.infos, snapshot.scalars)
            self.shadow.restore(snapshot.context)
            if rehearse:
                rehearse_parts(self.state.parts, m)
        epoch = snapshot.epoch if snapshot else 0
        while m < MINIBATCHES:
            self.sampler.set_epoch(epoch)
            feed = self._open(snapshot)
            snapshot = None
            m = self._epoch(feed, m, epoch)
            epoch += 1

    def _open(self, snapshot: Snapshot | None) -> loader.Feed:
        if snapshot is None:
            return loader.open_feed(self.loader)
        feed = loader.open_feed(self.loader, skip=snapshot.index, start=snapshot.start)
        random_state.restore(snapshot.context)
        return feed

    def _epoch(self, feed: loader.Feed, m: int, epoch: int) -> int:
        while m < MINIBATCHES and feed.index < len(feed):
            self._boundary(m, feed, epoch)
            for micro in range(self.case.micro):
                self._micro(m, *next(feed), last=micro == self.case.micro - 1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.average.update_parameters(self.model.module)
            self.optimizer.zero_grad()
            self.scheduler.step()
            m += 1
        return m

    def _micro(self, m: int, x: torch.Tensor, y: torch.Tensor, *, last: bool) -> None:
        overflow = math.inf if self.case.scaled and m in (2, 3) else 1.0
        with nullcontext() if last else self.model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
                (output,) = self.model(x)["parts"]
            loss = nn.functional.cross_entropy(output.float().flatten(0, 1), y.flatten())
            self.scaler.scale(loss * overflow).backward()
        self.losses.append(loss.item())

    def _boundary(self, m: int, feed: loader.Feed, epoch: int) -> None:
        self.shadow.capture()
        self.state.mark()
        listed = self.state.tensors()
        self.boundaries[m] = Snapshot(
            [info for info, _ in listed],
            {info.name: device.host_bytes(tensor) for info, tensor in listed},
            self.state.scalars(),
            {**random_state.capture(), **self.shadow.pieces()},
            dict(feed.start),
            epoch,
            feed.index,
        )

    def digest(self) -> str:
        """Hash parameters, buffers, optimizer, scaler, and the random states."""
        parts = [device.host_bytes(tensor) for _, tensor in self.state.tensors()] + list(
            random_state.capture().values()
        )
        return hashlib.sha256(b"".join(parts)).hexdigest()


def compare(case: Case, rank: int) -> Iterator[tuple[str, bool]]:
    """Yield (what, equal) for an undisturbed run and each place where it is taken up."""
    whole = Training(case, rank)
    whole.run()
    for k in case.resumed:
        again = Training(case, rank)
        again.run(k, whole.boundaries[k])
        same = again.losses == whole.losses[k * case.micro :]
        yield f"{case.name}, {k}", same and again.digest() == whole.digest()


def save(case: Case, rank: int, folder: Path) -> None:
    """Leave an undisturbed run's states to other processes."""
    whole = Training(case, rank)
    whole.run()
    snapshots = {
        k: {**asdict(whole.boundaries[k]), "infos": [asdict(i) for i in whole.boundaries[k].infos]} for k in (2, 6)
    }
    (folder / f"state{rank}").write_bytes(codec.dumps([snapshots, whole.losses, whole.digest()]))


def load(case: Case, rank: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield (what, equal) for runs taken up in a new process; without the rehearsal it must show."""
    snapshots, losses, digest = codec.loads((folder / f"state{rank}").read_bytes())
    for k, rehearse in ((2, True), (6, True), (2, False)):
        values = snapshots[k]
        values["infos"] = [info if isinstance(info, TensorInfo) else TensorInfo(**info) for info in values["infos"]]
        again = Training(case, rank)
        again.run(k, Snapshot(**values), rehearse=rehearse)
        yield f"{k}, rehearsed {rehearse}", (again.losses == losses[k:] and again.digest() == digest) == rehearse


def main(rank: int, folder: Path, part: str) -> None:
    """Be one rank of one part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{part}.rendezvous", rank=rank, world_size=WORLD)
    found: list[tuple[str, bool]] = []
    if part == "load":
        found += load(CASES[0], rank, folder)
    else:
        save(CASES[0], rank, folder)
        for case in CASES:
            found += compare(case, rank)
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{part}{rank}").write_bytes(codec.dumps(found))


def launch(folder: Path, part: str) -> list[list[tuple[str, bool]]]:
    """Run one part on all ranks and return what each found."""
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    ranks = [
        subprocess.Popen([*command, str(r), str(folder), part], env=environ, stderr=subprocess.PIPE, text=True)
        for r in range(WORLD)
    ]
    try:
        errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(errors)
    return [codec.loads((folder / f"{part}{rank}").read_bytes()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[str, bool]]]]:
    """The folder in which the first processes left a run's states, and what they found themselves."""
    folder = tmp_path_factory.mktemp("replay")
    return folder, launch(folder, "first")


Found = tuple[Path, list[list[tuple[str, bool]]]]


def test_every_kind_of_run_is_taken_up_bit_for_bit(first: Found) -> None:
    """Dropout, schedule, augmentation in workers, accumulation under no_sync, skipped steps, batch norm, DDP modes."""
    for found in first[1]:
        assert len(found) == sum(len(case.resumed) for case in CASES)
        assert [what for what, equal in found if not equal] == []


def test_new_processes_take_it_up_bit_for_bit(first: Found) -> None:
    """The state goes through files into new processes; and without the rehearsal the bits would differ."""
    for found in launch(first[0], "load"):
        assert [what for what, equal in found if not equal] == []


def test_without_ddp_there_is_nothing_to_rehearse() -> None:
    """A plain module gets no hook."""
    model = nn.Linear(2, 2)
    rehearsal = rehearse_once(model)
    assert rehearsal.done
    assert rehearsal.note == "no DistributedDataParallel"
    assert rehearse_once(model, 0).done
    assert not model._forward_pre_hooks


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_rehearsal_leaves_no_trace() -> None:
    """Gradients, buffers, random states, inputs and their graph are as they were; evaluations are not rehearsed."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model = DistributedDataParallel(inner)
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    plain.load_state_dict(model.state_dict())
    rehearsal = rehearse_once(model)
    model.eval()(torch.ones(2, 3))
    model.train()
    assert not rehearsal.done
    seen = []
    for one in (model, plain):
        torch.manual_seed(3)
        source = torch.ones(4, 3, requires_grad=True)
        one.module[0].bias.grad = torch.full((3,), 2.0)
        with one.no_sync():
            one(torch.exp(source)).sum().backward()
            assert not one.require_backward_grad_sync
        tensors = [source.grad, *(p.grad for p in one.parameters()), *one.buffers(), torch.rand(2)]
        seen.append([t.tolist() for t in tensors])
    assert rehearsal.done
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("alone")
def test_parameters_that_update_in_backward_are_not_rehearsed() -> None:
    """A rehearsal that would run an optimizer is left out, and the note names the parameter."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.module.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert rehearse_once(model).note.startswith("weight has a hook")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
