"""Methods that exchange fragments of the model in turn, during training. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from thinwire.codecs import E3M0, Codec, Sign, TopK
from thinwire.exchange import Direct, Exchange
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.merge import Eager, Keep, KeepUnsent, Mix
from thinwire.pieces.outer import Nesterov
from thinwire.pieces.partition import Partition, Strided
from thinwire.pieces.policies import DenseLast
from thinwire.pieces.schedule import Staggered
from thinwire.strategy import Anchors, Strategy


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
    anchors: Anchors = "host",
) -> Strategy:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): exchange fragments in turn, in 4 bits, during `delay`
    steps of training.

    `fragments` counts the fragments of layers (strided); parameters outside the layers are one more. By default a fragment has
    three layers, as in the paper, or fewer, so that none has more than the share delay / every of them: on a link that just
    carries the average rate, a round of that size takes `delay` steps. `partition` replaces both.

        departs:   Δ_(m,p) = anchor_p − θ_(m,p)(t)          where (t − t_p) mod H = 0, encoded in 4 bits
        lands:     v_p ← μ·v_p + Δ_p,   anchor_p ← anchor_p − η·(Δ_p + μ·v_p)          Δ_p = (1/M)·Σ_m Δ_(m,p)
                   θ_(m,p) ← α·θ_(m,p)(t + τ) + (1 − α)·anchor_p

    *Differs*: fragments have three layers or fewer (above); τ is 5, in most of the paper's runs it is 1; 128
    neighbours share a scale, which the paper leaves open. The outer step starts from the anchor, not from the
    replica's own value of H steps ago.
    *Wire*: (M−1)·(b·N/8 + 48·(P + 1)) bytes every H steps from each of M replicas, for N parameters; b = 4 + 8/128.

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
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> streaming_diloco(every=100).schedule
    Staggered(every=100, delay=5, offsets=None)
    >>> streaming_diloco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    507909
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


def streaming_sign(
    *,
    every: int = 4,
    fragments: int | None = None,
    delay: int = 1,
    codec: Codec = TopK(0.1, Sign(block=1024)),
    feedback: Feedback | None = Feedback(),
    partition: Partition | None = None,
    offsets: tuple[int, ...] | None = None,
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """Streaming local SGD in signs: exchange fragments in turn, the signs of the largest tenth, every 4 steps; feedback keeps the rest.

    The default of `thinwire train`. The composition is ours, its parts are published: fragments in turn (Streaming DiLoCo, arXiv
    2501.18512), signs with error feedback (arXiv 1901.09847), the largest values (arXiv 1809.07599), averages (Local SGD, arXiv
    1805.09767). docs/experiments.md has the experiment.

        departs:   z_m = anchor_p − θ_(m,p)(t) + e_m,   c_m = sign(z_m)·mean|z_m| at the largest tenth of z_m, 0 elsewhere,   e_m ← z_m − c_m
        lands:     anchor_p ← anchor_p − (1/M)·Σ_m c_m,   θ_(m,p) ← anchor_p + (θ_(m,p)(t + τ) − θ_(m,p)(t))

    *Differs*: from `streaming_diloco`: signs of the largest tenth and feedback, H = 4, no outer momentum, and a landing keeps the
    steps of the flight.
    *Wire*: (M−1)·(b·N/8 + 48·(P + 1)) bytes every H steps from each of M replicas, for N parameters; b = 0.63: a sign, 5.25 bits of
    index and 32/1024 of a scale for each tenth value.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: as of `streaming_diloco`.
        delay: τ, inner steps from departure to landing, less than `every`; a longer delay increases the loss.
        feedback: keeps the codec's loss for later rounds; None: it is lost.
        offsets: the inner step at which each fragment first departs; None: one period, spread evenly.
        codec, partition, exchange, anchors: as of `streaming_diloco`.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> streaming_sign().merge
    Keep()
    >>> streaming_sign().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    78565
    """
    return Strategy(
        schedule=Staggered(every, delay, offsets),
        partition=partition or Strided(fragments, share=delay / every),
        codec=codec,
        feedback=feedback,
        exchange=exchange,
        merge=Keep(),
        anchors=anchors,
    )


def streaming_sparse(
    *,
    every: int = 5,
    fragments: int | None = None,
    delay: int = 1,
    codec: Codec = TopK(0.0062, Sign(block=1024)),
    unsent: float = 0.65,
    dense: Codec = TopK(0.25, Sign(block=128)),
    partition: Partition | None = None,
    offsets: tuple[int, ...] | None = None,
    exchange: Exchange = Direct(),
    anchors: Anchors = "host",
) -> Strategy:
    """As `streaming_sign` for links that are ten times thinner: 0.62 % of the values every 5 steps, and 25 % when a run ends.

    A value waits for dozens of steps until it is sent. So a share ρ of what was not sent stays in the replica's own parameters, feedback
    keeps the rest, and the last round sends the signs of the largest quarter. The composition is ours, its parts are published: those of
    `streaming_sign`, and the own part that stays, from CHOCO-SGD (arXiv 1902.00340). docs/experiments.md has the experiment.

        departs:   z_m = anchor_p − θ_(m,p)(t) + e_m,   c_m = sign(z_m)·mean|z_m| at the largest 0.62 % of z_m, 0 elsewhere,   e_m ← z_m − c_m
        lands:     anchor_p ← anchor_p − (1/M)·Σ_m c_m,   θ_(m,p) ← anchor_p − ρ·e_m + (θ_(m,p)(t + τ) − θ_(m,p)(t)),   e_m ← (1 − ρ)·e_m
        ends:      c_m = z_m in the codec `dense`,   θ_(m,p) ← anchor_p

    *Differs*: from `streaming_sign`: 0.62 % and H = 5, ρ is not 0, and the last round is denser. During a run the agreed model lacks what was
    not sent, so its evaluation is worse than that of the final model.
    *Wire*: (M−1)·(b·N/8 + 48·(P + 1)) bytes every H steps from each of M replicas, for N parameters; b = 0.064: a sign, 9.3 bits of
    index and 32/1024 of a scale for each of 0.62 % of the values; once, at the end, 1.31 bits for each parameter.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: as of `streaming_diloco`.
        delay: τ, inner steps from departure to landing, at least 1 and less than `every`.
        unsent: ρ, above 0 and at most 1, the share of what was not sent that stays in the parameters.
        dense: the codec of the last round.
        offsets: the inner step at which each fragment first departs; None: one period, spread evenly.
        codec, partition, exchange, anchors: as of `streaming_sign`.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> streaming_sparse().policy.dense
    TopK(density=0.25, values=Sign(scale='mean', block=128))
    >>> streaming_sparse().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    8028
    """
    return Strategy(
        schedule=Staggered(every, delay, offsets),
        partition=partition or Strided(fragments, share=delay / every),
        codec=codec,
        policy=DenseLast(dense),
        feedback=Feedback(),
        exchange=exchange,
        merge=KeepUnsent(unsent),
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
    anchors: Anchors = "host",
) -> Strategy:
    """Streaming DiLoCo for short runs, such as those of adapters: with outer rates for few rounds.

    The rates are ours; docs/experiments.md has the experiment.

        lands:     v_p ← μ·v_p + Δ_p,   anchor_p ← anchor_p − η·(Δ_p + μ·v_p),   θ_(m,p) ← α·θ_(m,p) + (1 − α)·anchor_p

    *Differs*: from `streaming_diloco` (arXiv 2501.18512) in η, μ, H, τ and α only.
    *Wire*: (M−1)·(b·N/8 + 48·(P + 1)) bytes every H steps from each of M replicas, for N trained parameters; b = 4
    + 8/128.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: as of `streaming_diloco`.
        delay: τ, inner steps from departure to landing; less than `every`.
        merge: α, the share of its own values that a replica keeps at a landing, 0 to 1.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec, exchange, anchors: as of `streaming_diloco`.

    Raises:
        ConfigurationError: a setting that cannot work, with what is needed.

    >>> finetune().outer
    Nesterov(lr=1.0, momentum=0.3)
    >>> finetune().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    507909
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
    anchors: Anchors = "host",
) -> Strategy:
    """Eager updates (Kale et al., arXiv 2502.12996) on streaming fragments: a round takes a whole period; the own delta is applied at once.

        the outer step is taken on   Δ(k−1) + (Δ_m(k) − Δ_m(k−1)) / M          k: the number of the round

    *Differs*: the step has two parts: the part on Δ moves the anchor, the rest is each replica's own
    deviation from it. Fragments in turn and 4 bits are those of `streaming_diloco`.
    *Wire*: (M−1)·(b·N/8 + 48·(P + 1)) bytes every H steps from each of M replicas, for N parameters; b = 4 + 8/128.

    Args:
        every: H, inner steps between two rounds of a fragment.
        fragments: P, number of fragments of layers; None: three layers each.
        partition: another way to cut the model, in place of `fragments`.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec, exchange: how deltas become bytes; how packets become their mean.
        anchors: where anchors and outer state are kept, in "host" memory, on the model's "device" or on "disk".

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> eager_diloco().merge
    Eager()
    >>> eager_diloco().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    507909
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
