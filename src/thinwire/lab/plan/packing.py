"""Distributes sequences of mixed lengths over ranks, so that all ranks finish an optimizer step together. *Predicted* by operations.

ByteScale (arXiv 2502.21231): ranks form one pool, and a rank holds at most `capacity` tokens at a time. A longer sequence takes
D = ⌈length / capacity⌉ ranks; short ones are packed. Attention is quadratic, so equal tokens do not take equal time. Therefore
operations are balanced: cost(l) = 24·l·h² + 2·l²·h in the forward pass of a layer (causal: half of 4·l²·h).

*Differs*: the sequences of one optimizer step are given. A rank continues with its next micro-batch without waiting for others;
only the ranks of one sequence begin it together. So the whole step is balanced, not each micro-batch. Long sequences come first,
each on the ranks that are free first. The others follow, the longest first, each on the rank with the least cost (LPT: within 4/3
of the best). A rank's short sequences fill the time in which it would wait for a long one. Gradients are right only if the loss is
a sum over tokens divided by the tokens of *all* ranks, and if packed sequences do not attend to each other. Ranks have different
numbers of micro-batches, so they would wait if every micro-batch had a collective, such as a gather of weights that are sharded
over these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heapreplace

from thinwire.app.jobs.packs import Cost
from thinwire.errors import ConfigurationError, DataError

MOST_RANKS = 1_000_000  # ranks: each has a list of its own
MicroBatch = tuple[int, ...]  # indices of sequences; a sequence on several ranks is divided evenly among them


@dataclass(frozen=True)
class Packing:
    """The micro-batches of each rank in one optimizer step, in order."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    lengths: tuple[int, ...]
    capacity: int
    cost: Cost

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank has finished. Only the ranks of one sequence wait for each other, to begin it together."""
        clock, at = [0.0] * len(self.ranks), [0] * len(self.ranks)
        wide = [wide_of(length, self.capacity) for length in self.lengths]
        waiting: dict[MicroBatch, list[int]] = {}
        ready = list(range(len(self.ranks)))
        while ready:
            rank = ready.pop()
            if at[rank] == len(self.ranks[rank]):
                continue
            batch = self.ranks[rank][at[rank]]
            together = waiting.setdefault(batch, [])
            together.append(rank)
            if len(together) < max(wide[index] for index in batch):
                continue
            begin = max(clock[one] for one in together)
            for one in together:
                clock[one], at[one] = begin + sum(self.cost(self.lengths[i]) / wide[i] for i in batch), at[one] + 1
            ready += waiting.pop(batch)
        return max(clock)

    @property
    def imbalance(self) -> float:
        """Cost of the busiest rank over the mean cost: 1 is perfect."""
        return self.makespan * len(self.ranks) / sum(self.cost(length) for length in self.lengths)


def wide_of(length: int, capacity: int) -> int:
    """Number of ranks that a sequence needs."""
    return -(-length // capacity)


def pack(lengths: Sequence[int], ranks: int, capacity: int, cost: Cost) -> Packing:
    """Balanced micro-batches for all `lengths`.

    >>> packing = pack([4, 3, 3, 2], ranks=2, capacity=6, cost=float)
    >>> packing.ranks, packing.imbalance
    ((((0, 3),), ((1, 2),)), 1.0)
    """
    _check(lengths, ranks, capacity)
    held = [_Rank() for _ in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in order:
        if (wide := wide_of(lengths[index], capacity)) > 1:
            chosen = sorted(held, key=lambda rank: rank.free)[:wide]
            begin = max(rank.free for rank in chosen)
            for rank in chosen:
                rank.take_long(index, begin, cost(lengths[index]) / wide)
    queue = [(rank.work, number) for number, rank in enumerate(held)]
    heapify(queue)
    for index in order:
        if lengths[index] <= capacity:
            work, number = queue[0]
            held[number].short.append(index)
            heapreplace(queue, (work + cost(lengths[index]), number))
    batches = tuple(tuple(rank.micro_batches(lengths, capacity, cost)) for rank in held)
    return Packing(batches, tuple(lengths), capacity, cost)


@dataclass
class _Rank:
    long: list[tuple[int, float, float]] = field(default_factory=list)  # index, begin, end
    short: list[int] = field(default_factory=list)  # the longest first
    work: float = 0.0
    free: float = 0.0  # the end of its last long sequence

    def take_long(self, index: int, begin: float, share: float) -> None:
        self.long.append((index, begin, begin + share))
        self.work, self.free = self.work + share, begin + share

    def micro_batches(self, lengths: Sequence[int], capacity: int, cost: Cost) -> list[MicroBatch]:
        """Micro-batches in order: before each long sequence the short ones that fit in the time until it begins; the others at the end."""
        found: list[MicroBatch] = []
        left, free = self.short, 0.0
        for index, begin, end in self.long:
            taken: list[int] = []
            later: list[int] = []
            for short in left:
                fits = free + cost(lengths[short]) <= begin
                (taken if fits else later).append(short)
                free += cost(lengths[short]) if fits else 0.0
            found += [*_cut(taken, lengths, capacity), (index,)]
            left, free = later, end
        return found + _cut(left, lengths, capacity)


def _cut(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> list[MicroBatch]:
    """Pack sequences into micro-batches by first fit decreasing."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        number = next((n for n, left in enumerate(room) if left >= lengths[index]), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(index)
        room[number] -= lengths[index]
    return [tuple(sorted(held)) for held in bins]


def in_order(lengths: Sequence[int], ranks: int, capacity: int, cost: Cost) -> Packing:
    """The baseline, a plain loader: sequences in their given order, on the ranks in turn, as many as fit."""
    _check(lengths, ranks, capacity)
    done: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    turn = 0

    def begin(rank: int) -> None:
        if held[rank]:
            done[rank].append(tuple(held[rank]))
            held[rank] = []

    for index, length in enumerate(lengths):
        wide = wide_of(length, capacity)
        places = [turn] if wide == 1 else list(range(wide))
        for rank in places:
            if wide > 1 or sum(lengths[other] for other in held[rank]) + length > capacity:
                begin(rank)
            held[rank].append(index)
            if wide > 1:
                begin(rank)
        turn = (places[-1] + 1) % ranks
    for rank in range(ranks):
        begin(rank)
    return Packing(tuple(map(tuple, done)), tuple(lengths), capacity, cost)


def _check(lengths: Sequence[int], ranks: int, capacity: int) -> None:
    if not 1 <= ranks <= MOST_RANKS or capacity < 1:
        raise ConfigurationError(
            f"ranks={ranks}, capacity={capacity}: at least 1 of each, and at most {MOST_RANKS:,} ranks, are needed."
        )
    if not lengths or min(lengths) < 1:
        raise DataError(
            f"{len(lengths)} sequences, the shortest of {min(lengths, default=0)} tokens: at least one of at least 1 token is needed."
        )
    if max(lengths) > ranks * capacity:
        raise ConfigurationError(
            f"a sequence of {max(lengths)} tokens on {ranks} ranks of {capacity}: at most {ranks * capacity} fit; give --capacity "
            f"{-(-max(lengths) // ranks)}, more ranks, or cut it."
        )
