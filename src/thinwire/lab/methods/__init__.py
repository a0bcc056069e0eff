"""Methods with their own training loop, over any `Group`: those that are no composition of the other pieces."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.codecs import Codec, Identity, RandomK, TopK
from thinwire.drivers.attached import Attached, Method
from thinwire.lab.methods.codistill import Codistill, Talking
from thinwire.lab.methods.control_rules import Averaged, Gain, Plain, Rule
from thinwire.lab.methods.control_variates import Controlled, ControlVariates
from thinwire.lab.methods.dadao import Dadao
from thinwire.lab.methods.flasc import Federated, Flasc
from thinwire.lab.methods.gradient_codes import Cyclic, Repetition
from thinwire.lab.methods.minmax import Extragradient, Masha1, Masha2, Saddle, Saddling, nbytes_sent
from thinwire.lab.methods.saddle_points import Free, Simplexes, saddle
from thinwire.lab.methods.sequential_codes import Multiplexed, SelectiveRepeat
from thinwire.lab.methods.zeroth_order import JustOneByte, Log, ZerothOrder

_TENTH, _HUNDREDTH = RandomK(0.1), TopK(0.01)


def just_one_byte(*, samples: int = 4, radius: float = 1e-3) -> JustOneByte:
    """Just One Byte (Zelikman et al., 2023): fine-tune with forward passes only, a byte a value on the wire.

        ρ = (L(x + εz) − L(x − εz)) / 2ε,   x ← x − lr/√n·Σ ρ·z          z = N(0, I), drawn from (iteration, replica, sample)

    *Differs*: one byte really travels, the paper's code sends text; no copy of the weights is made and restored.
    *Wire*: (M−1)·(48 + J) bytes an iteration from each of M replicas, whatever the number of parameters.

    Args:
        samples: J, the number of values of ρ that a replica sends in an iteration, two forward passes each.
        radius: ε, the factor of the normal numbers by which the weights are shifted; above 0.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> just_one_byte(samples=8).nbytes_per_period(1_000_000, size=2)  # bytes
    56
    """
    return JustOneByte(samples=samples, radius=radius)


def fedavg(
    *, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0, codec: Codec = Identity()
) -> ControlVariates:
    """FedAvg (McMahan et al., arXiv 1602.05629): `sampled` replicas train alone, their mean is taken.

        x ← x − η_g·(mean of the S sampled x − y_i)          y_i: x after H inner steps on replica i

    *Differs*: there is no server; every replica computes x from the packets, in rank order.
    *Wire*: (M−1)·(48 + nbytes(codec)) bytes every H steps from each of the S sampled replicas, none from the others; deltas in fp32
    before the codec.

    Args:
        every: H, inner steps between two rounds.
        sampled: S, number of replicas that train in a round, drawn alike on all; None: all.
        outer_lr: η_g, the learning rate of the outer step.
        codec: how a delta becomes bytes.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> fedavg(every=20).nbytes_per_period(1_000_000, size=2)  # bytes
    4000048
    """
    return ControlVariates(rule=Plain(), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def scaffold(*, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0) -> ControlVariates:
    """SCAFFOLD (Karimireddy et al., arXiv 1910.06378), in one vector a round: control variates take out the drift.

        y ← y − η·(g + c − c_i),   a_i = (x − y_i)/Ση,   s_i = a_i − c
        x ← x − η_g·Ση·(mean of the S s_i + c),   c_i ← c_i + s_i,   c ← c + (1/M)·Σ s_i

    *Differs*: one vector travels where the paper's algorithm sends two, which is the same; there is no server.
    *Wire*: (M−1)·(48 + 4·N) bytes every H steps from each of the S sampled replicas, for N parameters in fp32; none from the others.

    Args:
        every: H, inner steps between two rounds.
        sampled: S, number of replicas that train in a round, drawn alike on all; None: all.
        outer_lr: η_g, the learning rate of the outer step.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> scaffold().nbytes_per_period(1_000_000, size=2)  # bytes
    4000048
    """
    return ControlVariates(rule=Gain(1.0), every=every, sampled=sampled, outer_lr=outer_lr)


def scallion(
    *, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0, alpha: float = 0.1, codec: Codec = _TENTH
) -> ControlVariates:
    """SCALLION (Huang, Li, Li, ICLR 2024): SCAFFOLD through any unbiased codec.

        s_i = α·(a_i − c),   d_i = decode(encode(s_i))          a_i, c and what follows as in `scaffold`, with d_i for s_i

    *Differs*: there is no server, so nothing is compressed on a way down.
    *Wire*: (M−1)·(48 + nbytes(codec)) bytes every H steps from each of the S sampled replicas, none from the others.

    Args:
        every: H, inner steps between two rounds.
        sampled: S, number of replicas that train in a round, drawn alike on all; None: all.
        outer_lr: η_g, the learning rate of the outer step.
        alpha: α, the share of the control variate's change that is sent, in (0, 1].
        codec: how s_i becomes bytes; unbiased.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> scallion().nbytes_per_period(1_000_000, size=2)  # bytes
    200048
    """
    return ControlVariates(rule=Gain(alpha), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def scafcom(
    *, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0, beta: float = 0.2, codec: Codec = _HUNDREDTH
) -> ControlVariates:
    """SCAFCOM (Huang, Li, Li, ICLR 2024): SCAFFOLD with momentum through any contractive codec.

        v_i ← (1−β)·v_i + β·(a_i + c_i − c),   s_i = v_i − c_i          what follows as in `scallion`

    *Differs*: there is no server, so nothing is compressed on a way down.
    *Wire*: (M−1)·(48 + nbytes(codec)) bytes every H steps from each of the S sampled replicas, none from the others.

    Args:
        every: H, inner steps between two rounds.
        sampled: S, number of replicas that train in a round, drawn alike on all; None: all.
        outer_lr: η_g, the learning rate of the outer step.
        beta: β, the share of the new value in v_i, in (0, 1].
        codec: how s_i becomes bytes; contractive.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> scafcom().nbytes_per_period(1_000_000, size=2)  # bytes
    30751
    """
    return ControlVariates(rule=Averaged(beta), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def flasc(
    *,
    every: int = 10,
    up: float = 0.25,
    down: float = 0.5,
    sampled: int | None = None,
    outer_lr: float = 1e-2,
    codec: Codec = Identity(),
) -> Flasc:
    """FLASC (Kuo et al., arXiv 2406.05233): adapters around a hub, sparse up and down; at densities of 1 FedAdam.

        s = the `down` largest of |p|,   y_i: s after H inner steps,   d_i = the `up` largest of |s − y_i|
        p ← Adam(p, mean of d_i)                                       on replica 0, the hub

    *Differs*: the first round begins with all of p, which all replicas know; H inner steps and not an epoch; `outer_lr` is ten times the
    authors'.
    *Wire*, in a round: 48 + nbytes(up) bytes from each sampled replica; from the hub 48 + nbytes(down) to each that the next round
    samples, and 48 to each other one.

    Args:
        every: H, inner steps between two rounds.
        up, down: share of the values that travel to the hub, and from it, in (0, 1]; 1 sends all, without indices.
        sampled: number of replicas that train in a round, drawn alike on all; None: all.
        outer_lr: the learning rate of the hub's Adam.
        codec: how the values become bytes; an index takes about 2 − log₂ density bits.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> flasc().nbytes_per_period(1_000_000, size=2, rank=1)  # bytes
    1125048
    """
    return Flasc(up=up, down=down, every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def codistill(
    *,
    every: int = 10,
    delay: int = 2,
    probe: int = 256,
    top: int = 8,
    weight: float = 0.5,
    warmup: int = 100,
    temperature: float = 1.0,
    sharpness: float = 5.0,
) -> Codistill:
    """Talking Models (arXiv 2310.03188; codistillation, arXiv 1804.03235): replicas of unlike models learn from each other's predictions.

        p_j = the K most probable tokens of softmax(z_j / T) and the rest, rounded          of replica j, on a shared probe set
        w_j = softmax_j(−s·CE_j)                                                            CE_j: of p_j on the text of the probe set
        ∇_i = ∇ (own loss + λ·T²·Σ_{j≠i} w_j·KL(p_j ‖ q_i))                                 q_i: what replica i itself predicts there

    *Differs*: predictions travel, and no learned encoding of hidden states; all replicas learn, none is a teacher; weights by quality.
    *Wire*: at most 49 + ⌈P·K·b/8⌉ + ⌈P·6/8⌉ + ⌈P·K·7/8⌉ bytes to each other replica every H steps, for P = H·`probe` positions and b bits
    of a token; 48 while λ is 0.

    Args:
        every: H, inner steps between two rounds.
        delay: τ, inner steps for which a round is in flight, fewer than `every`.
        probe: positions of the probe set that a replica predicts and learns from in each inner step.
        top: K, number of tokens of which the probability is told.
        weight: λ, the factor of the divergence beside the own loss after the warm-up; 0: each replica trains alone.
        warmup: inner steps through which λ is 0; in as many more it rises to `weight`.
        temperature: T, the number by which logits are divided; above 0.
        sharpness: s, a number per nat, 0 or more: how much less a replica counts whose predictions are worse.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> codistill().nbytes_per_period(1_000_000, size=3)  # bytes, at most
    80738
    """
    return Codistill(
        every=every, delay=delay, probe=probe, top=top, weight=weight, warmup=warmup, temperature=temperature, sharpness=sharpness
    )  # fmt: skip


METHODS: dict[str, Callable[..., Method]] = {
    f.__name__: f for f in (just_one_byte, fedavg, scaffold, scallion, scafcom, flasc)
}
CODISTILL: dict[str, Callable[..., Codistill]] = {"codistill": codistill}  # replicas may have different models

__all__ = [
    "CODISTILL",
    "METHODS",
    "Attached",
    "Averaged",
    "Codistill",
    "ControlVariates",
    "Controlled",
    "Cyclic",
    "Dadao",
    "Extragradient",
    "Federated",
    "Flasc",
    "Free",
    "Gain",
    "JustOneByte",
    "Log",
    "Masha1",
    "Masha2",
    "Method",
    "Multiplexed",
    "Plain",
    "Repetition",
    "Rule",
    "Saddle",
    "Saddling",
    "SelectiveRepeat",
    "Simplexes",
    "Talking",
    "ZerothOrder",
    "codistill",
    "fedavg",
    "flasc",
    "just_one_byte",
    "nbytes_sent",
    "saddle",
    "scafcom",
    "scaffold",
    "scallion",
]
