"""Methods that exchange gradients at every step, beside the core's, as compositions."""

from __future__ import annotations

from thinwire.codecs import DCT, ChunkedTopK, Codec, Int, Sign, Squares, TopK
from thinwire.exchange import AllReduce, Direct, Exchange, TwoShot
from thinwire.lab.codecs.lowrank import LowRank
from thinwire.lab.codecs.over_senders import OverSenders
from thinwire.lab.codecs.per_tensor import Each
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.inner_optimizers import SGD
from thinwire.pieces.policies import DensityWarmup
from thinwire.pieces.policy import Constant, Policy
from thinwire.pieces.transforms import Clip, Moments, Momentum, Signs
from thinwire.strategy import Gradients, Strategy

SGD_RATE = 100.0  # times AdamW's learning rate: the best factor tried for SGD with momentum (docs/experiments.md)


def dgc(
    *,
    density: float = 0.001,
    momentum: float = 0.9,
    clip: float = 1.0,
    codec: Codec | None = None,
    policy: Policy = DensityWarmup(10),
    exchange: Exchange = Direct(),
) -> Strategy:
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887): apply momentum before the exchange, then send the largest 0.1 % of
    each matrix, at every step.

        g ← clip(g, c·√M),   u ← m·u + g,   v ← v + u,   s_m = the largest of v;   v ← v − s_m;   u ← 0 where something was sent
        w ← w − lr·(1/M)·Σ_m s_m

    *Differs*: the k largest values of each matrix are exact, where the paper estimates a threshold; the stages of
    the warm-up are 10 rounds, the paper's are epochs; `SGD_RATE` is ours.
    *Wire*: (M−1)·(48 + N·density·(18 − log₂ density)/8) bytes a step from each of M replicas, for N parameters in
    matrices, about; more in the warm-up.

    Args:
        density: share of a matrix's values that are sent, in (0, 1].
        momentum: m, applied before the exchange, in (0, 1).
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec: replaces the default, the largest `density` of each matrix.
        policy: the higher densities of the first rounds.
        exchange: how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> dgc(momentum=0.5).filters[1].decay
    0.5
    >>> dgc().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    3543
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
    *, freeze: int = 100, clip: float = 1.0, codec: Codec = Sign("l2", 4096), exchange: Exchange = TwoShot(Feedback())
) -> Strategy:
    """1-bit Adam (Tang et al., arXiv 2102.02888): send Adam's first moment in one bit in both directions; freeze the second after `freeze` steps.

        t < freeze:   m ← β₁·m + (1−β₁)·ḡ,   v ← β₂·v + (1−β₂)·ḡ²,   w ← w − lr·m / (√v + ε)
        after:        q_i = C(m_i + δ_i),   δ_i ← m_i + δ_i − q_i,   m ← C(mean of q_i + δ̄),   w ← w − lr·m / (√v + ε)

    *Differs*: 4096 neighbours share one scale, where DeepSpeed has one for a tensor; without bias correction, as in
    DeepSpeed. The paper's test for the freeze is `Moments(freeze=Settled())`; 100 steps are ours.
    *Wire*: 2·(M−1)/M·4·N bytes a step from each of M replicas until the freeze, 2·(M−1)/M·(1 + 32/4096)·N/8 after
    it, and 48 bytes a message.

    Args:
        freeze: inner steps of plain Adam, after which the second moment no longer changes.
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> one_bit_adam(freeze=1000).filters[1].freeze
    1000
    >>> one_bit_adam().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    126078
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

        c_i = C(g_i + e_i),   e_i ← e_i + g_i − c_i,   w ← w − lr·momentum((1/M)·Σ_i c_i)

    *Differs*: the inner optimizer has momentum, the papers' has none (`momentum=0.0`); `SGD_RATE` is ours.
    *Wire*: (M−1)·(48 + N·0.01·(18 − log₂ 0.01)/8) bytes a step from each of M replicas, for N parameters.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> ef14().feedback.kappa
    0
    >>> ef14().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    30751
    """
    return Strategy(
        signal=Gradients(), codec=codec, feedback=Feedback(), exchange=exchange, inner=SGD(momentum, lr_factor=SGD_RATE)
    )


