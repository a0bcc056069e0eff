"""Methods in which replicas exchange with neighbours only, as compositions of pieces. A recipe has no logic: one that needs an `if` lacks a piece."""

from __future__ import annotations

from thinwire.codecs import E3M0, Codec, Identity
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.gasloc import GASLoC
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import AdaptThenCombine, Choco, GossipRule, NoLoCo, PushSum, Tracking
from thinwire.lab.gradients.recipes import SGD_RATE
from thinwire.lab.topology import MoshpitGrid, OnePeerExponential, RandomPairs, Ring, Topology
from thinwire.pieces.inner_optimizers import SAM, SGD
from thinwire.pieces.merge import Keep
from thinwire.pieces.partition import Partition, Whole
from thinwire.pieces.schedule import Every, Staggered
from thinwire.strategy import Strategy


def noloco(
    *,
    every: int = 30,
    delay: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
    topology: Topology = RandomPairs(),
    codec: Codec = Identity(),
    partition: Partition = Whole(),
) -> Strategy:
    """NoLoCo (Kolehmainen et al., arXiv 2506.10911): DiLoCo's outer momentum between two replicas at a time, paired anew in every round.

        δ_i ← α·δ_i + β·[θ − x]_i − γ·(x_i − [x]_i),   x_i ← x_i + δ_i,   θ_i ← x_i          [v]_i = (v_i + v_j) / 2

    *Differs*: j is replica i's partner in this round; each fragment has its own pairs. With another topology [v] is
    the weighted mean of the neighbours. The step has heavy-ball form, as in the released code. H is 30; the
    paper's is 50.
    *Wire*: 2·(4·N + 48) bytes every H steps from each replica, for N parameters in fp32 and any number of replicas;
    at the end the mean of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        outer_lr: β, the learning rate of the outer step.
        outer_momentum: α, its momentum, in [0, 1).
        pull: γ, the share by which a replica moves to its partner, above 0; None: `outer_lr`.
        topology: the neighbours of each replica.
        codec: how deltas become bytes; weights are sent in fp32.
        partition: how the model is cut into fragments; each has its own pairs.

    Raises:
        ConfigurationError: a setting cannot work, or replicas would diverge; the message has the number.

    >>> noloco(every=50).exchange.rule
    NoLoCo(momentum=0.5, lr=0.7, pull=None)
    >>> noloco().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    8000768
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        codec=codec,
        exchange=Gossip(topology, NoLoCo(outer_momentum, outer_lr, pull)),
        merge=Keep(),
    )


def gasloc(
    *,
    every: int = 30,
    delay: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float = 1.0,
    topology: Topology = RandomPairs(),
    partition: Partition = Whole(),
) -> Strategy:
    """GASLoC (Cagnasso, Belilovsky, Oyallon, arXiv 2606.11081): the outer momentum of DiLoCo accelerates gossip on any graph.

        u_i = x_i + η·(θ_i − x_i),   x_i ← u_i − α·(u_i − [u]_i) + γ·(u_i − u_i of the round before),   θ_i ← x_i

    *Differs*: the equation follows a summary by others, because the paper was not available. Its constants are therefore
    missing, and η, γ, α and H are Thinwire's. α·Λ is α·(1 − W) with the weights of the round.
    *Wire*: 4·N + 48 bytes to each neighbour every H steps, for N parameters in fp32; at the end the mean of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: γ, its momentum, in [0, 1).
        pull: α, the share by which a replica is drawn to its neighbours, above 0.
        topology: which replicas exchange with which.
        partition: how the model is cut into fragments; each has its own pairs.

    Raises:
        ConfigurationError: a setting cannot work, or replicas would diverge; the message has the number.

    >>> gasloc(outer_lr=0.5).exchange.rule
    GASLoC(lr=0.5, momentum=0.5, pull=1.0)
    >>> gasloc().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    4000384
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        exchange=Gossip(topology, GASLoC(outer_lr, outer_momentum, pull)),
        merge=Keep(),
    )


