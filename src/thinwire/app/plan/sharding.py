"""Sharding inside a replica: the share of weights, gradients and optimizer state on a rank, and the bytes sent. *Predicted*.

Three degrees s_w ≤ s_g ≤ s_o, nested (Frontier's levels, arXiv 2501.04266; ZeRO, arXiv 1910.02054):

    (1, 1, 1) DDP    (1, 1, R) ZeRO-1    (1, R, R) ZeRO-2    (R, R, R) ZeRO-3, FSDP2    (2, 8, R) Frontier

Bytes a rank keeps: p_w·N/s_w + p_g·N/s_g + p_o·N/s_o. `thinwire train` shards by FSDP2, (R, R, R), with R the ranks of a
replica; the others are for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Precision:
    """Bytes that one parameter takes.

    Args:
        weight: bytes of the weight.
        gradient: bytes of its gradient.
        optimizer: bytes of the optimizer's state, with a master copy if there is one.

    >>> Shards(1, 1, 1).nbytes(1000, Precision(weight=2, gradient=2, optimizer=12))
    16000
    """

    weight: int
    gradient: int
    optimizer: int


FP32 = Precision(4, 4, 8)  # `thinwire train`: AdamW's two moments; bf16 autocast changes none of these
MIXED = Precision(2, 2, 12)  # the papers': bf16 with an fp32 master copy


@dataclass(frozen=True)
class Shards:
    """Over how many ranks weights, gradients and optimizer state are spread.

    Args:
        weights: number s_w of ranks over which the weights are spread.
        gradients: number s_g of ranks over which the gradients are spread, a multiple of s_w.
        optimizer: number s_o of ranks over which the optimizer's state is spread, a multiple of s_g.

    Raises:
        ConfigurationError: the groups are not nested.

    >>> Shards(2, 8, 64).nbytes(10**9, MIXED)
    1437500000
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    def __post_init__(self) -> None:
        w, g, o = self.weights, self.gradients, self.optimizer
        if not (0 < w <= g <= o) or g % w or o % g:
            raise ConfigurationError(
                f"degrees ({w}, {g}, {o}): nested groups are needed, 1 <= s_w <= s_g <= s_o and each a multiple of the one "
                "before; such as (2, 8, 64)."
            )

    @classmethod
    def parse(cls, text: str) -> Shards:
        """From "2,8,64"."""
        try:
            w, g, o = (int(part) for part in text.split(","))
        except ValueError:
            raise ConfigurationError(
                f"degrees {text!r}: three whole numbers s_w,s_g,s_o are needed, as 2,8,64."
            ) from None
        return cls(w, g, o)

    @property
    def name(self) -> str:
        """The usual name of these degrees, or the degrees."""
        match (self.weights, self.gradients, self.optimizer):
            case (1, 1, 1):
                return "DDP"
            case (1, 1, _):
                return "ZeRO-1"
            case (1, g, o) if g == o:
                return "ZeRO-2"
            case (w, _, o) if w == o:
                return "ZeRO-3 (FSDP2)"
        return "three levels"

    def nbytes(self, parameters: int, precision: Precision = FP32) -> int:
        """Bytes that one rank keeps, rounded up to whole parameters."""
        parts = (
            (self.weights, precision.weight),
            (self.gradients, precision.gradient),
            (self.optimizer, precision.optimizer),
        )
        return sum(-(-parameters // degree) * each for degree, each in parts)


class Traffic(NamedTuple):
    """Bytes that one rank sends in one phase of an inner step.

    Args:
        phase: what is sent.
        ranks: number of ranks that take part.
        level: number of the level that joins them; 0 is the fastest.
        nbytes: bytes.

    >>> traffic(Shards(8, 8, 8), 1000, 8, [8])[0].phase
    'gather weights, forward and backward'
    """

    phase: str
    ranks: int
    level: int
    nbytes: float


def traffic(
    shards: Shards,
    parameters: int,
    ranks: int,
    levels: Sequence[int],
    precision: Precision = FP32,
    micro_batches: int = 1,
) -> list[Traffic]:
    """Bytes that one rank of a replica sends in an inner step, phase by phase. *Predicted*.

    Gathers before forward and backward, and the reduce-scatter inside s_g, are needed in every micro-batch; traffic across s_g once a
    step. Gradients that are not sharded over all ranks are all-reduced over the others (2(n−1)/n).

    Args:
        shards: over how many ranks each part is spread.
        parameters: number N of parameters.
        ranks: number of ranks of the replica, a multiple of s_o.
        levels: number of ranks that each level joins, from the fastest: (2, 8, 64) is 64 ranks in machines of 8, in pairs.
        precision: bytes of a parameter.
        micro_batches: number of micro-batches in an inner step.

    Raises:
        ConfigurationError: ranks and levels are not multiples of one another.

    >>> sum(phase.nbytes for phase in traffic(Shards(8, 8, 8), 1000, 8, [8], MIXED))  # ZeRO-3: 3·(7/8)·2·N
    5250.0
    """
    nested = min(levels) > 0 and not any(high % low for low, high in pairwise(levels)) and levels[-1] == ranks
    if ranks % shards.optimizer or not nested:
        raise ConfigurationError(
            f"{shards} on {ranks} ranks with levels {tuple(levels)}: the ranks must be a multiple of s_o, each level one of the level "
            "before, of at least 1 rank, and the last level all ranks."
        )
    w, g, o = shards.weights, shards.gradients, shards.optimizer
    weight, gradient = precision.weight * parameters, precision.gradient * parameters

    def level(size: int) -> int:
        return next(index for index, joined in enumerate(levels) if joined >= size)

    phases = [
        ("gather weights, forward and backward", w, micro_batches * 2 * _without_own(w) * weight),
        ("reduce-scatter gradients", g, micro_batches * _without_own(g) * gradient),
        ("reduce-scatter gradients across", o, _without_own(o // g) * gradient / g),
        ("all-reduce gradients over the rest", ranks, 2 * _without_own(ranks // o) * gradient / o),
        ("gather updated weights", o, _without_own(o // w) * weight / w),
    ]
    return [Traffic(phase, size, level(size), nbytes) for phase, size, nbytes in phases if nbytes]


def _without_own(size: int) -> float:
    return (size - 1) / size
