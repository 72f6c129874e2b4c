"""The training objects' state goes into fresh objects bit for bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from jitmpi import codec, device
from jitmpi.buffers import BufferShadow
from jitmpi.errors import AttachError, DamagedError, MismatchError
from jitmpi.events import TensorInfo
from jitmpi.settle import Place, Rest
from jitmpi.torch_state import TrainingState
from jitmpi.vault import Vault


class Net(nn.Module):
    """Tied weights, an unused parameter, batch statistics, a bfloat16 parameter and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.bn = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bn(self.embed(x) + self.table) * self.low * self.scale)


class Strange:
    """An optimizer that does not derive from torch's: nested state, state of its own, one tensor in two places."""

    def __init__(self, params: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "rate": 0.1}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            mine = self.state.setdefault(p, {"past": [], "count": 0, "pair": None})
            mine["past"] = [*mine["past"], p.grad.double()][-2:]
            mine["pair"] = (mine["past"][0], {"again": mine["past"][0]})
            mine["count"] += 1
            p.data -= self.param_groups[0]["rate"] * sum(mine["past"]).to(p.dtype)
        self.state["steps"] = self.state.get("steps", 0) + 1

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


Parts = tuple[nn.Module, Any, Any, Any]
MAKERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "groups": lambda p: torch.optim.RMSprop([{"params": p[:2], "lr": 0.3}, {"params": p[2:]}], lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p) if hasattr(torch.optim, "Adafactor") else torch.optim.Adamax(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    "strange": Strange,
}


def build(name: str = "adamw", schedule: str = "cosine", scaled: bool = False) -> Parts:
    net = Net()
    params = list(net.parameters())
    if name == "lbfgs":
        params = [p for p in params if p.dtype == torch.float32]
    optimizer = MAKERS[name](params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return net, optimizer, None, None
    schedulers: dict[str, Callable[[], Any]] = {
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "steps": lambda: lr_scheduler.MultiStepLR(optimizer, [1, 2, 2, 4]),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False),
        "sequence": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [3],
        ),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) if scaled else None
    return net, optimizer, schedulers[schedule](), scaler


def train(parts: Parts, first: int, count: int) -> list[float]:
    """Train from minibatch `first` on; the third scaled one overflows and is skipped."""
    net, optimizer, scheduler, scaler = parts
    losses = []
    for m in range(first, first + count):
        x = torch.randint(5, (6,), generator=torch.Generator().manual_seed(m))
        optimizer.zero_grad()

        def closure(x: torch.Tensor = x, m: int = m) -> torch.Tensor:
            loss = nn.functional.cross_entropy(net(x), (x + 1) % 5)
            (loss if scaler is None else scaler.scale(loss * (math.inf if m == 2 else 1))).backward()
            losses.append(loss.item())
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.zero_grad()
            optimizer.step(lambda run=closure: (optimizer.zero_grad(), run())[1])
        else:
            loss = closure()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss.item())
            elif scheduler is not None:
                scheduler.step()
    return losses


def snapshot(state: TrainingState) -> tuple[list[TensorInfo], dict[str, bytes], bytes]:
    listed = state.tensors()
    return [info for info, _ in listed], {i.name: device.host_bytes(t) for i, t in listed}, state.scalars()


def check(name: str, schedule: str = "cosine", scaled: bool = False) -> None:
    torch.manual_seed(0)
    parts = build(name, schedule, scaled)
    train(parts, 0, 4)
    infos, raw, scalars = snapshot(TrainingState(*parts))
    torch.manual_seed(77)
    fresh = build(name, schedule, scaled)
    storage = [p.data_ptr() for p in fresh[0].parameters()]
    again = TrainingState(*fresh)
    again.load(lambda info: raw[info.name], infos, scalars)
    assert [p.data_ptr() for p in fresh[0].parameters()] == storage
    assert snapshot(again) == (infos, raw, scalars)
    assert train(fresh, 4, 5) == train(parts, 4, 5)
    assert snapshot(again)[1:] == snapshot(TrainingState(*parts))[1:]


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_goes_on_bit_for_bit(name: str) -> None:
    """For torch's optimizers and one of the user's own: state, and five more minibatches, are the same bits."""
    check(name)


@pytest.mark.parametrize("schedule", ["lambda", "steps", "one cycle", "sequence", "plateau"])
def test_every_scheduler_goes_on(schedule: str) -> None:
    """Schedulers of all kinds go on where they were."""
    check("sgd", schedule)


