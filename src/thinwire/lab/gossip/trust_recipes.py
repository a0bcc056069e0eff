"""Gossip in which each replica judges its neighbours."""

from __future__ import annotations

from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.trust import Bristle, SybilWall
from thinwire.lab.topology import Ring, Topology
from thinwire.pieces.merge import Keep
from thinwire.pieces.partition import Partition, Whole
from thinwire.pieces.schedule import Staggered
from thinwire.strategy import Strategy


def bristle(
    *, every: int = 10, delay: int = 0, topology: Topology = Ring(), partition: Partition = Whole()
) -> Strategy:
    """Bristle (Verbraeken et al., arXiv 2110.11006): each replica weighs its neighbours' models by their losses on its own validation batches.

        v_jc = min(1, ½·exp(L_c(θ_i) − L_c(θ_j))),   w_ij = certainty_j · max(0, 10·sigmoid(Σ_c s_jc / 100) − 4)
        x_i ← (θ_i + Σ_j w_ij·θ_j) / (1 + Σ_j w_ij),   θ_i ← x_i          s_jc: see `Bristle`; own weight 1, an equal model's ½

    *Differs*: the paper weighs the columns of a classifier's output layer, on frozen features, by F1 for each class. Here
    the whole model is weighed, by the ratio of perplexities. All neighbours are tried. At the end all replicas take the median.
    *Wire*: 4·N + 48 bytes to each neighbour every H steps, for N parameters in fp32; at the end the median of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        topology: which replicas send to which.
        partition: how the model is cut into fragments; each is weighed separately.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> bristle().exchange.rule
    Bristle()
    >>> bristle().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    8000768
    """
    return Strategy(
        schedule=Staggered(every, delay), partition=partition, exchange=Gossip(topology, Bristle()), merge=Keep()
    )


def sybil_wall(
    *,
    every: int = 10,
    delay: int = 0,
    topology: Topology = Ring(),
    width: int = 1 << 14,
    reach: int = 8,
    partition: Partition = Whole(),
) -> Strategy:
    """SybilWall (Werthenbach, Pouwelse, arXiv 2306.15044): neighbours that resemble each other, or others far away, count less.

        h_j = sketch(θ_j − x_0);   w_ij: the weights of FoolsGold from the cosines of all h that replica i knows
        x_i ← (θ_i + Σ_j w_ij·θ_j) / (1 + Σ_j w_ij),   θ_i ← x_i

    Use it only for replicas with different data. If data are alike, it keeps liars and drops the others.

    *Differs*: h begins at the common start, and is a random projection. At the end all replicas take the median.
    *Wire*: 4·N + 48 and 4·width + 60 bytes to each neighbour every H steps, for N parameters in fp32; at the end the
    median of all.

    Args:
        every: H, inner steps between two rounds of a fragment.
        delay: τ, inner steps from departure to landing; less than `every`.
        topology: which replicas send to which; the same in every round.
        width: numbers of a sketch, a multiple of 64 up to 65,536.
        reach: how many hops a record travels. With 1 none is sent, which is FoolsGold among neighbours.
        partition: how the model is cut into fragments; each has its own histories.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> sybil_wall(reach=1).exchange.rule
    SybilWall(width=16384, reach=1, rate=0.8)
    >>> sybil_wall().nbytes_per_period([((1000, 1000),)], size=4)  # bytes
    8131960
    """
    return Strategy(
        schedule=Staggered(every, delay),
        partition=partition,
        exchange=Gossip(topology, SybilWall(width, reach)),
        merge=Keep(),
    )