def ef21(*, codec: Codec = TopK(0.01), exchange: Exchange = Direct(), momentum: float = 0.9) -> Strategy:
    """EF21 (Richtárik et al., arXiv 2106.05203): send differences from a reference of each replica's gradient, which all replicas know.

        c_i = C(g_i − h_i),   h_i ← h_i + c_i,   w ← w − lr·momentum((1/M)·Σ_i h_i)

    *Differs*: h begins at zero, without a first gradient in full; the inner optimizer has momentum, the paper's has
    none (`momentum=0.0`); `SGD_RATE` is ours.
    *Wire*: (M−1)·(48 + N·0.01·(18 − log₂ 0.01)/8) bytes a step from each of M replicas, for N parameters.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> ef21().feedback.kappa
    1
    >>> ef21().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    30751
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

        c_i = C(g_i − h_i + η·e_i),   e_i ← e_i + g_i − h_i − c_i,   h_i ← h_i + c_i
        w ← w − lr·momentum((1/M)·Σ_i h_i)

    *Differs*: η is a constant, as in the paper's experiments; its theory needs a smaller one. The inner optimizer has
    momentum (`momentum=0.0`: none); `SGD_RATE` is ours.
    *Wire*: (M−1)·(48 + N·0.01·(18 − log₂ 0.01)/8) bytes a step from each of M replicas, for N parameters.

    Args:
        eta: η, the share of the residual that is added, in [0, 1].
        codec, exchange: how gradients become bytes; how packets become their mean.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> econtrol(eta=0.2).feedback.eta
    0.2
    >>> econtrol().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    30751
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

        P = orthonormal(mean of (G_i + e_i)·Q),   Q_i = (G_i + e_i)ᵀ·P,   Q ← mean of Q_i
        e_i ← G_i + e_i − P·Q_iᵀ,   w ← w − lr·momentum(P·Qᵀ)

    *Differs*: momentum is PyTorch's, the released code steps by ḡ + v; feedback compares with the replica's own
    message; `SGD_RATE` is ours.
    *Wire*: 2·(M−1)/M·4·r·(n + m) bytes a step from each of M replicas for a matrix of n × m, in two phases; vectors
    travel in full.

    Args:
        rank: r, columns of each factor.
        momentum: of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.
        codec: replaces `LowRank(rank)`.
        policy: how the codec changes from round to round.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> power_sgd(rank=2).codec.rank
    2
    >>> power_sgd().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    32196
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

        g ← (1/M)·Σ_m q(g_m),   q(x) = s·round(x / s),   s = the largest magnitude of 512 neighbours / 7,   E q(x) = x

    *Differs*: the norm is the largest magnitude, as in the paper's experiments; codes have four bits each, without
    Elias' coding; the mean is rounded once more (`TwoShot`).
    *Wire*: 2·(M−1)/M·(4 + 32/512)·N/8 bytes a step from each of M replicas, for N parameters, and 48 bytes a
    message.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> qsgd().codec
    Int(bits=4, block=512, scale='fp32', rounding='stochastic')
    >>> qsgd().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    507914
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def cgx(*, codec: Codec = Each(Int(4, 512, "fp32"), least=1024), exchange: Exchange = Direct()) -> Strategy:
    """CGX (Markov et al., arXiv 2111.08617): send gradients of matrices in 4 bits, rounded to nearest; small tensors in full.

        g ← (1/M)·Σ_m q(g_m),   q(x) = s·round(x / s),   s = the largest magnitude of 512 neighbours / 7

    *Differs*: levels are symmetric, the paper has 16 from the least to the largest value (`codec=Each(Levels(4,
    512), least=1024)`); gradients go from each replica to every other, and are rounded once.
    *Wire*: (M−1)·(48 + (4 + 32/512)·N/8) bytes a step from each of M replicas, for N parameters; tensors below 1024
    values in fp32.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> cgx().codec.least
    1024
    >>> cgx().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    507864
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def demo(
    *,
    decay: float = 0.999,
    clip: float = 0.0,
    codec: Codec = Squares(DCT(OverSenders(ChunkedTopK(4096, 32)), axes=2)),
    exchange: Exchange = Direct(),
) -> Strategy:
    """DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870): send the largest cosine components of the residual, average each
    over the replicas that sent it, and descend by sign.

        e ← β·e + g,   c_m = the largest 32 of each 4096 cosine components of e,   e ← e − c_m
        w ← w − lr·sign(for each component the mean over the replicas that sent it)

    *Differs*: e accumulates g and not lr·g, which is the same while lr is constant; values are sent in bf16 and indices
    in 12 bits, the released code's indices in 64.
    *Wire*: (M−1)·(48 + N·(32/4096)·(16 + 12)/8) bytes a step from each of M replicas, for N parameters.

    Args:
        decay: β, the share of the residual that is kept per step, in [0, 1].
        clip: c; each replica's gradient is clipped to the norm c·√M. 0 does not clip.
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> demo(decay=0.99).feedback.beta
    0.99
    >>> demo().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    27394
    """
    return Strategy(
        signal=Gradients(),
        filters=(Clip(clip), Signs()),
        codec=codec,
        feedback=Feedback(eta=decay, beta=decay),
        exchange=exchange,
        inner=SGD(),
    )
