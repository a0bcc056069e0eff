"""The settings of a run's replicas: how they run, reach each other and fail, and their checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from thinwire.app.trainer.checked_settings import CheckedSettings
from thinwire.comm import Link
from thinwire.comm.uplink import check_link
from thinwire.drivers.attached import Method
from thinwire.drivers.elastic import driver as elastic
from thinwire.errors import ConfigurationError
from thinwire.membership.timeouts import grace_seconds
from thinwire.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Placement(CheckedSettings):
    """Number of replicas, how they run and reach each other, and checkpoints."""

    at_least_one: ClassVar[tuple[str, ...]] = ("replicas", "least", "keep")
    positive: ClassVar[tuple[str, ...]] = ("timeout",)
    not_negative: ClassVar[tuple[str, ...]] = ("checkpoint_every",)

    replicas: int = 2
    """Number of replicas (under torchrun: the world is replicas times the ranks of one replica)."""
    carrier: Literal["processes", "threads", "elastic", "secure", "secure-elastic"] = "processes"
    """Replicas as processes under torch.distributed, as threads of one process, elastic: as processes that may die, return and join late,
    secure: as processes that meet at a hub over mutual TLS (thinwire docs secure), or secure-elastic: both."""
    least: int = 2
    """Elastic: number of replicas that a round needs. With fewer they train on and wait. With 1, each may train on alone."""
    grace: str | None = None
    """Elastic: how long a round waits for a late replica, such as 5s or '20 steps'. Default: the schedule's slack."""
    weigh: Literal["alike", "tokens"] | None = None
    """All deltas count alike, or by tokens: if replicas differ in speed. Default: tokens if batches differ or a job packs documents, else alike."""
    evict: bool = False
    """Elastic: remove a replica if most others report that it delays them (thinwire docs diagnosis)."""
    link: str = "none"
    """Emulate a link of this rate and delay under the carrier, such as 50mbit,30ms; trace:FILE,30ms: a file has the rates."""
    slow: tuple[float, ...] = ()
    """Emulate slow machines: replica m takes slow[m] times as long for an inner step, such as 1 2 4, by waiting."""
    uplink: str = "none"
    """Rate at which this replica can really send, such as 100mbit; its connections are paced to share it. none: TCP alone decides."""
    timeout: float = 1800.0  # as `comm.group.TIMEOUT`
    """Seconds without a sign of life of a replica that is waited for, after which the run stops with an error."""
    checkpoint_every: int = 100
    """Inner steps between checkpoints; 0 writes one at a stop only."""
    keep: int = 3
    """Number of checkpoints that are kept."""
    publish: bool = False
    """Publish each version of the agreed weights into the run folder, as lossless changes in bf16, for thinwire follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_link(self.link)
        if self.grace is not None:
            grace_seconds(self.grace, 1.0)
        if self.slow and (len(self.slow) != self.replicas or not all(1 <= one < math.inf for one in self.slow)):
            raise ConfigurationError(
                f"slow={self.slow} with replicas={self.replicas}: one factor of at least 1 is needed for each replica."
            )
        self._check_uplink()

    @property
    def elastic(self) -> bool:
        """Whether replicas may die, return and join late."""
        return self.carrier in ("elastic", "secure-elastic")

    def check_elastic(self, strategy: Strategy | Method, label: str) -> None:
        """Raise `ConfigurationError` if `strategy`, called `label`, cannot run elastically."""
        if strategy.own_loop:
            raise ConfigurationError(
                f"strategy={label} with carrier={self.carrier!r}: a method with its own loop trains in a fixed group; "
                "leave --elastic out, or choose a recipe."
            )
        elastic.check(strategy)
        if self.least > self.replicas:
            raise ConfigurationError(
                f"least={self.least} with replicas={self.replicas}: no round would be possible; choose least <= replicas."
            )

    def _check_uplink(self) -> None:
        uplink = None if self.uplink == "none" else Link.parse(self.uplink)
        if uplink and (uplink.delay_seconds or self.carrier not in ("processes", "secure", "secure-elastic")):
            raise ConfigurationError(
                f"uplink={self.uplink!r} with carrier={self.carrier!r}: a rate alone is needed, such as 100mbit, "
                "and carrier='processes', 'secure' or 'secure-elastic'. "
                "To emulate a link with a delay, use link."
            )
