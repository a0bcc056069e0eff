"""The composition of a method in which neighbours meet in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from thinwire.decoupled.timeline import done
from thinwire.errors import ConfigurationError
from thinwire.pieces.partition import Partition, Whole
from thinwire.topology import Clocks, Ring, Topology, meeting_rates


@dataclass(frozen=True)
class Mixing:
    """The motion of a replica's x and its momentum x̃, between events and in a meeting.

        d(x, x̃)/dt = η·(x̃ − x, x − x̃),    m = x_i − x_j:   x_i ← x_i − m/2,   x̃_i ← x̃_i − α̃·m

    Args:
        eta: η; 0: there is no momentum.
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

    def met(self, x: Tensor, ahead: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """x and x̃ after a meeting with a neighbour whose x is `other`; the sums over both replicas do not change."""
        apart = x - other
        return x - apart / 2, ahead - apart * self.pull


@dataclass(frozen=True, kw_only=True)
class PairComposition:
    """The topology and timing of meetings; a frozen value.

    Args:
        every: H, inner steps between two meetings of a replica over a fragment, in the mean over all replicas.
        topology: the edges over which replicas meet; fixed.
        partition: how the model is cut into fragments; each has its own meetings.
        slow: an inner step of replica m takes slow[m]; (): all take the same time.
        seed: of the meetings.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> PairComposition(slow=(1, 2)).step_time(0, size=2), PairComposition(slow=(1, 2)).step_time(1, size=2)
    (0.75, 1.5)
    """

    every: int = 1
    topology: Topology = Ring()
    partition: Partition = Whole()
    slow: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("topology", Topology), ("partition", Partition)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, type):
                raise ConfigurationError(
                    f"{name}={value!r}: a piece of this kind is needed; see `thinwire docs pieces`."
                )
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(f"every={self.every}: at least 1 inner step between two meetings is needed.")
        if not all(0 < one < math.inf for one in self.slow):
            raise ConfigurationError(f"slow={self.slow}: factors above 0 are needed.")
        if not self.topology.fixed:
            meeting_rates(self.topology, 2, 1.0)

    def mixing(self, size: int) -> Mixing:
        """Among `size` replicas. Raises `ConfigurationError` if the topology does not fit."""
        return Mixing()

    def clocks(self, size: int, fragments: int = 1) -> Clocks:
        """The clocks of meetings, in mean inner steps. Raises `ConfigurationError` if the topology does not fit."""
        return Clocks(meeting_rates(self.topology, size, 1 / self.every), fragments, self.seed)

    def step_time(self, rank: int, size: int) -> float:
        """Duration of an inner step of replica `rank`, in mean inner steps."""
        return self.slow[rank] * sum(1 / one for one in self.slow) / size if self.slow else 1.0

    def progress(self, rank: int, size: int, step: int) -> int:
        """Mean number of inner steps that all replicas have taken before `rank` can take another after its `step`-th."""
        return done(self.slow or (1.0,) * size, rank, step) // size