def d_psgd(
    *,
    every: int = 1,
    delay: int = 0,
    topology: Topology = Ring(),
    rule: GossipRule = AdaptThenCombine(),
    partition: Partition = Whole(),
) -> Strategy:
    """D-PSGD (Lian et al., arXiv 1705.09056): train, and take the weighted mean of the neighbours' weights.

        AdaptThenCombine:   x_i ← Σ_j w_ij·θ_j
        CombineThenAdapt:   x_i ← Σ_j w_ij·x_j + (θ_i − x_i)          θ_i ← x_i

    *Differs*: the default trains first and then combines, which keeps replicas closer; the paper's order is
    `rule=CombineThenAdapt()`.
    *Wire*: 4·N + 48 bytes to each neighbour every H steps, for N parameters in fp32; at the end the mean of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        topology: which replicas exchange with which.
        rule: the order: AdaptThenCombine() or CombineThenAdapt().
        partition: how the model is cut into fragments.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> d_psgd(every=10).exchange.topology
    Ring()
    >>> d_psgd().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    8000768
    """
    return Strategy(
        schedule=Staggered(every, delay), partition=partition, exchange=Gossip(topology, rule), merge=Keep()
    )


def dfedsam(
    *,
    every: int = 10,
    delay: int = 0,
    radius: float = 0.01,
    momentum: float = 0.9,
    topology: Topology = Ring(),
    partition: Partition = Whole(),
) -> Strategy:
    """DFedSAM (Shi et al., arXiv 2302.04083): D-PSGD whose inner steps take the gradient at the worst point nearby (SAM).

        H inner steps:   ĝ = ∇f(θ + radius·g / ‖g‖),   g = ∇f(θ),   θ_i ← SGD's step along ĝ
        x_i ← Σ_j w_ij·θ_j,   θ_i ← x_i

    *Differs*: H counts steps, while the paper's is five local epochs. The momentum 0.9 is a third party's; the theory has none.
    The factor of its learning rate, `SGD_RATE`, is Thinwire's.
    *Wire*: 4·N + 48 bytes to each neighbour every H steps, for N parameters in fp32; at the end the mean of all. SAM
    adds no bytes, but doubles the compute.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        radius: ρ, the L2 norm of SAM's perturbation of the weights, 0 or more.
        momentum: momentum of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.
        topology: which replicas exchange with which.
        partition: how the model is cut into fragments.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> dfedsam().inner
    SAM(inner=SGD(momentum=0.9, lr_factor=100.0), radius=0.01)
    >>> dfedsam().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    8000768
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        exchange=Gossip(topology, AdaptThenCombine()),
        merge=Keep(),
        inner=SAM(SGD(momentum, lr_factor=SGD_RATE), radius),
    )


def dfedsam_mgs(
    *,
    every: int = 10,
    delay: int = 0,
    gossip_steps: int = 4,
    radius: float = 0.01,
    momentum: float = 0.9,
    topology: Topology = Ring(),
    partition: Partition = Whole(),
) -> Strategy:
    """DFedSAM-MGS (Shi et al., arXiv 2302.04083): `dfedsam` with Q gossip steps in each round.

        z ← θ,   Q times: z_i ← Σ_j w_ij·z_j,   x_i ← z_i,   θ_i ← x_i          λ becomes λ^Q

    *Differs*: as `dfedsam`.
    *Wire*: Q·(4·N + 48) bytes to each neighbour every H steps, and Q times the delay; at the end the mean of all. On
    a large ring a small Q gains little: λ^4 is 0.995 among 100. `OnePeerExponential()` with Q = log₂ M is the exact mean.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        gossip_steps: Q, gossip steps of a round, 1 to 8.
        radius: ρ, the L2 norm of SAM's perturbation of the weights, 0 or more.
        momentum: momentum of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.
        topology: which replicas exchange with which.
        partition: how the model is cut into fragments.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> dfedsam_mgs().exchange.rule
    MGS(rule=AdaptThenCombine(), steps=4)
    >>> dfedsam_mgs().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    32003072
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        exchange=Gossip(topology, MGS(AdaptThenCombine(), gossip_steps)),
        merge=Keep(),
        inner=SAM(SGD(momentum, lr_factor=SGD_RATE), radius),
    )


