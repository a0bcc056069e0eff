"""Methods that exchange deltas of the whole model, beside the core's."""

from __future__ import annotations

from thinwire.codecs import Codec, Identity, TopK
from thinwire.exchange import Direct, Exchange
from thinwire.lab.codecs.per_tensor import Each
from thinwire.lab.gradients.lgreco import LGreCo
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.merge import Reset
from thinwire.pieces.outer import HeavyBall
from thinwire.pieces.policies import DensityWarmup
from thinwire.pieces.policy import Policy
from thinwire.pieces.schedule import Every
from thinwire.pieces.transforms import Momentum
from thinwire.strategy import Anchors, Strategy


def co2(
    *,
    every: int = 30,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    gap: float = 1.0,
    clip: float | None = 1.0,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """CO2 (Sun et al., ICLR 2024): a round takes a whole period; old deltas are damped by the anchor's movement.

        Λ = 1 + gap·‖x_t − x_(t−1)‖ / ‖Δ‖,   Δ: the mean delta of the previous round
        v ← clip(μ·v + Δ / Λ, ±φ),   x_(t+1) ← x_t − η·v,   θ_m ← x_(t+1)

    *Differs*: Λ compares with the norm of the round's mean delta, which all replicas know, and not with the norms of inner
    steps; φ acts on each element.
    *Wire*: (M−1)·(4·N + 48) bytes every H steps from each of M replicas, for N parameters in fp32.

    Args:
        every: H, inner steps between two rounds of a fragment.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        gap: factor of the penalty for the anchor's movement during the round; 0 turns it off.
        clip: φ, the largest magnitude of the values of the outer momentum; None does not clip.
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> co2().merge
    Reset()
    >>> co2().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
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
    anchors: Anchors = "host",
) -> Strategy:
    """L-GreCo (Markov et al., arXiv 2210.17357): choose a density for each matrix, at no more error than one density for all.

        minimise Σ_l bytes(c_l)   subject to   Σ_l ‖z_l − q(z_l; c_l)‖ ≤ alpha·Σ_l ‖z_l − q(z_l; codec)‖

    *Differs*: z_l, the delta and residual of matrix l, is replica 0's in one round, not a mean of ten; the paper
    compresses gradients.
    *Wire*: at most (M−1) times the bytes of `codec` every H steps from each of M replicas; in a round that chooses,
    replica 0 sends 48 + 4 bytes per matrix more to each other replica.

    Args:
        every: H, inner steps between two rounds of a fragment.
        codec: the codec of each matrix before the first choice.
        exchange, anchors: as for `diloco`.
        candidates: the codecs from which each matrix gets its own; empty: finer and coarser forms of `codec`.
        alpha: factor by which the error may exceed that of `codec` for all matrices; above 0.
        window: rounds between two choices.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> l_greco(alpha=0.5).policy.alpha
    0.5
    >>> l_greco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    139111
    """
    return Strategy(
        schedule=Every(every),
        codec=codec,
        policy=LGreCo(candidates, alpha, window),
        feedback=Feedback(),
        exchange=exchange,
        anchors=anchors,
    )


def outer_dgc(
    *,
    every: int = 30,
    density: float = 0.01,
    momentum: float = 0.1,
    codec: Codec | None = None,
    policy: Policy = DensityWarmup(1),
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """Deep Gradient Compression (arXiv 1712.01887) on deltas: each replica applies the outer momentum itself, before the exchange.

        u ← m·u + Δ_m,   v ← v + u,   s_m = the largest of v;   v ← v − s_m;   u ← 0 where something was sent
        anchor ← anchor − (1/M)·Σ_m s_m,   θ_m ← anchor

    *Differs*: the paper compresses gradients, and clips them; the use on deltas, the density of 1 % and the momentum of 0.1 are ours.
    *Wire*: (M−1)·(48 + N·density·(18 − log₂ density)/8) bytes every H steps from each of M replicas, for N parameters
    in matrices, about; more in the first rounds of `policy`.

    Args:
        every: H, inner steps between two rounds of a fragment.
        density: share of a matrix's values that are sent, in (0, 1].
        momentum: m, applied before the exchange instead of an outer one, in (0, 1).
        codec: replaces the default, the largest `density` of each matrix.
        policy: the higher densities of the first rounds.
        exchange: how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> outer_dgc(every=50).schedule
    Every(every=50, delay=0)
    >>> outer_dgc().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    30751
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
