"""The method with a server at each site and a global one (HALoS)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.codecs import E3M0, Codec
from thinwire.comm.group import Group
from thinwire.drivers.attached import Method, silent
from thinwire.drivers.unequal.messages import DOWN, UP, SyncerMessages
from thinwire.errors import ConfigurationError
from thinwire.lab.sites.composition import SiteComposition
from thinwire.lab.sites.driver import SiteReplica
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.outer import DelayedNesterov
from thinwire.types import Observer


@dataclass(frozen=True, kw_only=True)
class Halos(SiteComposition, Method):
    """The replicas of a site train around its server; the servers train around a global one.

    >>> Halos(sites=2, apart=4).nbytes_between(1_000_000, size=4)  # an update and its reply
    1015796
    """

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> SiteReplica:  # fmt: skip
        """Attach this method to a model. Collective. Raises `ModelError`, `ConfigurationError`, `DisagreementError`, `LinkError`."""
        least = min(map(len, self.ranks(group.size)))
        if self.slow and len(self.slow) != group.size:
            raise ConfigurationError(f"slow={self.slow} for {group.size} replicas: one factor for each is needed.")
        if self.quorum > least:
            raise ConfigurationError(f"quorum={self.quorum}: the smallest site has {least} replicas; at most these.")
        return SiteReplica(self, model, optimizer, group, observer, clock)

    def nbytes_between(self, numel: int, size: int) -> int:
        """Bytes between a site and the global server for one update: the update and its reply."""
        return sum(self._wire(len(self.ranks(size)), numel).nbytes(tag, 0) for tag in (UP, DOWN))

    def nbytes_per_period(self, numel: int, size: int, rank: int = 1, period: int = 0) -> int:
        """Bytes in the mean over periods, if deltas come one by one: n replicas of a site cause n rounds and n/K updates in each."""
        sites = self.ranks(size)
        site = next(site for site, ranks in enumerate(sites) if rank in ranks)
        near, above = self._wire(len(sites[site]) + 1, numel), self._wire(len(sites), numel)
        if rank != sites[site][0]:
            return near.nbytes(UP, 0)
        count = len(sites[site])
        within = (count - 1) * (count + count / self.apart) * near.nbytes(DOWN, 0)
        replies = (size - count) / self.apart * above.nbytes(DOWN, 0)
        return round(within + (count / self.apart * above.nbytes(UP, 0) if site else replies))

    def _wire(self, size: int, numel: int) -> SyncerMessages:
        return SyncerMessages(size, 0, [numel], [self.codec], [self.down])


def halos(
    *,
    sites: int | tuple[int, ...] = 2,
    every: int = 30,
    apart: int = 4,
    updates: int = 2,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    global_lr: float = 0.7,
    global_momentum: float = 0.5,
    global_updates: int = 2,
    merge: float = 0.75,
    codec: Codec = E3M0(),
    slow: tuple[float, ...] = (),
    delay: int = 0,
) -> Halos:
    """HALoS (Kim et al., arXiv 2506.04531): a server at each site, and a global one above them; nobody waits for anybody.

        a delta Δ comes to its site's server:    a ← a − η·Δ/n,   S ← S + Δ/n;   every N-th: v ← μ·v + S, and a ← a − η·μ·v more
        every K-th, its update departs:          U = b − a,   b ← a
        U comes to the global server:            the same with G, U/S, η_g, μ_g and N_g; it replies with G to this site alone
        the reply lands:                         a ← a − z,   b ← b − z,   z = (1 − α)·(b − G)

    n is the number of a site's replicas, S the number of sites.
    *Differs*: the training of a site while its update travels is in the next update; weights by tokens and age; 4 bits in all
    directions, with feedback or as differences; a replica keeps its progress when its server's model lands.
    *Wire*: within a site the bytes of `async_local_sgd`, and a message down for each reply. Between sites 80 + nbytes(codec) bytes up and
    56 + 17·S + nbytes(codec) down once in K rounds of a site; at the end the model in fp32, once to each site.

    Args:
        sites: number of sites, of as equal a size as possible, or the number of replicas of each, such as (2, 2); in rank order.
        every: H, inner steps between two deltas, in the mean over the replicas of a site; each has its own by its speed.
        apart: K, number of rounds of a site between two of its updates.
        updates: N, number of deltas after which the momentum of a site changes.
        outer_lr: η, the learning rate of a site's outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        global_lr: η_g, the learning rate of the global outer step.
        global_momentum: μ_g, its momentum, in [0, 1).
        global_updates: N_g, number of updates after which the global momentum changes; the number of sites is usual.
        merge: α, the share of its own model that a site keeps when the global one lands, in [0, 1).
        codec: how deltas, estimates, updates and replies become bytes.
        slow: factor of the duration of an inner step on each replica, in virtual time; (): real time.
        delay: τ, inner steps in the mean over all replicas from a site's update to the landing of its reply; in virtual time only.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> halos(sites=(2, 2)).nbytes_between(1_000_000, size=4)  # bytes on the link between sites, for an update and its reply
    1015796
    >>> halos(sites=(2, 2)).nbytes_per_period(1_000_000, size=4, rank=2)  # bytes, from the second site's server
    1523746
    """
    return Halos(
        sites=sites, every=every, apart=apart, codec=codec, down=codec, merge=merge, slow=slow, delay=delay,
        outer=DelayedNesterov(outer_lr, outer_momentum, updates),
        above=DelayedNesterov(global_lr, global_momentum, global_updates),
    )  # fmt: skip
