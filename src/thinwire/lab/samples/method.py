"""The method in which a sample of the replicas trains in each round, and a changing one of them takes the mean (MoDeST, Plexus)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.comm.group import Group
from thinwire.drivers.attached import silent
from thinwire.errors import ConfigurationError
from thinwire.lab.samples.composition import SampleComposition
from thinwire.lab.samples.driver import PlexusReplica
from thinwire.lab.samples.messages import Kind, SampleMessages
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.types import Observer


@dataclass(frozen=True, kw_only=True)
class Plexus(SampleComposition):
    """A sample of the replicas trains in each round; nobody holds the run.

    >>> Plexus().nbytes_per_period(1_000_000, size=4)
    8000128
    """

    def check_run(self, run: Any, job: Any) -> None:
        if self.sample > run.placement.replicas:
            raise ConfigurationError(
                f"sample={self.sample} of {run.placement.replicas} replicas: at most all can be sampled; give more --replicas."
            )

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> PlexusReplica:  # fmt: skip
        """Attach this method to a model. Collective. Raises `ModelError`, `ConfigurationError`, `DisagreementError`, `LinkError`."""
        self.rules.check(group.size)
        return PlexusReplica(self, model, optimizer, group, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        """Bytes in the mean over replicas and rounds at most: an aggregator may be a participant, and sends nothing to itself."""
        wire = SampleMessages(size, numel * (2 if self.outer_momentum else 1))
        sample = min(self.sample, size)
        both = 2 * wire.nbytes(Kind.MEAN, sample, size) if size > 1 else 0
        return self.aggregators * sample * both // size


def plexus(
    *,
    every: int = 30,
    sample: int = 2,
    aggregators: int = 1,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.5,
    ping_timeout: float = 5.0,
    patience: float = 300.0,
) -> Plexus:
    """Plexus, formerly MoDeST (de Vos et al., arXiv 2302.13837): a sample of the replicas trains in each round, and nobody holds the run.

        participant p of round k:   Δ_p = a − θ_p,   (a_p, v_p) = outer step on Δ_p from (a, v),   to the aggregators
        aggregator of round k:      (a, v) ← mean of (a_p, v_p),   to the sample of round k + 1
        sample of round k:          the first s of all, by MD5("p-k"), that answer a ping; the aggregators are the first a for k + 1

    *Differs*: H inner steps and an outer momentum, which travels with the model; the sample travels with it too, so an aggregator knows for
    whom it waits; a model is kept until the mean with it has arrived elsewhere.
    *Wire*: 8·N bytes (4·N without momentum) and a view of 13·M from each participant to each aggregator and back, in fp32.

    Args:
        every: H, inner steps of a participant in a round.
        sample: s, number of participants of a round.
        aggregators: a, number of replicas to which each of them sends its model; 2 need no patience if one is lost.
        outer_lr: η, the learning rate of the outer step; with 1 and no momentum it is the paper's mean.
        outer_momentum: μ, its momentum, in [0, 1).
        ping_timeout: seconds after which another replica is asked instead of one that does not answer.
        patience: seconds for which an aggregator waits for a model of a replica that is connected.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> plexus(outer_momentum=0.0).nbytes_per_period(1_000_000, size=4)  # bytes, at most, in the mean over replicas
    4000128
    """
    return Plexus(
        every=every, sample=sample, aggregators=aggregators, outer_lr=outer_lr, outer_momentum=outer_momentum,
        ping_timeout=ping_timeout, patience=patience,
    )  # fmt: skip
