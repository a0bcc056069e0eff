"""Methods that exchange deltas of the whole model at intervals, as compositions. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from thinwire.codecs import ChunkedTopK, Codec, Identity, Sign
from thinwire.exchange import Direct, Exchange
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.inner_optimizers import Muon
from thinwire.pieces.outer import Nesterov
from thinwire.pieces.schedule import Every, Quadratic
from thinwire.strategy import Anchors, Strategy


def local_sgd(*, every: int = 30, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """Local SGD (Stich, arXiv 1805.09767): average the parameters every `every` steps.

        anchor ← anchor − (1/M)·Σ_m Δ_m,   θ_m ← anchor          Δ_m = anchor − θ_m

    *Differs*: replicas send deltas, not parameters, which gives the same mean up to rounding; any inner optimizer works, and
    its state stays with the replica.
    *Wire*: (M−1)·(4·N + 48) bytes every H steps from each of M replicas, for N parameters in fp32.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec, exchange: how deltas become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> local_sgd(every=8).schedule
    Every(every=8, delay=0)
    >>> local_sgd().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
    """
    return Strategy(schedule=Every(every), codec=codec, exchange=exchange)


def diloco(
    *,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """DiLoCo (Douillard et al., arXiv 2311.08105): an outer Nesterov step on the mean delta of the whole model.

        v ← μ·v + Δ,   Δ = (1/M)·Σ_m (anchor − θ_m)
        anchor ← anchor − η·(Δ + μ·v),   θ_m ← anchor

    *Differs*: H is 30, the paper's is 500; η and μ are the paper's.
    *Wire*: (M−1)·(4·N + 48) bytes every H steps from each of M replicas, for N parameters in fp32.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> diloco(every=100).outer
    Nesterov(lr=0.7, momentum=0.9)
    >>> diloco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
    """
    return Strategy(
        schedule=Every(every), outer=Nesterov(outer_lr, outer_momentum), codec=codec, exchange=exchange, anchors=anchors
    )


def sparse_loco(
    *,
    every: int = 30,
    decay: float = 0.95,
    codec: Codec = ChunkedTopK(4096, 64, Sign(block=64)),
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """SparseLoCo (Sarfi et al., 2025): send 64 of 4096 values; a decaying residual replaces outer momentum.

        e_m ← β·e_m + Δ_m,   c_m = the largest 64 of each 4096 values of e_m,   e_m ← e_m − c_m
        anchor ← anchor − (1/M)·Σ_m c_m,   θ_m ← anchor

    *Differs*: a value is a sign and the mean magnitude of its chunk, where the paper has two bits; chunks are runs
    of the model, not squares of each matrix. `codec=Squares(ChunkedTopK(4096, 64, Codebook()))` is the paper's.
    *Wire*: (M−1)·(48 + N·(64/4096)·(1 + 32/64 + 12)/8) bytes every H steps from each of M replicas, for N
    parameters.

    Args:
        every: H, inner steps between two rounds of a fragment.
        decay: β, the share of the residual that is kept per round, in [0, 1].
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> sparse_loco(decay=0.9).feedback.beta
    0.9
    >>> sparse_loco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    26420
    """
    return Strategy(
        schedule=Every(every), codec=codec, feedback=Feedback(eta=decay, beta=decay), exchange=exchange, anchors=anchors
    )


def qsr(
    *,
    every: int = 4,
    scale: float = 0.0175,
    power: float = 2.0,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """The Quadratic Synchronization Rule (Gu et al., ICLR 2024): average the parameters, less often as the learning rate falls.

        H = max(every, ⌊(scale / η)^power⌋)                                η: the learning rate at the round's first inner step
        anchor ← anchor − (1/M)·Σ_m Δ_m,   θ_m ← anchor

    *Differs*: warm-up is detected and not configured: H is `every` in the first round and while η rises. The
    defaults are the paper's for ViT-B.
    *Wire*: (M−1)·(4·N + 48) bytes a round from each of M replicas, for N parameters in fp32.

    Args:
        every: the fewest inner steps between two rounds.
        scale, power: a round takes (scale / learning rate)^power inner steps, if that is more than `every`.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> qsr(every=8).schedule
    Quadratic(every=8, scale=0.0175, power=2.0, delay=0)
    >>> qsr().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
    """
    return Strategy(schedule=Quadratic(every, scale, power), codec=codec, exchange=exchange, anchors=anchors)


def muloco(
    *,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec = Identity(),
    feedback: Feedback | None = None,
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """MuLoCo (Thérien et al., arXiv 2505.23725): DiLoCo with Muon as inner optimizer.

        inner:   B ← β·B + g,   θ ← θ − lr·0.2·√max(n, m)·orthogonal(g + β·B)          matrices of layers; AdamW for all others
        outer:   as `diloco`

    *Differs*: μ is DiLoCo's 0.9, the paper's best for Muon is 0.6; deltas are sent in fp32. `codec=Int(2, 64),
    feedback=Feedback()` is the paper's variant in two bits.
    *Wire*: (M−1)·(4·N + 48) bytes every H steps from each of M replicas, for N parameters in fp32.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        feedback: keeps the codec's loss for later rounds; None: it is lost.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> muloco().inner
    Muon(momentum=0.95)
    >>> muloco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
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