def test_a_grad_scaler_goes_on() -> None:
    """Scale and growth tracker are exact, with a skipped step behind them."""
    check("adamw", scaled=True)


def test_names_are_those_of_the_plain_model() -> None:
    """Tied weights are in the list once; a parameter outside the model, and a non-persistent buffer, are in it too."""
    net, outside = Net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*net.parameters(), outside], lr=0.1, momentum=0.9)
    outside.grad = torch.ones(2)
    optimizer.step()
    names = [info.name for info, _ in TrainingState(nn.DataParallel(net), optimizer).tensors()]
    assert len(names) == len(set(names))
    assert "model/embed.weight" in names
    assert "model/out.weight" not in names
    assert {"model/table", "extra/optimizer.0.7", "optimizer/optimizer.0.7/momentum_buffer"} <= set(names)


def test_several_optimizers_have_names_of_their_own() -> None:
    """The second optimizer's state is under optimizer1/."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.ModuleDict({"a": a, "b": b})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b)]
    both["b"](both["a"](torch.ones(1, 2))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    names = {info.name for info, _ in TrainingState(both, optimizers).tensors()}
    assert {"optimizer/a.weight/momentum_buffer", "optimizer1/b.weight/momentum_buffer"} <= names


def test_tensors_are_live() -> None:
    """The list holds the parameters themselves, not copies."""
    net = Net()
    listed = {info.name: t for info, t in TrainingState(net).tensors()}
    assert listed["model/scale"].data_ptr() == net.scale.data_ptr()


def test_step_stays_where_it_was() -> None:
    """AdamW's `step` comes back as the float32 CPU tensor that it was, whatever the parameter's dtype."""
    torch.manual_seed(0)
    parts = build()
    train(parts, 0, 1)
    infos, raw, scalars = snapshot(TrainingState(*parts))
    fresh = build()
    TrainingState(*fresh).load(lambda info: raw[info.name], infos, scalars)
    state = fresh[1].state[fresh[0].low]
    assert (state["step"].dtype, state["step"].item()) == (torch.float32, 1.0)
    assert state["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("marked", [False, True])
def test_gradients_are_none_or_not_as_at_the_boundary(marked: bool) -> None:
    """A script that zeroes gradients in place finds zeros after a resume, and None where there was None."""
    parts = build()
    state = TrainingState(*parts)
    train(parts, 0, 1)
    if marked:
        state.mark()
    infos, raw, scalars = snapshot(state)
    fresh = build()
    TrainingState(*fresh).load(lambda info: raw[info.name], infos, scalars)
    assert (fresh[0].scale.grad is not None) == marked
    assert fresh[0].unused.grad is None


def test_another_model_is_refused() -> None:
    """Names, shapes, dtypes, groups, schedulers: the first differences are listed, and nothing is loaded."""
    infos, raw, scalars = snapshot(TrainingState(*build()))
    other = nn.Sequential(nn.Linear(2, 2))
    before = other[0].weight.clone()
    with pytest.raises(MismatchError, match=r"model/0\.weight is missing.*and .* more"):
        TrainingState(other).load(lambda info: raw[info.name], infos, scalars)
    assert torch.equal(other[0].weight, before)
    net = Net()
    net.scale = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(MismatchError, match=r"model/scale is float32\[\] in the checkpoint, float32\[2\] here"):
        TrainingState(net, optimizer).load(lambda info: raw[info.name], infos, scalars)
    net = Net()
    optimizer = torch.optim.AdamW(list(net.parameters())[:2])
    with pytest.raises(MismatchError, match=r"parameter groups differ.*; 1 schedulers in the checkpoint, 0 here"):
        TrainingState(net, optimizer).load(lambda info: raw[info.name], infos, scalars)


def test_what_cannot_be_saved_is_refused_at_the_start() -> None:
    """The path to the value is in the message."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scheduler.hooks = [lambda: None]
    with pytest.raises(AttachError, match=r"scheduler\.hooks\[0\]: a builtins\.function"):
        TrainingState(net, optimizer, scheduler).check()
    with pytest.raises(AttachError, match="no param_groups"):
        TrainingState(net, object())
    net.sparse = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    with pytest.raises(AttachError, match=r"model/sparse: a tensor of layout torch\.sparse_coo"):
        TrainingState(net).check()


