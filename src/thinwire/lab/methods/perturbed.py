"""Computes the loss at x + s·z without changing x.

A layer gets x + s·z in a buffer when its forward pass begins, and x again when it ends. So nothing is added and subtracted, which
would drift. The memory is that of the weights, and once more of the largest layer's weights.

Some models read a weight outside the forward pass of the module that owns it. A trial at the first loss finds such weights: each is
set to NaN outside its module, and if the loss changes, the weight stays shifted during the whole pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ModelError
from thinwire.rng import normals

Values = Callable[[int], Tensor]  # the value of a parameter, by its index


class Shifted:
    """Computes losses of `model` with shifted `parameters`."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._inside: Values | None = None
        self._outside: list[Tensor] = []
        self._depth = [0] * len(parameters)
        self._begins = begins(parameters)
        self._everywhere: list[int] | None = None
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._hooks = []
        for module in model.modules():
            own = [place[id(p)] for p in module.parameters(recurse=False) if id(p) in place]
            if own:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, own)))
                self._hooks.append(module.register_forward_hook(partial(self._leave, own), always_call=True))

    def loss(self, losses: Callable[[int], Tensor], sample: int, stream: int, scale: float) -> float:
        """`losses(sample)` at x + `scale`·z, z the normals of `stream`, parameter after parameter. No autograd graph is made."""
        with torch.no_grad():
            elsewhere = self._read_elsewhere(partial(_scalar, losses, sample))
            held = {i: self._moved(self._parameters[i], i, stream, scale) for i in elsewhere}
            with self._worn(lambda i: held[i] if i in held else self._moved(self._original[i], i, stream, scale), held):
                return _scalar(losses, sample)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _read_elsewhere(self, loss: Callable[[], float]) -> list[int]:
        """Indices of the parameters that are read outside their module's forward."""
        if self._everywhere is not None:
            return self._everywhere
        every = [i for i, parameter in enumerate(self._parameters) if parameter.numel()]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        clean = loss()
        if not math.isfinite(clean):
            return every  # a loss that is not finite cannot show a change; shifting all is right for any model

        def changes(indices: Sequence[int]) -> bool:
            def nan(p: Tensor) -> Tensor:  # the memory of one number
                return torch.full((), math.nan, dtype=p.dtype, device=p.device).expand(p.shape)

            with self._worn(lambda i: self._original[i], {i: nan(self._parameters[i]) for i in indices}):
                return loss() != clean

        found = [i for i in every if changes([i])] if changes(every) else []
        for buffer, kept in buffers:
            buffer.copy_(kept)
        self._everywhere = found
        return found

    @contextmanager
    def _worn(self, inside: Values, outside: Mapping[int, Tensor]) -> Iterator[None]:
        """A context in which a parameter has the value `inside` in its module's forward pass; elsewhere `outside`, or its own value."""
        self._original = [parameter.data for parameter in self._parameters]
        self._outside = [outside.get(i, kept) for i, kept in enumerate(self._original)]
        self._inside = inside
        for i, value in outside.items():
            self._parameters[i].data = value
        try:
            yield
        finally:
            self._inside = None
            self._depth = [0] * len(self._parameters)
            for parameter, kept in zip(self._parameters, self._original):
                parameter.data = kept
            self._original = self._outside = []

    def _moved(self, x: Tensor, index: int, stream: int, scale: float) -> Tensor:
        z = normals(stream, self._begins[index], x.numel(), x.device).view(x.shape)
        return z.mul_(scale).add_(x.detach()).to(x.dtype)

    def _enter(self, own: Sequence[int], module: nn.Module, args: Any) -> None:
        if self._inside is not None:
            for i in own:
                self._depth[i] += 1
                if self._depth[i] == 1:
                    self._parameters[i].data = self._inside(i)

    def _leave(self, own: Sequence[int], module: nn.Module, args: Any, output: Any) -> None:
        if self._inside is not None:
            for i in own:
                self._depth[i] -= 1
                if self._depth[i] == 0:
                    self._parameters[i].data = self._outside[i]


def begins(parameters: Sequence[Tensor]) -> list[int]:
    """The index at which each parameter's part of a stream begins."""
    return [0, *accumulate(parameter.numel() for parameter in parameters)]


def _scalar(losses: Callable[[int], Tensor], sample: int) -> float:
    loss = losses(sample)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(f"a loss of {given} was given; a tensor with one value is needed. Take its mean.")
    return float(loss)
