"""The settings of a method with two levels: a server at each site, and a global one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from thinwire.codecs import Identity
from thinwire.drivers.unequal.composition import Composition
from thinwire.errors import ConfigurationError
from thinwire.lab.sites.timeline import SiteTimeline
from thinwire.pieces.outer import DelayedNesterov, Outer
from thinwire.pieces.piece import check_piece
from thinwire.pieces.staleness import Correct
from thinwire.rng import derive


@dataclass(frozen=True, kw_only=True)
class SiteComposition(Composition):
    """A frozen value: the pieces of the servers at the sites, as in `Composition`, and those of the global server.

    `every` is the mean over the replicas of a site, and `delay` the time from a site's update to the landing of the reply.

    Args:
        sites: number of sites, of as equal a size as possible, or the number of replicas of each; in rank order.
        apart: K, rounds of a site between two of its updates to the global server.
        above: the outer step of the global server.
        merge: α, the share of its own model that a site keeps when the global one lands.
        site: the site whose server it describes.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> SiteComposition(sites=2).ranks(5)
    ((0, 1, 2), (3, 4))
    """

    sites: int | tuple[int, ...] = 2
    apart: int = 4
    above: Outer = DelayedNesterov(0.7, 0.5)
    merge: float = 0.75
    correct: Correct | None = None
    grace: float = 0.0
    site: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sites if isinstance(self.sites, tuple) else (self.sites,)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigurationError(
                f"sites={self.sites}: the number of sites, or the number of replicas of each, such as (2, 2), is needed."
            )
        if type(self.apart) is not int or self.apart < 1 or not 0 <= self.merge < 1:
            raise ConfigurationError(
                f"apart={self.apart}, merge={self.merge}: at least 1 round, and 0 <= merge < 1, are needed."
            )
        check_piece("above", self.above, Outer)

    def ranks(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each site in a group of `size`. Raises `ConfigurationError` if they do not fit."""
        if isinstance(self.sites, tuple):
            sizes = self.sites
        else:
            sizes = tuple((size + self.sites - 1 - place) // self.sites for place in range(self.sites))
        if sum(sizes) != size or min(sizes) < 1:
            raise ConfigurationError(
                f"sites={self.sites} for {size} replicas: at least one replica at each site is needed, each replica at one site."
            )
        begins = [sum(sizes[:place]) for place in range(len(sizes))]
        return tuple(tuple(range(begin, begin + own)) for begin, own in zip(begins, sizes))

    def of_site(self, site: int) -> SiteComposition:
        """The composition of the server at `site`, with random numbers of its own."""
        return replace(self, site=site, seed=derive(self.seed, "site", site))

    @cached_property
    def upper(self) -> Composition:
        """The composition of the global server."""
        return Composition(
            every=self.every, partition=self.partition, codec=self.codec, down=Identity(), feedback=self.feedback,
            outer=self.above, weigh=self.weigh, correct=None, grace=0.0, patience=self.patience, seed=self.seed,
        )  # fmt: skip

    def timeline(self, fragments: int, own: int = -1) -> SiteTimeline:
        """The timeline of the replicas of `site` in virtual time, for its replica `own` or for its server."""
        slow = [self.slow[rank] for rank in self.ranks(len(self.slow))[self.site]]
        trip = self.delay * len(self.slow) / math.fsum(1 / one for one in self.slow)
        return SiteTimeline(slow, self.every, fragments, self.quorum, self.grace, self.apart, trip, own)
