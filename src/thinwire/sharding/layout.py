"""Who holds which part of a vector, and to whom it sends what: pure arithmetic.

The degrees that occur (s_w, s_g, s_o, the hops between, all ranks) are nested, so a rank has one digit for each. A shard
is found by its rank's digits with the *least* one in front: the shards of a fine degree then lie within those of a coarse one, every
stage of a reduction leaves a contiguous slice with the right owner, and nothing has to be put in order afterwards (ZeRO++
swizzles its slices for that).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from thinwire.codecs import ChunkedTopK, Codec, Identity, LowRank, RandomK, TopK, nested
from thinwire.errors import ConfigurationError
from thinwire.sharding.degrees import Shards

WEIGHTS = "weights"  # the ledger's words: whole weights, for forward and backward
SECONDARY = "secondary weights"
WITHIN = "gradients within"  # the ranks of s_g; every micro-batch
ACROSS = "gradients across"  # up to s_o; once a step, as all that follows
REST = "gradients over the rest"  # an all-reduce
UPDATED = "updated weights"
VOTE = "vote"
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the ranks of one site share a model: degrees, and how weights and gradients travel.

    `weights` codes what is gathered (ZeRO++'s qwZ: `Int(8, 2048)`), never what the optimizer keeps. `gradients` codes what is
    reduced (qgZ: `Int(4, 512)`). `first_hop` divides s_g: gradients are reduced among so many neighbours first, then across, and are
    rounded twice whatever the number of ranks. `secondary` divides s_w (hpZ): from the first forward pass of a step on, each rank
    keeps 1/secondary of the weights as they came, and gathers from its neighbours until the optimizer has stepped.

    Sources: ZeRO++ (arXiv 2306.10209); three degrees: Frontier (arXiv 2501.04266); degrees: ZeRO (arXiv 1910.02054).

    >>> Sharding(shards=Shards(8, 8, 8), weights=Identity(), secondary=4, first_hop=4).shards.name
    'ZeRO-3 (FSDP2)'
    """

    shards: Shards = Shards()
    weights: Codec = Identity()
    gradients: Codec = Identity()
    first_hop: int = 1
    secondary: int | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "gradients"):
            codec = getattr(self, name)
            if not isinstance(codec, Codec) or isinstance(codec, type):
                raise ConfigurationError(f"{name}={codec!r}: a Codec is needed, such as Identity() or Int(8, 2048).")
        partial = [c for c in nested(self.weights) if isinstance(c, TopK | ChunkedTopK | RandomK | LowRank)]
        if partial:
            raise ConfigurationError(
                f"weights={self.weights}: {type(partial[0]).__name__} leaves values out, and a weight that is left out is a zero; "
                "choose a dense codec, such as Int(8, 2048) or Cast('bf16')."
            )
        for name, degree, of, whole in (
            ("first_hop", self.first_hop, "s_g", self.shards.gradients),
            ("secondary", self.secondary, "s_w", self.shards.weights),
        ):
            if degree is not None and (degree < 1 or whole % degree):
                raise ConfigurationError(f"{name}={degree} with {of}={whole}: a divisor of {of} is needed.")
        _chain(self, self.shards.optimizer)


def zero_plus_plus(ranks: int, machine: int, weights: Codec, gradients: Codec) -> Sharding:
    """ZeRO++ (arXiv 2306.10209) on `ranks` ranks in machines of `machine`."""
    return Sharding(
        shards=Shards(ranks, ranks, ranks),
        weights=weights,
        gradients=gradients,
        first_hop=machine,
        secondary=machine,
    )


def _chain(sharding: Sharding, ranks: int) -> tuple[int, ...]:
    """All degrees that occur, from 1 up, each a multiple of the one before. Raises `ConfigurationError`."""
    shards = sharding.shards
    chain = sorted({1, sharding.first_hop, shards.weights, shards.gradients, shards.optimizer, ranks})
    if any(high % low for low, high in pairwise(chain)) or ranks < shards.optimizer:
        raise ConfigurationError(
            f"degrees {chain} of {sharding} on {ranks} ranks: each must be a multiple of the one before, so that groups are nested; "
            "such as Shards(2, 4, 8) with first_hop 1, 2 or 4 on 8 or 16 ranks."
        )
    return tuple(chain)


@dataclass(frozen=True)
class Stage:
    """One reduce-scatter: who has 1/low of a vector keeps 1/high of the sum over high/low ranks."""

    low: int
    high: int
    purpose: str