def moshpit(
    *, every: int = 1, delay: int = 0, topology: Topology = MoshpitGrid(), partition: Partition = Whole()
) -> Strategy:
    """Moshpit SGD (Ryabinin et al., arXiv 2103.03239): exact means in small groups, in every round along another axis of a grid.

        x_i ← mean of θ_j over the row of replica i along axis k mod d,   θ_i ← x_i          d = ⌈log_side M⌉ rounds: the mean of all

    *Differs*: a replica's place on the grid follows from its rank, so it need not search for others; the group is fixed,
    and a replica that dies ends the run. *No codec*: the members of a group were in other groups in the previous round, so
    they have no common value from which to send differences, and an error in whole weights is never corrected.
    *Wire*: about 8·N·(g−1)/g bytes every H steps from each replica in a group of g, for N parameters in fp32: each
    owns a share of the mean. At the end the mean of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        topology: the groups of each round: MoshpitGrid(side), or RandomGroups(group) with random groups in every round.
        partition: how the model is cut into fragments; each begins with another axis.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> moshpit().exchange.topology
    MoshpitGrid(side=4)
    >>> moshpit().nbytes_per_period([((1000, 1000),)], size=16)  # bytes
    6000672
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        exchange=Gossip(topology, AdaptThenCombine()),
        merge=Keep(),
    )


def choco(
    *,
    every: int = 1,
    delay: int = 0,
    step: float = 0.3,
    topology: Topology = Ring(),
    codec: Codec = E3M0(),
    partition: Partition = Whole(),
) -> Strategy:
    """CHOCO-SGD (Koloskova et al., arXiv 1902.00340): neighbours receive differences from a public copy, in any codec.

        q_i = codec(θ_i − x̂_i),   x̂_i ← x̂_i + q_i,   s_i ← s_i + Σ_j w_ij·q_j
        x_i ← θ_i + step·(s_i − x̂_i),   θ_i ← x_i

    *Differs*: the public copy x̂ and its mean s begin at the common start, not at zero. The default `step` suits four
    bits; the paper's values are 0.4 to 0.9, depending on the codec.
    *Wire*: one packet of the codec and 48 bytes to each neighbour every H steps; at the end the mean of all, in
    fp32.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        step: the share of the way to the neighbours that a round takes, in (0, 1]; smaller for coarser codecs.
        topology: the neighbours of each replica; the same in every round.
        codec: how differences become bytes.
        partition: how the model is cut into fragments.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> choco(step=0.2).exchange.rule
    Choco(step=0.2)
    >>> choco().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    1015818
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        codec=codec,
        exchange=Gossip(topology, Choco(step)),
        merge=Keep(),
    )


def sgp(
    *, every: int = 1, delay: int = 0, topology: Topology = OnePeerExponential(), partition: Partition = Whole()
) -> Strategy:
    """Stochastic gradient push (Assran et al., arXiv 1811.10792): edges have one direction, and a scalar weight is sent with the parameters.

        send p_ji·w_i·θ_i and p_ji·w_i to j
        w_i ← Σ_j p_ij·w_j,   x_i ← (Σ_j p_ij·w_j·θ_j) / w_i,   θ_i ← x_i          p_ji = 1 / (1 + out-degree of i)

    *Differs*: the receiver applies p, because all replicas know the graph. With `delay`, a landing keeps the steps of
    the flight.
    *Wire*: 4·N + 48 and 4 + 48 bytes to each neighbour every H steps, for N parameters in fp32; at the end the mean
    of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        topology: the receivers of each replica.
        partition: how the model is cut into fragments.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> sgp().exchange
    Gossip(topology=OnePeerExponential(), rule=PushSum())
    >>> sgp().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    4000436
    """
    return Strategy(
        schedule=Staggered(every, delay), partition=partition, exchange=Gossip(topology, PushSum()), merge=Keep()
    )


def gradient_tracking(*, topology: Topology = Ring(), momentum: float = 0.9) -> Strategy:
    """Gradient tracking (Di Lorenzo, Scutari, arXiv 1602.00591): D-PSGD in which every replica tracks the mean gradient of all.

        y_i ← Σ_j w_ij·y_j + g_i(new) − g_i(old)
        θ_i ← the inner optimizer's step from x_i along y_i,   x_i ← Σ_j w_ij·θ_j

    *Differs*: y is mixed before the new gradient is added, so weights and y are sent in one round. The inner
    optimizer has momentum, and its factor `SGD_RATE` is Thinwire's.
    *Wire*: 2·(4·N + 48) bytes to each neighbour at every step, for N parameters in fp32; at the end the mean of
    all.

    Args:
        topology: which replicas exchange with which.
        momentum: momentum of the inner SGD, in [0, 1). Its learning rate is `SGD_RATE` times the run's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> gradient_tracking().schedule
    Every(every=1, delay=0)
    >>> gradient_tracking().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    16001536
    """
    return Strategy(schedule=Every(1), exchange=Gossip(topology, Tracking()), inner=SGD(momentum, lr_factor=SGD_RATE))
