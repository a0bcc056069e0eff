"""Methods as compositions, each as its paper describes it. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from typing import Literal

from thinwire.codecs import E3M0, ChunkedTopK, Codec, Each, Identity, Sign, TopK
from thinwire.exchange import Direct, Exchange
from thinwire.feedback import Feedback
from thinwire.lgreco import LGreCo
from thinwire.merge import Eager, Mix, Reset
from thinwire.outer import HeavyBall, Nesterov
from thinwire.partition import Partition, Strided
from thinwire.schedule import Every, Quadratic, Staggered
from thinwire.strategy import Gradients, Strategy


def data_parallel(*, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """The control: the mean gradient at every step, as DistributedDataParallel, in fp32 unless another codec is given."""
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def local_sgd(*, every: int = 30, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """Local SGD (Stich, arXiv 1805.09767): average the parameters every `every` steps."""
    return Strategy(schedule=Every(every), codec=codec, exchange=exchange)


def diloco(
    *,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """DiLoCo (Douillard et al., arXiv 2311.08105): an outer Nesterov step on the mean delta of the whole model."""
    return Strategy(
        schedule=Every(every),
        outer=Nesterov(outer_lr, outer_momentum),
        codec=codec,
        exchange=exchange,
        anchors=anchors,
    )


def streaming_diloco(
    *,
    every: int = 30,
    fragments: int | None = None,
    delay: int = 5,
    merge: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec = E3M0(),
    partition: Partition | None = None,
    offsets: tuple[int, ...] | None = None,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments in turn, in the air for `delay` steps, in 4
    bits.

    `fragments` counts those of layers (strided); what is outside the layers is one more. By default a fragment has
    three layers, as in the paper, or fewer, so that none has more than delay / every of them: on a link that just
    carries the average, a fragment of that size flies for `delay` steps. `partition` replaces both.
    """
    return Strategy(
        schedule=Staggered(every, delay, offsets),
        partition=partition or Strided(fragments, share=delay / every),
        codec=codec,
        exchange=exchange,
        outer=Nesterov(outer_lr, outer_momentum),
        merge=Mix(merge),
        anchors=anchors,
    )


def eager_diloco(
    *,
    every: int = 30,
    fragments: int | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec = E3M0(),
    partition: Partition | None = None,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Eager updates (Kale et al., arXiv 2502.12996) on streaming fragments: a whole period in the air, own delta at once."""
    return Strategy(
        schedule=Staggered(every, delay=every),
        partition=partition or Strided(fragments),
        codec=codec,
        exchange=exchange,
        outer=Nesterov(outer_lr, outer_momentum),
        merge=Eager(),
        anchors=anchors,
    )


def sparse_loco(
    *,
    every: int = 30,
    decay: float = 0.95,
    codec: Codec = ChunkedTopK(4096, 64, Sign(block=64)),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """SparseLoCo (Sarfi et al., 2025): 64 of 4096 values, and what is held back, with decay, in place of outer momentum."""
    return Strategy(
        schedule=Every(every),
        codec=codec,
        feedback=Feedback(eta=decay, beta=decay),
        exchange=exchange,
        anchors=anchors,
    )


def qsr(
    *,
    every: int = 4,
    scale: float = 0.0175,
    power: float = 2.0,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """The Quadratic Synchronization Rule (Gu et al., ICLR 2024): average the parameters, the less often the lower the learning rate."""
    return Strategy(schedule=Quadratic(every, scale, power), codec=codec, exchange=exchange, anchors=anchors)


def co2(
    *,
    every: int = 30,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    gap: float = 1.0,
    clip: float | None = 1.0,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """CO2 (Sun et al., ICLR 2024): a whole period in the air; old deltas are penalised by how far the anchor has moved, and clipped."""
    return Strategy(
        schedule=Every(every, delay=every),
        codec=codec,
        exchange=exchange,
        outer=HeavyBall(outer_lr, outer_momentum, gap, clip),
        merge=Reset(),
        anchors=anchors,
    )


def l_greco(
    *,
    every: int = 30,
    codec: Codec = Each(TopK(0.05)),
    candidates: tuple[Codec, ...] = (),
    alpha: float = 1.0,
    window: int = 10,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """L-GreCo (Markov et al., arXiv 2210.17357): of each matrix as many values as it needs, as few in all as lose no more than one share."""
    return Strategy(
        schedule=Every(every),
        codec=codec,
        policy=LGreCo(candidates, alpha, window),
        feedback=Feedback(),
        exchange=exchange,
        anchors=anchors,
    )


RECIPES = {
    f.__name__: f
    for f in (
        *(data_parallel, local_sgd, diloco, streaming_diloco, eager_diloco, sparse_loco),
        *(qsr, co2, l_greco),
    )
}
