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

SGD_RATE = 100.0  # times AdamW's learning rate: the best of five for SGD with momentum (docs/log.md, 2026-11-21); ours, not a paper's


def data_parallel(*, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """The control: exchange the mean gradient at every step, as DistributedDataParallel does, in fp32 by default.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> data_parallel().signal
    Gradients()
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def local_sgd(*, every: int = 30, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """Local SGD (Stich, arXiv 1805.09767): average the parameters every `every` steps.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec, exchange: how deltas become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): exchange fragments in turn, in 4 bits, during `delay`
    steps of training.

    `fragments` counts those of layers (strided); what is outside the layers is one more. By default a fragment has
    three layers, as in the paper, or fewer, so that none has more than delay / every of them: on a link that just
    carries the average, a fragment of that size flies for `delay` steps. `partition` replaces both.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: as above.
        partition: another way to cut the model, in place of `fragments`.
        delay: τ, inner steps from departure to landing; less than `every`.
        merge: α, the share of its own values that a replica keeps at a landing, 0 to 1.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        offsets: the inner step at which each fragment first departs; None: one period, spread evenly.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """Eager updates (Kale et al., arXiv 2502.12996) on streaming fragments: a round takes a whole period; the own delta counts at once.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: three layers each.
        partition: another way to cut the model, in place of `fragments`.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """SparseLoCo (Sarfi et al., 2025): send 64 of 4096 values; a decaying residual replaces outer momentum.

    Args:
        every: H, inner steps between two rounds of a fragment.
        decay: β, the share of the residual that is kept per round, in [0, 1].
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """The Quadratic Synchronization Rule (Gu et al., ICLR 2024): average the parameters, less often as the learning rate falls.

    Args:
        every: the fewest inner steps between two rounds.
        scale, power: a round takes (scale / learning rate)^power inner steps, if that is more than `every`.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """CO2 (Sun et al., ICLR 2024): a round takes a whole period; old deltas are damped by how far the anchor has moved.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        gap: factor of the penalty for how far the anchor has moved meanwhile; 0 turns it off.
        clip: φ, the largest magnitude of the values of the outer momentum; None does not clip.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """L-GreCo (Markov et al., arXiv 2210.17357): choose a density for each matrix, with no more loss than one density for all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec: of each matrix, before anything is measured.
        exchange, anchors: as for `diloco`.
        candidates: the codecs from which each matrix gets its own; empty: finer and coarser forms of `codec`.
        alpha: factor by which the loss may exceed that of `codec` for all matrices; above 0.
        window: rounds between two choices.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887): momentum before the exchange, then the largest 0.1 % of
    each matrix, at every step.

    Args:
        density: share of a matrix's values that travel, in (0, 1].
        momentum: m, kept before the exchange, in (0, 1).
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec: replaces the default, the largest `density` of each matrix.
        policy: how the density falls at the start.
        exchange: how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """Deep Gradient Compression (arXiv 1712.01887) on deltas: each replica keeps the outer momentum itself, before the exchange.

    Args:
        every: H, inner steps between two rounds of a fragment.
        density: share of a matrix's values that travel, in (0, 1].
        momentum: m, kept before the exchange in place of an outer one, in (0, 1).
        codec: replaces the default, the largest `density` of each matrix.
        policy: how the density falls at the start.
        exchange: how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """1-bit Adam (Tang et al., arXiv 2102.02888): send Adam's first moment in one bit each way; freeze the second after `freeze` steps.

    Args:
        freeze: inner steps of plain Adam, after which the second moment no longer changes.
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """Error feedback (Seide et al., 2014; Stich et al., arXiv 1809.07599): add what a codec lost to the next gradient.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """EF21 (Richtárik et al., arXiv 2106.05203): send differences to what all know of a replica's gradient.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """EControl (Gao, Islamov, Stich, ICLR 2024): send EF21's differences, plus a share `eta` of what was lost.

    Args:
        eta: η, the share of the residual that is added, in [0, 1].
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """PowerSGD (Vogels et al., arXiv 1905.13727): send gradients as matrices of low rank; their factors are added in transit.

    Args:
        rank: r, columns of each factor.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.
        codec: replaces `LowRank(rank)`.
        policy: how the codec changes from round to round.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
    """QSGD (Alistarh et al., arXiv 1610.02132): send gradients in 4 bits, rounded at random so that the mean is unbiased.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> qsgd().codec
    Int(bits=4, block=512, scale='fp32', rounding='stochastic')
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def cgx(*, codec: Codec = Each(Int(4, 512, "fp32"), least=1024), exchange: Exchange = Direct()) -> Strategy:
    """CGX (Markov et al., arXiv 2111.08617): send gradients of matrices in 4 bits, rounded to nearest; small tensors in full.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
        decay: β, the share of the residual that is kept per step, in [0, 1].
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        feedback: keeps the codec's loss for later rounds; None: it is lost.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory or on the model's "device".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

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
        *(data_parallel, local_sgd, diloco, streaming_diloco, eager_diloco, sparse_loco),
        *(qsr, co2, l_greco),
        *(dgc, outer_dgc, one_bit_adam, ef14, ef21, econtrol, power_sgd, qsgd, cgx, demo, muloco),
    )
}
