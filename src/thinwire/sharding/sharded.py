"""A model whose weights, gradients and optimizer state are spread over the ranks of one site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinwire.comm.group import Group
from thinwire.errors import CheckpointError, ModelError
from thinwire.pieces.partition import check_optimizer, trainable
from thinwire.runtime.handshake import agree, agree_on_start
from thinwire.sharding.carry import Carrier
from thinwire.sharding.layout import VOTE, Layout, Sharding
from thinwire.sharding.unit import Unit
from thinwire.version import __version__

_WHOLE_TENSORS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")  # steps that are not element by element
_VOID, _SOME = 1, 2  # what is voted on: a gradient that is not finite; that there are gradients at all


class Sharded:
    """Share a model among the ranks of `group`; the training loop stays as it is.

    ```python
    with Sharded(Sharding(shards=Shards(2, 4, 8)), model, optimizer, group) as sharded:
        for batch in data:                # every rank its own
            model(batch).loss.backward()  # as often as there are micro-batches
            sharded.clip_grad_norm(1.0)   # in place of torch.nn.utils.clip_grad_norm_
            optimizer.step()
            optimizer.zero_grad()
    ```

    Each step is the one of data-parallel training on the mean gradient. The optimizer's parameters are replaced by this rank's
    parts of them, flat; its step must be element by element (SGD, Adam, AdamW, ...), and it must not have stepped yet. A
    unit (by default each layer of the longest list of layers, and the rest as one) is whole only during its own forward and
    backward pass. Messages are sent and waited for at once: nothing overlaps with compute yet.

    *All ranks use the same parameters in a backward pass.* One that none of them uses has a gradient of zero, not None.
    All start from rank 0's weights; frozen parameters and buffers stay whole, and each rank's own. If any rank's gradient is not
    finite, no rank steps (`skipped` counts).
    Between passes the model's parameters may be empty: for the whole, `export()`. After the block it is an ordinary model again.

    Bytes: `layout.sent(rank, numels)`, exactly; memory: `layout.held(rank, numel)`. Raises `ModelError`, `ConfigurationError`,
    `DisagreementError` (ranks of another model or other settings), `LinkError`, `NonFiniteError` (weights).
    """

    def __init__(
        self,
        sharding: Sharding,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        units: Sequence[nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        self.sharding, self.model, self.optimizer, self.group = sharding, model, optimizer, group
        self.layout = Layout(sharding, group.size)
        self.step = self.skipped = 0
        self._reduced = self._refused = self._ending = self._closed = False
        check_optimizer(model, optimizer)
        _check_steps(optimizer)
        named = trainable(model)
        facts = {f"model, {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in named}
        agree(group, {"code version": __version__, "sharding": repr(sharding), "seed": seed} | facts)
        agree_on_start(group, [p.detach() for _, p in named])
        self._carrier = Carrier(group, seed)
        self.units = _units(model, _layers(model) if units is None else units, self.layout, self._carrier)
        self._parts = _replace(optimizer, self.units)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.reduce()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        for unit in self.units:
            self._attach(unit)
            unit.spread(0)

    @property
    def numels(self) -> list[int]:
        """Parameters of each unit."""
        return [unit.numel for unit in self.units]

    def reduce(self) -> None:
        """Give the optimizer the mean gradient; by itself before its step, or earlier where it is needed."""
        if self._reduced:
            return
        self._reduced = True
        some = any(unit.reduced is not None for unit in self.units)
        means = [unit.settle() for unit in self.units]
        flags = (_VOID if any(unit.void for unit in self.units) else 0) | (_SOME if some else 0)
        flags = self._carrier.vote(flags, len(self.units) * 8, VOTE)
        self._refused = bool(flags & _VOID)
        self.skipped += self._refused
        for unit, mean in zip(self.units, means):
            for part, (begin, end) in zip(self._parts[unit.index], unit.spans_of_parameters()):
                part.grad = mean[begin:end] if flags == _SOME else None

    @torch.no_grad()
    def clip_grad_norm(self, most: float) -> float:
        """Scale the mean gradient to a norm of at most `most`; its norm over all parameters, the same on all ranks.

        nan if a gradient is not finite (nobody steps then).
        """
        self.reduce()
        parts = [part for of in self._parts.values() for part in of]
        grads = [part.grad for part in parts if part.grad is not None]
        if self._refused:
            return float("nan")
        square = torch.zeros(1, dtype=torch.float64)
        for grad in grads:
            square += grad.double().square().sum()
        degree = self.sharding.shards.optimizer
        first = self.group.rank // degree * degree
        spans = {first + i: (i, i + 1) for i in range(degree)}
        squares = torch.empty(degree, dtype=torch.float64)
        self._carrier.gather_exactly(square, spans, squares, len(self.units) * 8 + 1, "norm")
        norm = float(sum(squares.tolist()) ** 0.5)
        if norm > most:
            for grad in grads:
                grad.mul_(most / (norm + 1e-6))
        return norm

    def export(self) -> dict[str, Tensor]:
        """The model's state dict, whole, on the CPU, with the values that the optimizers hold. All ranks must call it."""
        whole = {id(p): v for unit in self.units for p, v in zip(unit.parameters, unit.masters())}
        return {
            name.replace("_orig_mod.", ""): whole.get(id(value), value).detach().to("cpu", value.dtype, copy=True)
            for name, value in self.model.state_dict(keep_vars=True).items()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What this rank needs beside `optimizer.state_dict()`, buffers and frozen parameters to go on bit for bit: tensors, and facts
        for JSON. Between steps only.
        """
        facts = {"step": self.step, "rank": self.group.rank, "sharding": repr(self.sharding)}
        rounds = {"rounds": [unit.rounds for unit in self.units]}
        return {str(unit.index): unit.master.clone() for unit in self.units}, facts | rounds

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`; `optimizer.load_state_dict` is the caller's. All ranks must call it. Raises `CheckpointError`."""
        due = {str(unit.index): unit.master.numel() for unit in self.units}
        saved = {name: tensor.numel() for name, tensor in tensors.items()}
        mine = {"rank": self.group.rank, "sharding": repr(self.sharding)}
        if saved != due or any(facts.get(name) != value for name, value in mine.items()):
            raise CheckpointError(
                f"a checkpoint of rank {facts.get('rank')}, {facts.get('sharding')}, {sum(saved.values())} parameters, given to rank "
                f"{mine['rank']}, {mine['sharding']}, {sum(due.values())}: the same are needed; load the whole weights of `export` instead."
            )
        self.step = facts["step"]
        for unit, rounds in zip(self.units, facts["rounds"]):
            unit.master.copy_(tensors[str(unit.index)])
            unit.rounds = rounds
            unit.spread(self.step)

    def close(self) -> None:
        """Leave the model to itself, with what parameters are there. The group stays open."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._closed:
            for unit in self.units:
                unit.restore()
        self._closed = True
        self.close()

    # ---- the order of things

    def _attach(self, unit: Unit) -> None:
        if not unit.whole:
            self._hooks.append(unit.module.register_forward_pre_hook(lambda *_: unit.gather(self.step)))
            self._hooks.append(
                unit.module.register_forward_hook(lambda module, given, output: self._after_forward(unit, output))
            )
        for parameter in unit.parameters:
            hook = parameter.register_post_accumulate_grad_hook(lambda p: self._arrived(unit, p))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if unit.in_backward:  # a checkpointed layer, computed again
            return
        tracked = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tracked:
            tensor.register_hook(lambda _: self._before_backward(unit))  # type: ignore[no-untyped-call]
        if tracked or not torch.is_grad_enabled():
            unit.free()  # else nothing would tell that the backward pass comes

    def _before_backward(self, unit: Unit) -> None:
        unit.gather(self.step)
        unit.in_backward = True

    def _arrived(self, unit: Unit, parameter: Tensor) -> None:
        """A parameter's gradient of this backward pass is whole."""
        if not self._ending:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        unit.arrived.add(id(parameter))
        if len(unit.arrived) == len(unit.parameters):
            unit.fold()

    def _after_backward(self) -> None:
        self._ending = False
        for unit in self.units:
            if not unit.folded:  # not all of its parameters were used
                unit.fold()
            unit.folded = False

    def _after_step(self) -> None:
        self.step += 1
        self._reduced = False
        for unit in self.units:
            unit.reduced, unit.void = None, False
            unit.spread(self.step)


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if name in _WHOLE_TENSORS:
        raise ModelError(
            f"{name} looks at whole tensors, and a rank keeps parts of them; an optimizer whose step is element by element is "
            "needed, such as AdamW or SGD."
        )
    if optimizer.state:
        raise ModelError(
            f"this {name} has stepped already: its state is that of whole tensors; make a new one, and attach Sharded before the first step."
        )


def _layers(model: nn.Module) -> list[nn.Module]:
    """Of the longest list of modules in the model; none where there is no list."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=[])


def _units(model: nn.Module, modules: Sequence[nn.Module], layout: Layout, carrier: Carrier) -> list[Unit]:
    """One for each module, and one for the rest, which is whole while the model runs; tensors of another dtype are one of their own."""
    owners: dict[int, set[int]] = {}
    for place, module in enumerate(modules):
        for parameter in module.parameters():
            owners.setdefault(id(parameter), set()).add(place)
    outside = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if not _inside(n, model, modules)}
    groups: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for _, parameter in trainable(model):
        places = owners.get(id(parameter), set())
        shared = len(places) != 1 or id(parameter) in outside
        groups.setdefault((-1 if shared else min(places), parameter.dtype), []).append(parameter)
    return [
        Unit(index, model if place < 0 else modules[place], parameters, layout, carrier)
        for index, ((place, _), parameters) in enumerate(sorted(groups.items(), key=lambda item: item[0][0]))
    ]


def _inside(name: str, model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether the parameter called so is reached through one of `modules`."""
    chosen, module = {id(m) for m in modules}, model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if id(module) in chosen:
            return True
    return False


def _replace(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> dict[int, list[nn.Parameter]]:
    """Put this rank's part of each parameter in its place in the optimizer; the parts, by unit."""
    parts: dict[int, list[nn.Parameter]] = {}
    instead: dict[int, nn.Parameter] = {}
    for unit in units:
        made = [nn.Parameter(unit.master[begin:end]) for begin, end in unit.spans_of_parameters()]
        parts[unit.index] = made
        instead |= {id(whole): part for whole, part in zip(unit.parameters, made)}
    for group in optimizer.param_groups:
        group["params"] = [instead[id(p)] for p in group["params"] if id(p) in instead]
    return parts