@dataclass(frozen=True)
class Layout:
    """`sharding` on `ranks` ranks. Raises `ConfigurationError` if it does not fit.

    >>> layout = Layout(Sharding(shards=Shards(2, 4, 8)), 8)
    >>> [layout.place(rank, 8) for rank in range(8)]  # rank 4 + 2 + 1 has its least digit in front
    [0, 4, 2, 6, 1, 5, 3, 7]
    """

    sharding: Sharding
    ranks: int

    def __post_init__(self) -> None:
        _chain(self.sharding, self.ranks)

    @cached_property
    def chain(self) -> tuple[int, ...]:
        return _chain(self.sharding, self.ranks)

    def padded(self, numel: int) -> int:
        """The least multiple of all ranks that holds `numel` elements, so that all shards are of one size."""
        return -(-numel // self.ranks) * self.ranks

    def place(self, rank: int, degree: int) -> int:
        """Which of the `degree` shards `rank` holds."""
        place = 0
        for low, high in pairwise(self.chain[: self.chain.index(degree) + 1]):
            place = place * (high // low) + rank % high // low
        return place

    def span(self, rank: int, degree: int, padded: int) -> Span:
        """Where its shard begins and ends."""
        place, size = self.place(rank, degree), padded // degree
        return place * size, (place + 1) * size

    def peers(self, rank: int, low: int, high: int) -> list[int]:
        """The ranks that have the same shard of degree `low`, one for each of degree `high`, in order; `rank` is one."""
        begin = rank // high * high
        return [peer for peer in range(begin, begin + high) if peer % low == rank % low]

    @cached_property
    def within(self) -> tuple[Stage, ...]:
        """The stages of every micro-batch."""
        hops = (1, self.sharding.first_hop, self.sharding.shards.gradients)
        return tuple(Stage(low, high, WITHIN) for low, high in pairwise(hops) if low < high)

    @cached_property
    def beyond(self) -> tuple[Stage, ...]:
        """The stages of a step. What lies beyond s_o is gathered again afterwards."""
        shards = self.sharding.shards
        stages = (Stage(shards.gradients, shards.optimizer, ACROSS), Stage(shards.optimizer, self.ranks, REST))
        return tuple(stage for stage in stages if stage.low < stage.high)

    def held(self, rank: int, numel: int) -> dict[str, int]:
        """Elements that `rank` keeps between steps of a vector of `numel`, by what they are."""
        padded, shards = self.padded(numel), self.sharding.shards
        secondary = {} if self.sharding.secondary is None else {"secondary": padded // self.sharding.secondary}
        return secondary | {
            "weights": padded // shards.weights,
            "gradients": padded // shards.gradients,
            "optimizer": padded // shards.optimizer,
        }

    def sent(
        self, rank: int, numels: Sequence[int], micro_batches: int = 1, itemsize: int = 4
    ) -> dict[str, dict[int, int]]:
        """Bytes that `rank` sends in one step by purpose and peer, for units of so many parameters of `itemsize` bytes; as the ledger
        counts. Predicted.
        """
        counts: dict[str, dict[int, int]] = {}
        for numel in numels:
            for purpose, peer, nbytes in self._messages(rank, self.padded(numel), micro_batches, itemsize):
                of = counts.setdefault(purpose, {})
                of[peer] = of.get(peer, 0) + nbytes
        if self.ranks > 1:
            counts[VOTE] = {peer: 1 for peer in range(self.ranks) if peer != rank}
        return counts

    def _messages(self, rank: int, padded: int, micro_batches: int, itemsize: int) -> Iterator[tuple[str, int, int]]:
        sharding, shards = self.sharding, self.sharding.shards

        def to(purpose: str, low: int, high: int, nbytes: int) -> Iterator[tuple[str, int, int]]:
            for peer in self.peers(rank, low, high):
                if peer != rank and padded:
                    yield purpose, peer, nbytes

        gathers, secondary = 2 * micro_batches, sharding.secondary
        weights = sharding.weights.nbytes(padded // shards.weights)
        yield from to(WEIGHTS, 1, shards.weights, weights * (1 if secondary else gathers))
        if secondary:
            yield from to(SECONDARY, 1, secondary, itemsize * (padded // secondary) * (gathers - 1))
        for stage, times in [*((s, micro_batches) for s in self.within), *((s, 1) for s in self.beyond)]:
            both = 2 if stage.purpose == REST else 1
            nbytes = sharding.gradients.nbytes(padded // stage.high)
            yield from to(stage.purpose, stage.low, stage.high, both * times * nbytes)
        updated = sharding.weights.nbytes(padded // shards.optimizer)
        yield from to(UPDATED, shards.weights, shards.optimizer, updated)


def by_level(sent: Mapping[str, Mapping[int, int]], rank: int, levels: Sequence[int]) -> list[int]:
    """Bytes that `rank` sends over each level; `levels` are the ranks each joins, from the fastest: (2, 4, 8).

    >>> by_level({"weights": {1: 10, 2: 20, 5: 40}}, 0, (2, 4, 8))
    [10, 20, 40]
    """
    counts = [0] * len(levels)
    for peers in sent.values():
        for peer, nbytes in peers.items():
            level = next(i for i, joined in enumerate(levels) if peer // joined == rank // joined)
            counts[level] += nbytes
    return counts
