"""Methods that exchange gradients at every step, as compositions. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from thinwire.codecs import (
    DCT,
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
from thinwire.pieces.inner_optimizers import SGD
from thinwire.pieces.policy import Constant, DensityWarmup, Policy
from thinwire.pieces.transforms import Clip, Moments, Momentum, Signs
from thinwire.strategy import Gradients, Strategy

SGD_RATE = 100.0  # times AdamW's learning rate: what suited SGD with momentum of those that were tried (docs/log.md, 2026-11-21)


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
