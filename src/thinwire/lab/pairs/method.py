"""Methods in which pairs of neighbours take their mean at the times of random clocks, without rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from thinwire.codecs import Codec, Identity
from thinwire.comm.group import Group
from thinwire.drivers.attached import silent
from thinwire.errors import ConfigurationError
from thinwire.lab.pairs.composition import Mixing, PairComposition
from thinwire.lab.pairs.driver import Pairing
from thinwire.lab.topology import Ring, Topology, resistances
from thinwire.packet import HEADER_NBYTES
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.partition import Partition, Whole
from thinwire.types import Observer


class Pairs(PairComposition):
    """Each replica trains by itself; neighbours meet at random times, in virtual time, and take the mean of their weights (AD-PSGD).

    >>> Pairs(every=5).nbytes_per_period(1_000_000, size=8)
    4000048
    """

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Pairing:  # fmt: skip
        """Attach this method to a model. Collective. Raises `ModelError`, `ConfigurationError`, `DisagreementError`, `LinkError`."""
        if self.slow and len(self.slow) != group.size:
            raise ConfigurationError(f"slow={self.slow} for {group.size} replicas: one factor for each is needed.")
        return Pairing(self, model, optimizer, group, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        """Mean bytes, because meetings are random."""
        return HEADER_NBYTES + self.codec.nbytes(numel) if size > 1 else 0


class AcceleratedPairs(Pairs):
    """Like `Pairs`, with a momentum whose η and α̃ follow from the graph (A²CiD²).

    >>> round(AcceleratedPairs().mixing(16).eta, 4), round(AcceleratedPairs().mixing(16).pull, 3)
    (0.1425, 1.872)
    """

    def mixing(self, size: int) -> Mixing:
        if size < 2:
            return Mixing()
        chi1, chi2 = resistances(self.clocks(size).rates)
        return Mixing(1 / (2 * math.sqrt(chi1 * chi2)), math.sqrt(chi1 / chi2) / 2)


def ad_psgd(
    *,
    every: int = 1,
    topology: Topology = Ring(),
    partition: Partition = Whole(),
    slow: tuple[float, ...] = (),
    rates: Literal["even", "fitted"] = "even",
    codec: Codec = Identity(),
) -> Pairs:
    """AD-PSGD (Lian et al., arXiv 1710.06952): two neighbours at a time take their mean, while each computes its gradient.

        replicas i and j meet:     x_i, x_j ← (x_i + x_j) / 2
        an inner step of i ends:   x_i ← x_i − lr·g_i          g_i: the gradient before the meetings during the step

    *Differs*: Poisson clocks in virtual time, a function of the seed, give the pairs and times of all meetings. So the two
    replicas of a meeting wait for each other, and the graph need not be bipartite. Any inner optimizer works.
    *Wire*: 4·N + 48 bytes from each replica of a meeting, for N parameters in fp32: once in H steps of a replica, on
    average; 48 to each neighbour, and the mean of all, at the end. A codec's bytes replace 4·N; it encodes differences from
    the pair's reference r: q_i = codec(x_i − r), m = q_i − q_j, r ← r + (q_i + q_j)/2. Its errors do not change Σx.
    *No delay*: η and α̃ are derived for meetings that take no time, and both replicas must apply the same m; a flight would
    have to be kept across a stop, a checkpoint and the end of either replica. Replicas without a meeting continue to train.

    Args:
        every: H, inner steps between two meetings of a replica over a fragment, in the mean over all replicas.
        topology: the pairs of neighbours that meet; fixed.
        partition: how the model is cut into fragments; each has its own meetings.
        slow: factor of the duration of an inner step on each replica, in virtual time; (): all equal.
        rates: `even`: one rate of meetings for all edges; `fitted`: the rates with which the fewest meetings suffice.
        codec: how differences from the pair's reference become bytes; Identity(): x itself is sent.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> ad_psgd(every=10).nbytes_per_period(1_000_000, size=8)  # bytes, on average
    4000048
    """
    return Pairs(every=every, topology=topology, partition=partition, slow=slow, rates=rates, codec=codec)


def a2cid2(
    *,
    every: int = 1,
    topology: Topology = Ring(),
    partition: Partition = Whole(),
    slow: tuple[float, ...] = (),
    rates: Literal["even", "fitted"] = "even",
    codec: Codec = Identity(),
) -> AcceleratedPairs:
    """A²CiD² (Nabli, Belilovsky, Oyallon, arXiv 2306.08289): AD-PSGD with a momentum that makes replicas on a sparse graph agree sooner.

        between events:            d(x, x̃)/dt = η·(x̃ − x, x − x̃)
        an inner step of i ends:   x_i ← x_i − lr·g_i,   x̃_i ← x̃_i − lr·g_i
        replicas i and j meet:     m = x_i − x_j,   x_i ← x_i − m/2,   x̃_i ← x̃_i − α̃·m,   the same with −m at j
        η = 1 / (2·√(χ₁·χ₂)),   α̃ = ½·√(χ₁/χ₂)

    χ₁ and χ₂ are those of the graph at its rate of meetings.
    *Differs*: both flow before they send, the paper's code sends first; meetings in virtual time, as in
    `ad_psgd`; any inner optimizer's step.
    *Wire*: the bytes of `ad_psgd`, also in a codec; x̃ is not sent. *No delay*: as in `ad_psgd`.

    Args:
        every: H, inner steps between two meetings of a replica over a fragment, in the mean over all replicas.
        topology: the pairs of neighbours that meet; fixed. On a complete graph the momentum has no effect.
        partition: how the model is cut into fragments; each has its own meetings.
        slow: factor of the duration of an inner step on each replica, in virtual time; (): all equal.
        rates: `even`: one rate of meetings for all edges; `fitted`: the rates with which the fewest meetings suffice.
        codec: how differences from the pair's reference become bytes; Identity(): x itself is sent.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> a2cid2().nbytes_per_period(1_000_000, size=8)  # bytes, on average
    4000048
    """
    return AcceleratedPairs(every=every, topology=topology, partition=partition, slow=slow, rates=rates, codec=codec)
