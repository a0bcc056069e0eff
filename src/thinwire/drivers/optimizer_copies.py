"""Copies of the weights inside an optimizer: they follow when a Replica moves the weights.

Many optimizers hold the weights a second time: fp32 master weights of a bf16 model, the slow weights of Lookahead, the point z of
schedule-free optimizers, the first weights of Prodigy. A landing that moved the parameters alone would be undone by the next step, which
writes the copy back. So each copy is moved by as much as its parameter.

Copies are found by their values, wherever the optimizer keeps them: at entry, and after the first step, when most optimizers make them.

A schedule-free optimizer has two modes. `train` puts the point y of the gradients into the parameters, `eval` the average x, which is the
model. Rounds exchange x; y and z move with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.errors import ModelError
from thinwire.pieces.partition import is_sharded, local

_DEPTH = 6  # of containers in which an optimizer keeps tensors
_HERE = "*"  # stands for a parameter or an index in the name of a place


class WeightCopies:
    """The copies that `optimizers` hold of `parameters`. Raises `ModelError` for an optimizer whose modes are not known."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        self._modal = [one for one in optimizers if _has_modes(one)]
        self.names: dict[str, list[list[int]]] = {}  # by place: of each tensor there the numbers of its parameters
        self._reading = self._open = False
        self._trained: list[torch.optim.Optimizer] = []
        self._own: list[Tensor] = []  # what the parameters held in the mode of training
        self._before: list[Tensor] = []
        self._versions: list[int] = []
        self.find({})

    @property
    def active(self) -> bool:
        return bool(self.names or self._modal)

    @torch.no_grad()
    def find(self, start: Mapping[int, Tensor]) -> None:
        """Search for copies of the parameters, or of `start`: what they held when training began, by the id of a parameter."""
        places: dict[str, list[tuple[int | None, Tensor]]] = {}
        for name, number, tensor in self._walk():
            places.setdefault(name, []).append((number, tensor))
        for name, found in places.items():
            if name not in self.names and (numbers := self._matched(found, start)):
                self.names[name] = numbers

    def touched(self) -> None:
        """Called before the parameters are read or written for a round."""
        if not self._reading or self._open or not self.active:
            return
        with torch.no_grad():
            self._open = True
            parts = self._parts()
            if self._modal:
                self._own = [part.clone() for part in parts]
                self._trained = [one for one in self._modal if _trains(one)]
                for one in self._trained:
                    one.eval()  # type: ignore[attr-defined]
            self._before, self._versions = [part.clone() for part in parts], [part._version for part in parts]

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which rounds may read and write the parameters: it ends with all copies moved as their parameters were."""
        if self._reading:
            yield
            return
        self._reading = True
        try:
            yield
        finally:
            self._reading = False
            if self._open:
                self._follow()

    @torch.no_grad()
    def settle(self, weights: Mapping[int, Tensor]) -> None:
        """The model holds the agreed `weights` (fp32, by the id of a parameter) for good: wider copies take them unrounded, and all points of
        schedule-free ones meet there.
        """
        for number, copy in self._copies():
            parameter = self._parameters[number]
            if id(parameter) in weights and (copy.dtype.itemsize > parameter.dtype.itemsize or self._modal):
                copy.copy_(weights[id(parameter)].view_as(copy))

    @contextmanager
    def at_one_point(self) -> Iterator[Callable[[], None]]:
        """A context in which the point z follows the parameters, so that a change of mode moves nothing. It gives a function to call when these
        are set. At its end the parameters must hold what they held before: then the optimizer is brought to the mode that it has now.
        """
        if not self._modal:
            yield lambda: None
            return
        with torch.no_grad():
            copies = list(self._copies())
            kept, trained = [copy.clone() for _, copy in copies], [_trains(one) for one in self._modal]

            def meet() -> None:
                parts = self._parts()
                for number, copy in copies:
                    copy.copy_(parts[number].view_as(copy))

            try:
                yield meet
            finally:
                own, now = [part.clone() for part in self._parts()], [_trains(one) for one in self._modal]
                for one, training in zip(self._modal, trained):
                    _set_mode(one, training)
                for part, values in zip(self._parts(), own):
                    part.copy_(values)
                for (_, copy), values in zip(copies, kept):
                    copy.copy_(values)
                for one, training in zip(self._modal, now):
                    _set_mode(one, training)

    def facts(self) -> dict[str, list[list[int]]]:
        """The places of the copies, for JSON: after a resume their values alone do not tell them."""
        return self.names

    def load(self, facts: Mapping[str, Any]) -> None:
        self.names = {str(name): [[int(n) for n in numbers] for numbers in places] for name, places in facts.items()}

    def _follow(self) -> None:
        self._open = False
        parts, before = self._parts(), self._before
        moved = {
            number: part - before[number]
            for number, part in enumerate(parts)
            if part._version != self._versions[number] and not torch.equal(part, before[number])
        }
        for number, copy in self._copies() if moved else ():
            if number in moved:
                _move(copy, moved[number], before[number], parts[number])
        if self._modal:
            weights = {number: parts[number].clone() for number in moved}
            for one in self._trained:
                one.train()  # type: ignore[attr-defined]
            for number, (part, own) in enumerate(zip(parts, self._own)):
                part.copy_(own)
                if number in moved:
                    _move(part, moved[number], before[number], weights[number])
        self._own, self._before = [], []

    def _parts(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self._parameters]

    def _copies(self) -> Iterator[tuple[int, Tensor]]:
        """The number of the parameter, and its copy as a view in the parameter's shape. A copy that shares the parameter's memory is none."""
        at: dict[str, int] = {}
        own = {_memory(part) for part in self._parts()}
        for name, number, tensor in self._walk() if self.active else ():
            place = at[name] = at.get(name, -1) + 1
            z = bool(self._modal) and name == "state.*.z"
            if (name not in self.names and not z) or _memory(tensor) in own:
                continue
            if number is not None:
                yield number, tensor.view(self._parts()[number].shape)
            elif place < len(self.names[name]):
                yield from self._cut(tensor, self.names[name][place])

    def _cut(self, tensor: Tensor, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The parts of a flat `tensor` that belong to the parameters of these numbers."""
        parts = self._parts()
        ends = accumulate((parts[number].numel() for number in numbers), initial=0)
        for number, (begin, end) in zip(numbers, pairwise(ends)):
            yield number, tensor.view(-1)[begin:end].view(parts[number].shape)

    def _matched(self, found: Sequence[tuple[int | None, Tensor]], start: Mapping[int, Tensor]) -> list[list[int]]:
        """The numbers of the parameters that each tensor of a place is a copy of; empty if one of them is none."""
        numbers: list[list[int]] = []
        evidence, after = False, 0
        for number, tensor in found:
            if number is not None:
                own = [number] if tensor.numel() == self._parts()[number].numel() else []
            else:
                own = self._consecutive(tensor, after)
                after += len(own)
            if not own or not all(self._equal(n, copy, start) for n, copy in self._cut(tensor, own)):
                return []
            numbers.append(own)
            evidence |= tensor.numel() > 1 and bool(tensor.any())
        return numbers if evidence else []

    def _consecutive(self, tensor: Tensor, after: int) -> list[int]:
        """The numbers of the parameters from `after` on that fit into `tensor`, which may be padded."""
        sizes = [part.numel() for part in self._parts()[after:]]
        if sizes and sizes[0] == tensor.numel():
            return [after]
        return (
            [after + n for n, end in enumerate(accumulate(sizes)) if end <= tensor.numel()] if tensor.dim() == 1 else []
        )

    def _equal(self, number: int, copy: Tensor, start: Mapping[int, Tensor]) -> bool:
        """Whether `copy` has the values of the parameter, now or at the start, up to rounding; and not those of the gradient, which momentum has."""
        parameter = self._parameters[number]
        first = start.get(id(parameter))
        if not _near(copy, local(parameter.detach())) and (first is None or not _near(copy, first)):
            return False
        gradient = None if parameter.grad is None else local(parameter.grad.detach())
        if gradient is not None and gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        return gradient is None or not _near(copy, gradient)

    def _walk(self) -> Iterator[tuple[str, int | None, Tensor]]:
        """Every dense tensor of floating point that the optimizers hold, except the parameters: its place, and the parameter in its path."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        seen = set(numbers)

        def inside(value: Any, name: str, number: int | None, depth: int) -> Iterator[tuple[str, int | None, Tensor]]:
            if id(value) in seen or depth > _DEPTH:
                return
            if isinstance(value, Tensor):
                part = local(value.detach()) if is_sharded(value) else value.detach()
                if type(part) is Tensor and part.is_floating_point() and part.layout == torch.strided:
                    seen.add(id(value))
                    if part.is_contiguous() or (number is not None and part.shape == self._parts()[number].shape):
                        yield name, number, part
            elif isinstance(value, Mapping):
                seen.add(id(value))
                for key, entry in list(value.items()):
                    if key != "params":
                        step = _HERE if isinstance(key, Tensor | int) else str(key)
                        own = numbers.get(id(key), number)
                        yield from inside(entry, f"{name}.{step}" if name else step, own, depth + 1)
            elif isinstance(value, list | tuple):
                seen.add(id(value))
                for entry in value:
                    yield from inside(entry, f"{name}.{_HERE}", number, depth + 1)
            elif isinstance(value, torch.optim.Optimizer):
                yield from inside(vars(value), name, number, depth)

        for optimizer in self._optimizers:
            yield from inside(optimizer, "", None, 0)


def _has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` moves the parameters in `train` and `eval`, as schedule-free ones do."""
    if not (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))):
        return False
    if _mode(optimizer) is None:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} has the methods train and eval, which may move the weights, but says its mode neither in "
            "param_groups nor as an attribute train_mode, so a Replica cannot know what the model is. Give another optimizer."
        )
    return True


