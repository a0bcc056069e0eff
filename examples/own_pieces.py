"""Pieces in your own file: a codec, an outer step, an exchange and an aggregate, which work wherever Thinwire's do.

    python examples/own_pieces.py                # try the laws on them
    thinwire train --codec "examples/own_pieces.py:Truncated(2)" --exchange "examples/own_pieces.py:DirectBelow(100_000)"
    thinwire train --elastic --strategy "Strategy(schedule=Every(30), outer=examples/own_pieces.py:Smoothed(0.9))"
    thinwire train --elastic --aggregate "examples/own_pieces.py:RoundedOnce()"

A piece is a frozen dataclass, a subclass of its protocol: it implements what is specific to it and declares what else it can do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs import check_finite
from thinwire.comm import Link
from thinwire.exchange import Ranges, Round
from thinwire.pieces.aggregate import Values
from thinwire.rng import Key
from thinwire.types import State


@dataclass(frozen=True)
class Truncated(tw.codecs.Codec):
    """The first `kept` bytes of every fp32 value, sign and exponent first. The rest is cut off, towards zero."""

    kept: int = 2

    grain: ClassVar[int] = 1  # each value is coded separately: a delta may be cut anywhere, so messages overlap
    claims: ClassVar[frozenset[str]] = frozenset({"odd", "contractive", "idempotent", "local"})

    def __post_init__(self) -> None:
        if self.kept not in (1, 2, 3):
            raise tw.ConfigurationError(f"{self}: 1 to 3 bytes of a value are needed; 2 is half of fp32.")

    def nbytes(self, numel: int) -> int:
        return self.kept * numel

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_finite(x)
        payload.view(-1, self.kept).copy_(x.contiguous().view(torch.uint8).view(-1, 4)[:, 4 - self.kept :])

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        values = torch.zeros(out.numel(), 4, dtype=torch.uint8)
        values[:, 4 - self.kept :] = payload.view(-1, self.kept)
        out.add_(values.view(-1).view(torch.float32).mul_(weight))


@dataclass(frozen=True)
class Smoothed(tw.pieces.outer.Outer):
    """v ← decay·v + (1 − decay)·Δ;  anchor ← anchor − v: a moving mean of deltas, in which each delta counts 1 in total."""

    decay: float = 0.5

    linear: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True  # so it implements `step_into`, which gets any range of a fragment

    def init(self, anchor: Tensor) -> State:
        return {"mean": torch.zeros_like(anchor)}  # saved in checkpoints, and sent to replicas that join

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        # Each operation is rounded separately, so all processors get the same bits.
        after["mean"].copy_(torch.mul(state["mean"], self.decay).add_(torch.mul(delta, 1 - self.decay)))
        torch.sub(anchor, after["mean"], out=moved)


@dataclass(frozen=True)
class DirectBelow(tw.exchange.Exchange):
    """Short packets go directly to all replicas, those of `nbytes` and more in two shots: one exchange around two others."""

    nbytes: int = 1 << 20

    needs_fixed_group: ClassVar[str] = ""  # replicas may join and leave: neither exchange keeps state of them

    def check(self, codec: tw.codecs.Codec, feedback: tw.pieces.feedback.Feedback | None) -> None:
        tw.exchange.TwoShot().check(codec, feedback)

    def chosen(self, codec: tw.codecs.Codec, numel: int) -> tw.exchange.Exchange:
        return tw.exchange.Direct() if codec.nbytes(numel) < self.nbytes else tw.exchange.TwoShot()

    def depart(self, round_: Round, state: State) -> Any:
        exchange = self.chosen(round_.codec, round_.numel)
        return exchange, exchange.depart(round_, state)

    def arrive(self, departure: Any) -> Ranges:
        exchange, departed = departure
        return exchange.arrive(departed)

    def nbytes_sent(self, codec: tw.codecs.Codec, numel: int, size: int, rank: int | None = None) -> int:
        return self.chosen(codec, numel).nbytes_sent(codec, numel, size, rank)

    def seconds(self, codec: tw.codecs.Codec, numel: int, size: int, link: Link) -> float:
        return self.chosen(codec, numel).seconds(codec, numel, size, link)


@dataclass(frozen=True)
class RoundedOnce(tw.pieces.aggregate.Aggregate):
    """The weighted mean Σ_m w_m·Δ_m, added in fp64 and rounded to fp32 once: no error grows with the number of replicas."""

    linear: ClassVar[bool] = True  # a mean: so replicas may join and leave, and exchanges may average part by part

    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        total = torch.zeros(out.numel(), dtype=torch.float64)
        for one, weight in zip(values, weights or [1 / len(values)] * len(values)):
            total.add_(one.decoded().double().mul_(weight))
        out.copy_(total)


if __name__ == "__main__":
    from thinwire.testing import check

    for piece in (Truncated(2), Smoothed(0.9), DirectBelow(100), RoundedOnce()):
        print(check(piece))
