"""Turn the training objects into one list of named tensors and one text of everything else, and back, bit for bit.

    tensors()  "model/<name>", "extra/...", "optimizer/<param>/<key>", "scheduler/...", "scaler/..."   live, no copies
    scalars()  hyper-parameters, non-tensor state, and the skeleton that the tensors hang in

Rule 1: nothing here runs per minibatch but `mark`; all else is read live when a fault needs it.
Rule 2: the list has the same order on every replica; a tensor that is reachable twice is in it once.
Rule 3: loading fills tensors in place where they exist, so views, DDP buckets and compiled graphs stay valid; no dtype
is ever cast.

All buffers are in the list, persistent or not: whether a non-persistent one changes cannot be known for certain, and
replicas that guess differently could not share the writing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from jitmpi import buffers, codec, device
from jitmpi.errors import AttachError, DamagedError, MismatchError
from jitmpi.events import BUFFERS_BY, TensorInfo
from jitmpi.skeleton import Tensors, plant, strip
from jitmpi.updates import Tail, Updates

Raw = bytes | bytearray | memoryview
GROWN = (
    "an optimizer's groups have changed since attach; a restarted script must make them so before attach, or it will "
    "be refused: give it all parameters at once, and set requires_grad or lr when they are to be trained"
)
LOOKS = 8  # parameters whose gradient is looked at per boundary: under a microsecond


class TrainingState:
    """What the replicas of one shard hold identically.

    Attributes:
        model: as the user gave it, wrapped or not; several are one ModuleList.
        parts: the modules that the script calls, the first one is what is trained, or one of several that are.
        copies: those of the others that no optimizer updates, such as an average of the first.
        optimizers: those that update it.
        updates_in_evaluation: seen to be updated in evaluation mode, as to freeze BatchNorm: the mode tells nothing.
        updates: whether there is anything that updates the model.
    """

    def __init__(self, model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None) -> None:
        """Look at the objects; whether they can be saved is for `check` to say.

        Raises:
            AttachError: an optimizer that is none.
        """
        self.parts = _parts(model)
        self.model: nn.Module = nn.ModuleList(self.parts) if isinstance(model, (list, tuple)) else model
        self._module = buffers.unwrapped(self.model)
        self._trained_part = buffers.unwrapped(self.parts[0])
        self.optimizers, self._schedulers = _several(optimizer), _several(scheduler)
        self._scaler = scaler if scaler is None or _enabled(scaler) else None
        for number, one in enumerate(self.optimizers):
            if not hasattr(one, "param_groups") or not hasattr(one, "state"):
                raise AttachError(f"optimizer {number} is a {type(one).__name__}: it has no param_groups and state")
        updated = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        self.copies = [p for p in self.parts[1:] if not any(id(t) in updated for t in p.parameters())]
        self._tail = Tail(self._schedulers)
        self._updates = Updates(self.optimizers, self._scaler)
        self.updates_in_evaluation = False
        self._forward: list[Any] = []
        self._had_gradients = False
        self._first: tuple[int, bytes] | None = None  # a minibatch and its scalars at its first boundary
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._probe = 0
        self._attached, self._grown = self._groups(), False

    def check(self) -> None:
        """Refuse early what could not be saved later, and make ready for the saving of small values.

        Raises:
            AttachError: names the value that cannot be saved.
        """
        device.prepare(tensor for _, tensor in self.tensors())
        self.scalars()

    @property
    def updates(self) -> bool:
        """Whether there is an optimizer."""
        return bool(self.optimizers)

    @property
    def training(self) -> bool:
        """Whether the model is trained, and not evaluated just now, as far as its mode tells."""
        return self._trained_part.training or self.updates_in_evaluation

    def buffer_source(self) -> dict[str, bytes]:
        """Return the piece that names the rank whose buffers DDP gives to all at the next forward pass, if it does."""
        wrapper = next((m for m in self.model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)
        return {BUFFERS_BY: b"0"} if wrapper is not None and wrapper.broadcast_buffers else {}

    @property
    def fewest_updates(self) -> int:
        """How many updates make a minibatch: one for each optimizer, or the one of the GradScaler."""
        return 1 if self._scaler is not None else max(1, len(self.optimizers))

    def tensors(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        """Return every tensor of the state in canonical order: live, not copied.

        Raises:
            AttachError: a tensor whose values are not its bytes (sparse, sharded).
        """
        named = self._parameters()
        listed = [(name, tensor) for tensor, name in named.values()]
        self._trees(named, found := Tensors())
        listed += found.items()
        return [(_info(name, tensor), tensor) for name, tensor in listed]

    def scalars(self) -> bytes:
        """Return everything that is not a tensor, as text.

        Raises:
            AttachError: a value that has no text; names the path to it.
        """
        named = self._parameters()
        values: dict[str, Any] = self._trees(named, Tensors())
        values["tail"] = self._tail.pattern
        live = self._had_gradients
        values["gradients"] = [name for t, name in named.values() if live and t.grad is not None] if live else []
        return codec.dumps(values)

    def keep(self, minibatch: int) -> None:
        """Copy the scalars where a feed begins or ends: a script steps schedulers between two epochs.

        Only the first call for a minibatch counts.
        """
        if self._groups() != self._attached and not self._grown:
            self._grown = True
            sys.stderr.write(f"jit-ckpt: {GROWN}\n")
        if self._first is None or self._first[0] != minibatch:
            with suppress(AttachError):  # a fault will say so; until then the run goes on
                self._first = (minibatch, self.scalars())

    def scalars_of(self, minibatch: int) -> bytes:
        """Return the scalars of S(minibatch), the state at hand.

        Raises:
            AttachError: as for `scalars`.
        """
        first = self._first
        return first[1] if first is not None and first[0] == minibatch else self.scalars()

    def doubts(self, minibatch: int) -> str:
        """Say what of S(minibatch) has changed before its update, "" for nothing: it cannot be taken back."""
        if self._tail.ahead and (self._first is None or self._first[0] != minibatch):
            return "a scheduler had stepped before the update and does so once more; step it behind optimizer.step()"
        return ""

    def load(self, read: Callable[[TensorInfo], Raw], infos: Sequence[TensorInfo], scalars: bytes) -> None:
        """Put a saved state into the objects.

        Args:
            read: gives a tensor's raw bytes (C order); called once for each of `infos`, in their order.

        Raises:
            MismatchError: it is the state of another model or optimizer; names the first differences.
            DamagedError: `scalars` cannot be read, or is no such text.
        """
        try:
            self._load(read, infos, codec.loads(scalars))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DamagedError(f"the saved values do not make up a state of these objects ({what})") from error

    def _load(self, read: Callable[[TensorInfo], Raw], infos: Sequence[TensorInfo], values: Any) -> None:
        named = {name: tensor for tensor, name in self._parameters().values()}
        self._compare(named, infos, values)
        existing = dict(self._existing())
        loaded: dict[str, torch.Tensor] = {}
        for info in infos:
            target = named.get(info.name)
            if target is None:
                target = _target(existing.get(info.name), info)
            device.fill(target, read(info))
            loaded[info.name] = target
        self._plant(values, loaded, named)
        self._tail.pattern = values["tail"]
        for name in values["gradients"]:
            named[name].grad = torch.zeros_like(
                named[name]
            )  # not None: whoever skips parameters without gradient sees it

    def on_update(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` and `after` around every update; see `Updates`."""
        self._updates.install(before, after)

    def on_forward(self, after: Callable[[], None]) -> None:
        """Call `after` at the end of every forward pass of the model in training."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                after()

        self._forward = [part.register_forward_hook(hook) for part in self.parts]

    def detach(self) -> None:
        """Take all hooks out again."""
        self._updates.remove()
        while self._forward:
            self._forward.pop().remove()

    def mark(self) -> None:
        """Note a boundary: how often the schedulers have stepped, and whether gradients are None (about 1 us)."""
        if self._schedulers:
            self._tail.mark()
        trained = self._trained
        self._had_gradients = bool(trained) and (trained[self._probe].grad is not None or self._any_gradient())

    def complete_tail(self) -> str:
        """Step the schedulers as often as every minibatch does, for a thread that was stopped before it could.

        Returns a line for people where that is not known, "" otherwise.
        """
        return self._tail.complete()

    def _groups(self) -> list[list[int]]:
        """Return how many parameters are in each group of each optimizer."""
        return [[len(group["params"]) for group in one.param_groups] for one in self.optimizers]

    def _any_gradient(self) -> bool:
        """Look for a gradient at a few parameters, the next time at others if there was none."""
        count = len(self._trained)
        for _ in range(min(LOOKS, count)):
            if self._trained[self._probe].grad is not None:
                return True
            self._probe = (self._probe + 1) % count
        return False

    def _parameters(self) -> dict[int, tuple[torch.Tensor, str]]:
        """Return id -> (tensor, name) of the model's parameters and buffers, and of what else the optimizers update."""
        named: dict[int, tuple[torch.Tensor, str]] = {}
        clean = buffers.names(self._module)
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            named.setdefault(id(tensor), (tensor, f"model/{clean(name)}"))
        for number, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for p, tensor in enumerate(group["params"]):
                    named.setdefault(id(tensor), (tensor, f"extra/{_numbered('optimizer', number)}.{g}.{p}"))
        return named

    def _trees(self, named: Mapping[int, tuple[torch.Tensor, str]], found: Tensors) -> dict[str, Any]:
        """Strip the tensors off all that is not the model; what stays is the skeleton."""
        names = {key: name for key, (_, name) in named.items()}
        found.known = names
        trees: dict[str, Any] = {"optimizers": [], "schedulers": []}
        for number, optimizer in enumerate(self.optimizers):
            trees["optimizers"].append(_strip_optimizer(optimizer, _numbered("optimizer", number), names, found))
        for number, scheduler in enumerate(self._schedulers):
            name = _numbered("scheduler", number)
            trees["schedulers"].append(strip(_scheduler_state(scheduler), name, found))
        trees["scaler"] = None if self._scaler is None else strip(_scaler_state(self._scaler), "scaler", found)
        return trees

    def _existing(self) -> Iterable[tuple[str, torch.Tensor]]:
        found = Tensors()
        self._trees(self._parameters(), found)
        return found.items()

    def _compare(self, named: Mapping[str, torch.Tensor], infos: Sequence[TensorInfo], values: Any) -> None:
        own = {info.name: info for info in infos if info.name.startswith(("model/", "extra/"))}
        wrong = [f"{name} is missing in the checkpoint" for name in named if name not in own]
        wrong += [f"{name} is not in this model" for name in own if name not in named]
        for name, info in own.items():
            mine = named.get(name)
            if mine is not None and (tuple(mine.shape), device.dtype_name(mine.dtype)) != (info.shape, info.dtype):
                here = f"{device.dtype_name(mine.dtype)}{list(mine.shape)}"
                wrong.append(f"{name} is {info.dtype}{list(info.shape)} in the checkpoint, {here} here")
        names = {id(tensor): name for name, tensor in named.items()}
        groups = [[[names[id(p)] for p in g["params"]] for g in o.param_groups] for o in self.optimizers]
        if [tree["params"] for tree in values["optimizers"]] != groups:
            saved = [[len(group) for group in tree["params"]] for tree in values["optimizers"]]
            numbers = f"saved with {saved} parameters, here {self._groups()}"
            wrong.append(f"the optimizers' parameter groups differ ({numbers}); build them before attach as they were")
        if len(values["schedulers"]) != len(self._schedulers):
            wrong.append(f"{len(values['schedulers'])} schedulers in the checkpoint, {len(self._schedulers)} here")
        if (values["scaler"] is None) != (self._scaler is None):
            wrong.append("only one of the checkpoint and this run has an enabled GradScaler")
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            raise MismatchError(f"the checkpoint is of another model: {'; '.join(wrong[:5])}{more}")

    def _plant(self, values: Any, loaded: Mapping[str, torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
        for optimizer, tree in zip(self.optimizers, values["optimizers"], strict=True):
            _plant_optimizer(optimizer, tree, loaded, named)
        for scheduler, tree in zip(self._schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(plant(tree, loaded, None))
        if self._scaler is not None:
            _load_scaler(self._scaler, plant(values["scaler"], loaded, None))


def _parts(model: Any) -> list[nn.Module]:
    """Return the modules of a list; ModuleList and ModuleDict only hold theirs, they are not called."""
    if type(model) in (nn.ModuleList, nn.ModuleDict):
        model = list(model.children())
    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, nn.Module):
            raise AttachError(f"model is or holds a {type(part).__name__}; give the torch module that is trained")
    if not parts:
        raise AttachError("model holds no module; give the one that is trained")
    return parts


def _strip_optimizer(optimizer: Any, name: str, names: Mapping[int, str], found: Tensors) -> dict[str, Any]:
    groups, params, state = [], [], []
    for g, group in enumerate(optimizer.param_groups):
        params.append([names[id(p)] for p in group["params"]])
        groups.append(strip({k: v for k, v in group.items() if k != "params"}, f"{name}/@group{g}", found))
    ordered = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    if len(ordered) != sum(isinstance(key, torch.Tensor) for key in optimizer.state):
        raise AttachError(f"{name} keeps state of tensors that are in none of its param_groups; it cannot be saved")
    for key in (*ordered, *(k for k in optimizer.state if not isinstance(k, torch.Tensor))):
        label = names[id(key)].partition("/")[2] if isinstance(key, torch.Tensor) else f"@{key}"
        owner = names[id(key)] if isinstance(key, torch.Tensor) else None
        state.append([owner, None if owner else key, strip(optimizer.state[key], f"{name}/{label}", found, like=key)])
    return {"params": params, "groups": groups, "state": state}


def _plant_optimizer(
    optimizer: Any, tree: Any, loaded: Mapping[str, torch.Tensor], named: Mapping[str, torch.Tensor]
) -> None:
    """Fill an optimizer directly: load_state_dict casts state to the parameters' dtype and moves `step`."""
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        kept = group["params"]
        group.clear()
        group["params"] = kept
        group.update(plant(saved, loaded, None))
    optimizer.state.clear()
    for owner, key, value in tree["state"]:
        param = named[owner] if owner else None
        optimizer.state[key if param is None else param] = plant(value, loaded, param)


def _scheduler_state(scheduler: Any) -> Any:
    if not hasattr(scheduler, "state_dict"):
        raise AttachError(f"scheduler {type(scheduler).__name__} has no state_dict(); it cannot be resumed")
    return scheduler.state_dict()


def _scaler_state(scaler: Any) -> dict[str, Any]:
    """Return a GradScaler's state with its tensors as tensors: state_dict() would wait for the training's stream."""
    if not hasattr(scaler, "_growth_tracker"):
        return {"state": scaler.state_dict()}
    own = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_init_growth_tracker")
    state = {name: getattr(scaler, name) for name in own}
    return {**state, "_scale": scaler._scale, "_growth_tracker": scaler._growth_tracker}


def _load_scaler(scaler: Any, state: dict[str, Any]) -> None:
    if "state" in state:
        scaler.load_state_dict(state["state"])
        return
    for name, value in state.items():
        setattr(scaler, name, value)
    for name in ("_scale", "_growth_tracker"):
        value = state[name]
        if value is not None:
            setattr(scaler, name, value.to(scaler._device))


def _target(existing: torch.Tensor | None, info: TensorInfo) -> torch.Tensor:
    """Return where to read a tensor of the optimizer or scaler to: the one that is there, or a new one on the CPU."""
    dtype = device.dtype_of(info.dtype)
    if existing is not None and existing.dtype == dtype and tuple(existing.shape) == info.shape:
        return existing
    return torch.empty(info.shape, dtype=dtype)


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    try:
        device.check(tensor)
    except AttachError as error:
        raise AttachError(f"{name}: {error}") from None
    return TensorInfo(name, tuple(tensor.shape), device.dtype_name(tensor.dtype), tensor.nbytes)


def _enabled(scaler: Any) -> bool:
    return bool(getattr(scaler, "is_enabled", lambda: True)())


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}{number}"


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
