"""Methods as compositions, each as its paper describes it. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from typing import Literal

from thinwire.codecs import (
    DCT,
    E3M0,
    ChunkedTopK,
    Codec,
    Each,
    Identity,
    Int,
    LowRank,
    OverSenders,
    Sign,
    Squares,
    TopK,
)
from thinwire.exchange import AllReduce, Direct, Exchange, TwoShot
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.inner_optimizers import SGD, Muon
from thinwire.pieces.lgreco import LGreCo
from thinwire.pieces.merge import Eager, Mix, Reset
from thinwire.pieces.outer import HeavyBall, Nesterov
from thinwire.pieces.partition import Partition, Strided
from thinwire.pieces.policy import Constant, DensityWarmup, Policy
from thinwire.pieces.schedule import Every, Quadratic, Staggered
from thinwire.pieces.transforms import Clip, Moments, Momentum, Signs
from thinwire.strategy import Gradients, Strategy

SGD_RATE = 100.0  # times AdamW's learning rate: what suited SGD with momentum of those that were tried (docs/log.md, 2026-11-21)


def data_parallel(*, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """The control: the mean gradient at every step, as DistributedDataParallel, in fp32 unless another codec is given.

    Args:
        codec, exchange: how gradients travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> data_parallel().signal
    Gradients()
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def local_sgd(*, every: int = 30, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """Local SGD (Stich, arXiv 1805.09767): average the parameters every `every` steps.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec, exchange: how deltas travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> local_sgd(every=8).schedule
    Every(every=8, delay=0)
    """
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
    """DiLoCo (Douillard et al., arXiv 2311.08105): an outer Nesterov step on the mean delta of the whole model.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr, outer_momentum: η and μ of the outer step.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> diloco(every=100).outer
    Nesterov(lr=0.7, momentum=0.9)
    """
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

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments, partition: how the model is cut, see above; `partition` replaces `fragments`.
        delay: τ, inner steps from departure to landing; less than `every`.
        merge: α, the share of its own values that a replica keeps at a landing, 0 to 1.
        outer_lr, outer_momentum: η and μ of the outer step.
        offsets: the inner step at which each fragment first departs; None: one period, spread evenly.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> streaming_diloco(every=100).schedule
    Staggered(every=100, delay=5, offsets=None)
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


def finetune(
    *,
    every: int = 20,
    fragments: int | None = None,
    delay: int = 2,
    merge: float = 0.0,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.3,
    codec: Codec = E3M0(),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Streaming DiLoCo for short runs, as of adapters: outer rates that need no long run (ours, docs/log.md, 2026-11-22).

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, those of layers; None: as `streaming_diloco`.
        delay: τ, inner steps from departure to landing; less than `every`.
        merge: α, the share of its own values that a replica keeps at a landing, 0 to 1.
        outer_lr, outer_momentum: η and μ of the outer step.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> finetune().outer
    Nesterov(lr=1.0, momentum=0.3)
    """
    return streaming_diloco(
        every=every,
        fragments=fragments,
        delay=delay,
        merge=merge,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        codec=codec,
        exchange=exchange,
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
    """Eager updates (Kale et al., arXiv 2502.12996) on streaming fragments: a whole period in the air, own delta at once.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments, partition: as for `streaming_diloco`.
        outer_lr, outer_momentum: η and μ of the outer step.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> eager_diloco().merge
    Eager()
    """
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
    """SparseLoCo (Sarfi et al., 2025): 64 of 4096 values, and what is held back, with decay, in place of outer momentum.

    Args:
        every: H, inner steps between two rounds of a fragment.
        decay: β, what is kept of what was held back, a round.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> sparse_loco(decay=0.9).feedback.beta
    0.9
    """
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
    """The Quadratic Synchronization Rule (Gu et al., ICLR 2024): average the parameters, the less often the lower the learning rate.

    Args:
        every: the fewest inner steps between two rounds.
        scale, power: a round takes (scale / learning rate)^power steps where that is more than `every`.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> qsr(every=8).schedule
    Quadratic(every=8, scale=0.0175, power=2.0, delay=0)
    """
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
    """CO2 (Sun et al., ICLR 2024): a whole period in the air; old deltas are penalised by how far the anchor has moved, and clipped.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr, outer_momentum: η and μ of the outer step.
        gap: how much a delta is penalised by how far the anchor has moved meanwhile; 0: not.
        clip: φ, the largest value of an element of the outer step; None does not clip.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> co2().merge
    Reset()
    """
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
    """L-GreCo (Markov et al., arXiv 2210.17357): of each matrix as many values as it needs, as few in all as lose no more than one share.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec, exchange, anchors: the codec of a matrix before anything is measured, and as for `diloco`.
        candidates: the codecs among which each matrix gets its own; empty: around `codec`.
        alpha: how much may be lost, relative to `codec` everywhere.
        window: rounds between two choices.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> l_greco(alpha=0.5).policy.alpha
    0.5
    """
    return Strategy(
        schedule=Every(every),
        codec=codec,
        policy=LGreCo(candidates, alpha, window),
        feedback=Feedback(),
        exchange=exchange,
        anchors=anchors,
    )


def dgc(
    *,
    density: float = 0.001,
    momentum: float = 0.9,
    clip: float = 1.0,
    codec: Codec | None = None,
    policy: Policy = DensityWarmup(10),
    exchange: Exchange = Direct(),
) -> Strategy:
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887): momentum before the exchange, the largest 0.1 % of each
    matrix; of gradients at every step.

    Args:
        density: share of a matrix's values that travel, in (0, 1].
        momentum: m, kept before the exchange.
        clip: the norm to which a replica's gradient is clipped, times √M; 0 does not clip.
        codec: in place of the largest `density` of each matrix.
        policy: how the density comes down at the start.
        exchange: how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> dgc(momentum=0.5).filters[1].decay
    0.5
    """
    return Strategy(
        signal=Gradients(),
        filters=(Clip(clip), Momentum(momentum)),
        codec=codec or Each(TopK(density), least=1024),
        policy=policy,
        feedback=Feedback(),
        exchange=exchange,
        inner=SGD(lr_factor=SGD_RATE),
    )


def outer_dgc(
    *,
    every: int = 30,
    density: float = 0.01,
    momentum: float = 0.9,
    codec: Codec | None = None,
    policy: Policy = DensityWarmup(1),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Deep Gradient Compression (arXiv 1712.01887) of deltas: the outer momentum is each replica's own, before the exchange.

    Args:
        every: H, inner steps between two rounds of a fragment.
        density: share of a matrix's values that travel, in (0, 1].
        momentum: m, kept before the exchange, in place of an outer one.
        codec: in place of the largest `density` of each matrix.
        policy: how the density comes down at the start.
        exchange, anchors: how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> outer_dgc(every=50).schedule
    Every(every=50, delay=0)
    """
    return Strategy(
        schedule=Every(every),
        filters=(Momentum(momentum),),
        codec=codec or Each(TopK(density), least=1024),
        policy=policy,
        feedback=Feedback(),
        exchange=exchange,
        anchors=anchors,
    )


def one_bit_adam(
    *,
    freeze: int = 100,
    clip: float = 1.0,
    codec: Codec = Sign("l2", 4096),
    exchange: Exchange = TwoShot(Feedback()),
) -> Strategy:
    """1-bit Adam (Tang et al., arXiv 2102.02888): Adam's first moment in one bit each way, the second frozen after `freeze` steps.

    Args:
        freeze: inner steps of plain Adam, after which the second moment stays as it is.
        clip: the norm to which each replica's gradient is clipped, times √M; 0 does not clip.
        codec, exchange: how gradients travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> one_bit_adam(freeze=1000).filters[1].freeze
    1000
    """
    return Strategy(
        signal=Gradients(),
        filters=(Clip(clip), Moments(freeze=freeze)),
        codec=codec,
        feedback=Feedback(),
        exchange=exchange,
        inner=SGD(),
    )


def ef14(*, codec: Codec = TopK(0.01), exchange: Exchange = Direct(), momentum: float = 0.9) -> Strategy:
    """Error feedback (Seide et al., 2014; Stich et al., arXiv 1809.07599): what a codec loses is added to the next gradient.

    Args:
        codec, exchange: how gradients travel, how packets become their mean.
        momentum: of the inner SGD, whose learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> ef14().feedback.kappa
    0
    """
    return Strategy(
        signal=Gradients(),
        codec=codec,
        feedback=Feedback(),
        exchange=exchange,
        inner=SGD(momentum, lr_factor=SGD_RATE),
    )


def ef21(*, codec: Codec = TopK(0.01), exchange: Exchange = Direct(), momentum: float = 0.9) -> Strategy:
    """EF21 (Richtárik et al., arXiv 2106.05203): differences to what all know of a replica's gradient.

    Args:
        codec, exchange: how gradients travel, how packets become their mean.
        momentum: of the inner SGD, whose learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> ef21().feedback.kappa
    1
    """
    return Strategy(
        signal=Gradients(),
        codec=codec,
        feedback=Feedback(kappa=1, eta=0.0),
        exchange=exchange,
        inner=SGD(momentum, lr_factor=SGD_RATE),
    )


def econtrol(
    *, eta: float = 0.1, codec: Codec = TopK(0.01), exchange: Exchange = Direct(), momentum: float = 0.9
) -> Strategy:
    """EControl (Gao, Islamov, Stich, ICLR 2024): EF21's differences, and a share `eta` of what was lost.

    Args:
        eta: η, the share of what was lost that is added.
        codec, exchange: how gradients travel, how packets become their mean.
        momentum: of the inner SGD, whose learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> econtrol(eta=0.2).feedback.eta
    0.2
    """
    return Strategy(
        signal=Gradients(),
        codec=codec,
        feedback=Feedback(kappa=1, eta=eta),
        exchange=exchange,
        inner=SGD(momentum, lr_factor=SGD_RATE),
    )


def power_sgd(
    *, rank: int = 4, momentum: float = 0.9, codec: Codec | None = None, policy: Policy = Constant()
) -> Strategy:
    """PowerSGD (Vogels et al., arXiv 1905.13727): gradients as matrices of low rank; factors are added on the way, and Q goes on.

    Args:
        rank: r, columns of the factors.
        momentum: of the inner SGD, whose learning rate is `SGD_RATE` times the run's.
        codec, policy: in place of rank `rank`, and how it changes from round to round.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> power_sgd(rank=2).codec.rank
    2
    """
    return Strategy(
        signal=Gradients(),
        codec=codec or LowRank(rank, iterations=1),
        policy=policy,
        feedback=Feedback(),
        exchange=AllReduce(),
        inner=SGD(momentum, lr_factor=SGD_RATE),
    )


def qsgd(*, codec: Codec = Int(4, 512, "fp32", "stochastic"), exchange: Exchange = TwoShot()) -> Strategy:
    """QSGD (Alistarh et al., arXiv 1610.02132): gradients in a few bits, rounded by chance so that the mean is right.

    Args:
        codec, exchange: how gradients travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> qsgd().codec
    Int(bits=4, block=512, scale='fp32', rounding='stochastic')
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def cgx(*, codec: Codec = Each(Int(4, 512, "fp32"), least=1024), exchange: Exchange = Direct()) -> Strategy:
    """CGX (Markov et al., arXiv 2111.08617): gradients of matrices in 4 bits, rounded to the nearest; small tensors in full.

    Args:
        codec, exchange: how gradients travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> cgx().codec.least
    1024
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def demo(
    *,
    decay: float = 0.999,
    clip: float = 0.0,
    codec: Codec = Squares(DCT(OverSenders(ChunkedTopK(4096, 32)), axes=2)),
    exchange: Exchange = Direct(),
) -> Strategy:
    """DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870): the largest cosine components of what was held back, of
    each the mean over those who sent it; sign descent.

    Args:
        decay: β, what is kept of what was held back, a step.
        clip: the norm to which each replica's gradient is clipped, times √M; 0 does not clip.
        codec, exchange: how gradients travel, how packets become their mean.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> demo(decay=0.99).feedback.beta
    0.99
    """
    return Strategy(
        signal=Gradients(),
        filters=(Clip(clip), Signs()),
        codec=codec,
        feedback=Feedback(eta=decay, beta=decay),
        exchange=exchange,
        inner=SGD(),
    )


def muloco(
    *,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec = Identity(),
    feedback: Feedback | None = None,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """MuLoCo (Thérien et al., arXiv 2505.23725): DiLoCo with Muon as inner optimizer.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr, outer_momentum: η and μ of the outer step.
        feedback: what becomes of what the codec loses; None: it is lost.
        codec, exchange, anchors: how deltas travel, how packets become their mean, where anchors lie.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> muloco().inner
    Muon(momentum=0.95)
    """
    return Strategy(
        schedule=Every(every),
        outer=Nesterov(outer_lr, outer_momentum),
        codec=codec,
        feedback=feedback,
        exchange=exchange,
        inner=Muon(),
        anchors=anchors,
    )


RECIPES = {
    f.__name__: f
    for f in (
        *(data_parallel, local_sgd, diloco, streaming_diloco, finetune, eager_diloco, sparse_loco),
        *(qsr, co2, l_greco),
        *(dgc, outer_dgc, one_bit_adam, ef14, ef21, econtrol, power_sgd, qsgd, cgx, demo, muloco),
    )
}