def _mode(optimizer: torch.optim.Optimizer) -> bool | None:
    of_group = optimizer.param_groups[0].get("train_mode") if optimizer.param_groups else None
    return cast("bool | None", of_group if of_group is not None else getattr(optimizer, "train_mode", None))


def _trains(optimizer: torch.optim.Optimizer) -> bool:
    return bool(_mode(optimizer))


def _set_mode(optimizer: torch.optim.Optimizer, training: bool) -> None:
    if _trains(optimizer) != training:
        optimizer.train() if training else optimizer.eval()  # type: ignore[attr-defined]


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _near(copy: Tensor, values: Tensor) -> bool:
    """Whether `copy` has these values, up to the rounding of the coarser dtype. It may be on another device."""
    if type(values) is not Tensor or not values.is_floating_point() or copy.numel() != values.numel():
        return False
    copy, values = copy.reshape(-1), values.reshape(-1)
    eps = max(torch.finfo(copy.dtype).eps, torch.finfo(values.dtype).eps)
    largest = 4 * values.abs().amax().float().to(copy.device) if values.numel() else values
    for end in (64, copy.numel()):  # most tensors differ at once
        a, b = copy[:end].float(), values[:end].to(copy.device).float()
        # Of a narrower parameter each value is rounded by itself; two steps of one dtype round at the size of what they subtract from.
        scale = a.abs() if copy.dtype != values.dtype else largest
        if not bool(((a - b).abs() <= eps * scale).all()):
            return False
    return True


def _move(tensor: Tensor, change: Tensor, before: Tensor, after: Tensor) -> None:
    """Move `tensor` by the `change` from `before` to `after`, exactly to `after` where it was at `before`, and where NaN or infinity would come out
    because weights that were not finite have restarted from the anchors.
    """
    change, before, after = (one.to(tensor.device) for one in (change, before, after))
    moved = tensor + change
    there = (tensor == before) | ~torch.isfinite(moved)
    tensor.copy_(torch.where(there, after.to(moved), moved))
