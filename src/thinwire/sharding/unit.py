"""The parameters that are gathered and reduced together: a layer's, in one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity
from thinwire.sharding.carry import Carrier
from thinwire.sharding.layout import REST, SECONDARY, UPDATED, WEIGHTS, Layout, Span, Stage

_STAGES = 8  # tags of a unit


class Unit:
    """One unit on one rank.

    Between steps a rank keeps `weights` (1/s_w, in the parameters' dtype), `master` (1/s_o, fp32; a part of `weights` where that is
    exact), and from the first backward pass on `reduced` (1/s_g, fp32). `flat`, the whole, has memory only while it is
    needed: its storage is emptied and filled again, so that what autograd has saved of it is good in the backward pass.
    """

    def __init__(
        self, index: int, module: nn.Module, parameters: Sequence[nn.Parameter], layout: Layout, carrier: Carrier
    ):
        self.index, self.module, self.parameters, self.layout, self.carrier = index, module, parameters, layout, carrier
        self.rank, self.shards = carrier.group.rank, layout.sharding.shards
        self.numel = sum(p.numel() for p in parameters)
        self.padded = layout.padded(self.numel)
        self.shapes = [p.shape for p in parameters]
        self.in_backward = self.void = False
        self.arrived: set[int] = set()  # of this backward pass: parameters whose gradient is there
        self.folded = False
        self.reduced: Tensor | None = None
        self.secondary: Tensor | None = None
        self.rounds = 0
        like = parameters[0].detach()
        self._nothing = like.new_empty(0)
        self.flat = like.new_zeros(self.padded)
        for part, parameter in zip(self._parts(self.flat), parameters):
            part.copy_(parameter.detach())
        begin, end = layout.span(self.rank, self.shards.weights, self.padded)
        self.whole = self.shards.weights == 1  # nothing to be gathered
        self.weights = self.flat if self.whole else self.flat[begin:end].clone()
        first, last = layout.span(self.rank, self.shards.optimizer, self.padded)
        own = self.weights[first - begin : last - begin]
        exact = self.shards.weights == self.shards.optimizer or layout.sharding.weights == Identity()
        self._shared = exact and own.dtype == torch.float32 and own.device.type == "cpu"
        self.master = own if self._shared else own.to("cpu", torch.float32, copy=True)
        self.gathered = True
        self._point()
        self.free()

    # ---- weights

    @torch.no_grad()
    def gather(self, round_: int) -> None:
        """Have whole parameters; the same bits in any pass of one step."""
        if self.gathered:
            return
        self.flat.untyped_storage().resize_(self.padded * self.flat.element_size())
        degree = self.layout.sharding.secondary
        if degree and self.secondary is not None:
            out = torch.empty(self.padded, dtype=self.flat.dtype)
            self.carrier.gather_exactly(self.secondary, self._block(degree), out, self._tag(1), SECONDARY)
            self.flat.copy_(out)
        else:
            spans, codec = self._spans(1, self.shards.weights), self.layout.sharding.weights
            with _landing(self.flat) as out:
                self.carrier.gather(codec, _fp32(self.weights), spans, out, self._tag(0), round_, WEIGHTS)
            if degree:
                begin, end = self._block(degree)[self.rank]
                self.secondary = self.flat[begin:end].to("cpu", copy=True)
        self.gathered = True
        self._point()

    def free(self) -> None:
        """Keep this rank's part only."""
        if self.gathered and not self.whole:
            for parameter in self.parameters:
                parameter.data = self._nothing
            self.flat.untyped_storage().resize_(0)
            self.gathered = False

    @torch.no_grad()
    def spread(self, round_: int) -> None:
        """After a step: bring what the optimizer made of `master` to all who hold it as weights; what was gathered before is stale."""
        self.secondary = None
        self.free()
        if self.shards.weights < self.shards.optimizer:
            spans, codec = self._within(self.shards.weights, self.shards.optimizer), self.layout.sharding.weights
            with _landing(self.weights) as out:
                self.carrier.gather(codec, self.master, spans, out, self._tag(2), round_, UPDATED)
        elif not self._shared:
            self.weights.copy_(self.master)

    @torch.no_grad()
    def masters(self) -> list[Tensor]:
        """What all optimizers hold, as whole parameters in fp32."""
        out = torch.empty(self.padded)
        self.carrier.gather_exactly(self.master, self._spans(1, self.shards.optimizer), out, self._tag(2), "export")
        return self._parts(out)

    def restore(self) -> None:
        """Make the module an ordinary one, with the optimizers' values."""
        for parameter, values in zip(self.parameters, self.masters()):
            parameter.data = values.to(self._nothing.device, self._nothing.dtype, copy=True)

    # ---- gradients

    @torch.no_grad()
    def fold(self) -> None:
        """Reduce the gradients of one backward pass within s_g, add them to those before, and free them."""
        x = torch.zeros(self.padded)
        for part, parameter in zip(self._parts(x), self.parameters):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
                parameter.grad = None
        for stage in self.layout.within:
            x = self._reduce(x, stage)
        self.reduced = self._sound(x) if self.reduced is None else self.reduced.add_(self._sound(x))
        self.folded, self.in_backward = True, False
        self.arrived.clear()
        self.free()

    @torch.no_grad()
    def settle(self) -> Tensor:
        """The mean gradient of this rank's part of `master`, over all ranks; once a step."""
        x = torch.zeros(self.padded // self.shards.gradients) if self.reduced is None else self.reduced
        for stage in self.layout.beyond:
            x = self._reduce(x, stage)
            if stage.purpose == REST:
                own, x = x, torch.empty(self.padded // self.shards.optimizer)
                self._gather_mean(self.layout.sharding.gradients, own, x, stage)
        return self._sound(x)

    def spans_of_parameters(self) -> list[Span]:
        """Where each parameter lies in `master`; empty where none of it does."""
        first, last = self.layout.span(self.rank, self.shards.optimizer, self.padded)
        spans, begin = [], 0
        for shape in self.shapes:
            end = begin + shape.numel()
            low, high = max(begin, first), min(end, last)
            spans.append((low - first, high - first) if low < high else (0, 0))
            begin = end
        return spans

    def _reduce(self, x: Tensor, stage: Stage) -> Tensor:
        self.rounds += 1
        spans = self._within(stage.low, stage.high)
        weight = (
            1 / self.layout.ranks if stage.high == self.layout.ranks else 1.0
        )  # the mean is taken once, by the last
        codec, tag = self.layout.sharding.gradients, self._tag(3)
        return self.carrier.reduce(codec, self._sound(x), spans, weight, tag, self.rounds, stage.purpose)

    def _gather_mean(self, codec: Codec, own: Tensor, out: Tensor, stage: Stage) -> None:
        self.rounds += 1
        spans = self._within(stage.low, stage.high)
        self.carrier.gather(codec, self._sound(own), spans, out, self._tag(4), self.rounds, stage.purpose)

    def _sound(self, x: Tensor) -> Tensor:
        """`x`, or zeros where it is not finite: the ranks vote on the step afterwards, and none takes it."""
        if not bool(torch.isfinite(torch.dot(x, x))) and not bool(torch.isfinite(x).all()):
            self.void = True
            x = torch.zeros_like(x)
        return x

    # ---- where things are

    def _spans(self, low: int, high: int) -> dict[int, Span]:
        peers = self.layout.peers(self.rank, low, high)
        return {peer: self.layout.span(peer, high, self.padded) for peer in peers}

    def _within(self, low: int, high: int) -> dict[int, Span]:
        """The same, counted from the beginning of the own shard of degree `low`."""
        begin, _ = self.layout.span(self.rank, low, self.padded)
        return {peer: (first - begin, last - begin) for peer, (first, last) in self._spans(low, high).items()}

    def _block(self, degree: int) -> dict[int, Span]:
        """Of neighbours: the whole cut as they stand."""
        first, size = self.rank // degree * degree, self.padded // degree
        return {first + i: (i * size, (i + 1) * size) for i in range(degree)}

    def _parts(self, flat: Tensor) -> list[Tensor]:
        cut = torch.split(flat[: self.numel], [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(cut, self.shapes)]

    def _point(self) -> None:
        for parameter, part in zip(self.parameters, self._parts(self.flat)):
            parameter.data = part

    def _tag(self, phase: int) -> int:
        return self.index * _STAGES + phase


def _fp32(x: Tensor) -> Tensor:
    return x.to("cpu", torch.float32)


@contextmanager
def _landing(into: Tensor) -> Iterator[Tensor]:
    """Within: room in fp32 on the CPU; after: its values are in `into`. Never `into` itself: a storage that a kernel has seen
    through NumPy cannot be emptied any more.
    """
    out = torch.empty(into.shape)
    yield out
    into.copy_(out)
