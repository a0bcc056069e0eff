"""The composition of a method in which neighbours meet in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.drivers.attached import Method, Traits
from thinwire.drivers.unequal.timeline import done
from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Clocks, Ring, Topology, fitted_rates, meeting_rates
from thinwire.pieces.partition import Partition, Whole
from thinwire.pieces.piece import check_piece


@dataclass(frozen=True)
class Mixing:
    """The changes of a replica's x and its momentum x̃ between events and in a meeting.

        d(x, x̃)/dt = η·(x̃ − x, x − x̃),    m = x_i − x_j:   x_i ← x_i − m/2,   x̃_i ← x̃_i − α̃·m

    Args:
        eta: η; 0: no momentum.
        pull: α̃.

    >>> import torch
    >>> x, ahead = Mixing(eta=0.5).flowed(torch.zeros(1), torch.ones(1), math.log(2))
    >>> x.item(), ahead.item()
    (0.25, 0.75)
    """

    eta: float = 0.0
    pull: float = 0.5

    def flowed(self, x: Tensor, ahead: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
        """x and x̃ after `seconds` without events; their sum does not change."""
        moved = (ahead - x) * (-math.expm1(-2 * self.eta * seconds) / 2)
        return x + moved, ahead - moved

    def met(self, x: Tensor, ahead: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """x and x̃ after a meeting in which this replica sent `own` for x and its neighbour sent `other`; the sums over both do not change."""
        apart = own - other
        return x - apart / 2, ahead - apart * self.pull


@dataclass(frozen=True, kw_only=True)
class PairComposition(Method):
    """The topology, timing and codec of meetings; a frozen value.

    Args:
        every: H, inner steps between two meetings of a replica over a fragment, in the mean over all replicas.
        topology: the edges over which replicas meet; fixed.
        partition: how the model is cut into fragments; each has its own meetings.
        slow: the time of an inner step of replica m is slow[m]; (): all take the same time.
        rates: `even`: all edges have one rate of meetings; `fitted`: the rates with which the fewest meetings suffice (`fewest_meetings`).
        codec: encodes the difference from the pair's common reference. Identity(): x itself is sent, without a reference.
        seed: seed of the meetings, and of random numbers of the codec.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> PairComposition(slow=(1, 2)).step_time(0, size=2), PairComposition(slow=(1, 2)).step_time(1, size=2)
    (0.75, 1.5)
    """

    every: int = 1
    topology: Topology = Ring()
    partition: Partition = Whole()
    slow: tuple[float, ...] = ()
    rates: Literal["even", "fitted"] = "even"
    codec: Codec = Identity()
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(own_steps=len(set(self.slow)) > 1)

    def __post_init__(self) -> None:
        for name, kind in (("topology", Topology), ("partition", Partition), ("codec", Codec)):
            check_piece(name, getattr(self, name), kind)
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(f"every={self.every}: at least 1 inner step between two meetings is needed.")
        if not all(0 < one < math.inf for one in self.slow):
            raise ConfigurationError(f"slow={self.slow}: factors above 0 are needed.")
        if self.rates not in ("even", "fitted"):
            raise ConfigurationError(f"rates={self.rates!r}: even or fitted is needed.")
        if self.codec.joint or self.codec.varies or self.codec.samples:
            raise ConfigurationError(
                f"{self.codec}: a pair needs a contractive codec of fixed size whose packets decode alone; otherwise their common reference "
                "diverges. Choose E3M0() or TopK(0.1)."
            )
        if not self.topology.fixed:
            meeting_rates(self.topology, 2, 1.0)

    def mixing(self, size: int) -> Mixing:
        """The mixing among `size` replicas. Raises `ConfigurationError` if the topology does not fit."""
        return Mixing()

    def clocks(self, size: int, fragments: int = 1) -> Clocks:
        """The clocks of meetings, in mean inner steps. Raises `ConfigurationError` if the topology does not fit."""
        rates = meeting_rates if self.rates == "even" else fitted_rates
        return Clocks(rates(self.topology, size, 1 / self.every), fragments, self.seed)

    def step_time(self, rank: int, size: int) -> float:
        """Duration of an inner step of replica `rank`, in mean inner steps."""
        return self.slow[rank] * sum(1 / one for one in self.slow) / size if self.slow else 1.0

    def progress(self, rank: int, size: int, step: int) -> int:
        """Mean number of inner steps that all replicas have taken before `rank` can take another after its `step`-th."""
        return done(self.slow or (1.0,) * size, rank, step) // size