def test_hooks_mark_update_and_forward_and_come_out_again() -> None:
    """Before, after and forward are told of each minibatch until detach."""
    parts = build()
    state, log = TrainingState(*parts), []
    state.on_update(lambda: log.append("before"), lambda: log.append("after"))
    state.on_forward(lambda: log.append("forward"))
    train(parts, 0, 1)
    parts[0].eval()
    parts[0](torch.tensor([1]))
    assert log == ["forward", "before", "after"]
    state.detach()
    parts[0].train()
    train(parts, 1, 1)
    assert len(log) == 3


def test_several_models_are_one_state() -> None:
    """A GAN's two, or one and its average; a list, ModuleList or ModuleDict. The first one's mode is the training's."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    for models in ([one, other], nn.ModuleList([one, other])):
        state = TrainingState(models, optimizers)
        assert (state.parts, state.copies) == ([one, other], [])
        assert [info.name for info, _ in state.tensors()][:3] == ["model/0.weight", "model/0.bias", "model/1.weight"]
    average = AveragedModel(one)
    state = TrainingState(nn.ModuleDict({"net": one, "mean": average}), optimizers[0])
    assert state.copies == [average]
    assert "model/mean.module.weight" in {info.name for info, _ in state.tensors()}
    seen: list[int] = []
    state.on_forward(lambda: seen.append(1))
    one(torch.ones(1, 2))
    assert seen
    one.eval()
    assert not state.training
    state.detach()
    assert not one._forward_hooks


@pytest.mark.parametrize("model", [[], ["net"], None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """Said at once, not by an error from within."""
    with pytest.raises(AttachError, match="module"):
        TrainingState(model)


@pytest.mark.parametrize("averaged", [True, False])
def test_an_average_whose_update_was_cut_off_is_said(averaged: bool) -> None:
    """It follows the update in the script; where the script hung there, nobody knows whether it was reached."""
    net = nn.Linear(2, 2)
    state = TrainingState([net, AveragedModel(net)] if averaged else net, torch.optim.SGD(net.parameters(), lr=0.1))
    vault = Vault(state, BufferShadow(state.model, state.copies))
    assert ("averaged" in vault.note(Rest(4, True, True, Place("tail", 3)))) is averaged
    assert vault.note(Rest(4, True, False, Place("between", 4))) == ""


def test_a_scheduler_that_steps_before_the_update_is_said() -> None:
    """S(m) is what it was at the boundary; a step behind it is done again. At an epoch's begin the copy is older."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    state = TrainingState(net, optimizer, scheduler)
    state.mark()
    optimizer.step()
    assert state.doubts(0) == ""
    scheduler.step()
    assert "behind optimizer.step()" in state.doubts(0)
    state.mark()
    assert state.doubts(1) == ""
    state.keep(1)
    scheduler.step()
    assert state.doubts(1) == ""


def test_groups_that_grow_are_said_while_the_run_lives(capsys: pytest.CaptureFixture[str]) -> None:
    """A restarted script has not added them yet when it attaches; the refusal then says what differs."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    state = TrainingState(net, optimizer)
    state.keep(0)
    assert capsys.readouterr().err == ""
    optimizer.add_param_group({"params": list(net[1].parameters())})
    for minibatch in (1, 2):
        state.keep(minibatch)
    assert capsys.readouterr().err.count("groups have changed since attach") == 1
    fresh = TrainingState(net, torch.optim.SGD(net[0].parameters(), lr=0.1))
    raw = {info.name: device.host_bytes(tensor) for info, tensor in state.tensors()}
    with pytest.raises(MismatchError, match=r"saved with \[\[2, 2\]\] parameters, here \[\[2\]\]"):
        fresh.load(lambda info: raw[info.name], [info for info, _ in state.tensors()], state.scalars())


@pytest.mark.parametrize(
    "change",
    [
        {"optimizers": None},
        {"optimizers": [{}]},
        {"schedulers": [["tensor", ["nowhere", "cpu"]]]},
        {"tail": 3, "gradients": ["model/nowhere"]},
        {"gradients": 3},
        {"scaler": ["dict", 3]},
    ],
)
def test_scalars_that_are_none_are_damage(change: dict[str, Any]) -> None:
    """Whoever wrote them: the start goes on with the checkpoint before, or says what is wrong with this one."""
    net, optimizer, scheduler, _ = build()
    state = TrainingState(net, optimizer, scheduler, torch.amp.GradScaler("cpu"))
    infos, raw, scalars = snapshot(state)
    broken = codec.dumps({**codec.loads(scalars), **change})
    with pytest.raises(DamagedError, match="do not make up a state"):
        state.load(lambda info: raw[info.name], infos, broken)
