"""Sequences of mixed lengths onto ranks, so that all finish a micro-step together. *Predicted* by operations.

ByteScale (arXiv 2502.21231): ranks are one pool; in a micro-step a rank holds at most `capacity` tokens, a longer
sequence takes D = ⌈length / capacity⌉ ranks, short ones are packed. Attention is quadratic, so equal tokens are not
equal time: what is balanced is cost(l) = 24·l·h² + 2·l²·h operations forward in a layer (causal: half of 4·l²·h).

*Here*: the sequences of one optimizer step are given. Micro-steps are filled one after the other with the longest that
are left; in each, long sequences first, then longest first onto the rank with the least cost that has room (LPT: within
4/3 of the best where room does not bind). Gradients are right only if the loss is a sum over tokens divided by the tokens
of *all* ranks, and packed sequences do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigurationError, DataError

Cost = Callable[[int], float]


def attention_cost(width: int) -> Cost:
    """Forward operations of a sequence in one layer of that width.

    >>> attention_cost(1024)(2048) / attention_cost(1024)(1024)
    2.1538461538461537
    """
    return lambda length: 24.0 * length * width**2 + 2.0 * length**2 * width


@dataclass(frozen=True)
class MicroStep:
    """What each rank holds: indices of sequences. One that is on several ranks is divided evenly among them."""

    ranks: tuple[tuple[int, ...], ...]

    def loads(self, lengths: Sequence[int], cost: Cost) -> list[float]:
        """Of each rank."""
        spread = {index: sum(index in held for held in self.ranks) for held in self.ranks for index in held}
        return [sum(cost(lengths[index]) / spread[index] for index in held) for held in self.ranks]


@dataclass(frozen=True)
class Packing:
    """All micro-steps of one optimizer step."""

    micro_steps: tuple[MicroStep, ...]
    lengths: tuple[int, ...]
    cost: Cost

    @property
    def makespan(self) -> float:
        """Σ over micro-steps of the busiest rank: what the step takes."""
        return sum(max(step.loads(self.lengths, self.cost)) for step in self.micro_steps)

    @property
    def imbalance(self) -> float:
        """Busiest over mean, in all: 1 is perfect."""
        ranks = len(self.micro_steps[0].ranks)
        return self.makespan * ranks / sum(self.cost(length) for length in self.lengths)


def pack(lengths: Sequence[int], ranks: int, capacity: int, cost: Cost) -> Packing:
    """Balanced micro-steps for all `lengths`.

    >>> packing = pack([4, 3, 3, 2], ranks=2, capacity=6, cost=float)
    >>> packing.micro_steps[0].ranks, packing.imbalance
    (((0, 3), (1, 2)), 1.0)
    """
    _check(lengths, ranks, capacity)
    waiting = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    steps = []
    while waiting:
        held, taken = _fill(waiting, lengths, ranks, capacity, cost)
        steps.append(MicroStep(tuple(tuple(sorted(rank)) for rank in held)))
        waiting = [index for index in waiting if index not in taken]
    return Packing(tuple(steps), tuple(lengths), cost)


def in_order(lengths: Sequence[int], ranks: int, capacity: int, cost: Cost) -> Packing:
    """What a plain loader does: sequences as they come, onto the ranks in turn, as many as fit; the thing to beat."""
    _check(lengths, ranks, capacity)
    steps: list[MicroStep] = []
    held: list[list[int]] = [[] for _ in range(ranks)]
    rank = 0
    for index, length in enumerate(lengths):
        wide = -(-length // capacity)
        places = [rank] if wide == 1 else list(range(wide))
        full = any(sum(lengths[other] for other in held[place]) + length / wide > capacity for place in places)
        if full or (wide > 1 and any(held[place] for place in places)):
            steps.append(MicroStep(tuple(map(tuple, held))))
            held, rank = [[] for _ in range(ranks)], 0
            places = [0] if wide == 1 else places
        for place in places:
            held[place].append(index)
        rank = (places[-1] + 1) % ranks
    steps.append(MicroStep(tuple(map(tuple, held))))
    return Packing(tuple(steps), tuple(lengths), cost)


def _fill(
    waiting: Sequence[int], lengths: Sequence[int], ranks: int, capacity: int, cost: Cost
) -> tuple[list[list[int]], set[int]]:
    """One micro-step. The first, longest sequence sets its length; no rank is filled beyond that where there is a choice."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads, room = [0.0] * ranks, [float(capacity)] * ranks
    taken: set[int] = set()
    remaining = sum(cost(lengths[index]) for index in waiting)
    most_tokens = sum(lengths[index] for index in waiting)
    steps_left = max(1, -(-most_tokens // (ranks * capacity)))
    first = lengths[waiting[0]]
    level = max(remaining / ranks / steps_left, cost(first) / -(-first // capacity))
    for index in waiting:
        length = lengths[index]
        wide = -(-length // capacity)
        share, tokens = cost(length) / wide, length / wide
        order = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        places = [rank for rank in order if room[rank] >= tokens][:wide]
        if len(places) < wide or (taken and steps_left > 1 and loads[places[-1]] + share > 1.02 * level):
            continue
        for rank in places:
            held[rank].append(index)
            loads[rank] += share
            room[rank] -= tokens
        taken.add(index)
    return held, taken


def _check(lengths: Sequence[int], ranks: int, capacity: int) -> None:
    if ranks < 1 or capacity < 1:
        raise ConfigurationError(f"ranks={ranks}, capacity={capacity}: at least 1 of each is needed.")
    if not lengths or min(lengths) < 1:
        raise DataError(
            f"{len(lengths)} sequences, the shortest of {min(lengths, default=0)} tokens: at least one of at least 1 token is needed."
        )
    if max(lengths) > ranks * capacity:
        raise ConfigurationError(
            f"a sequence of {max(lengths)} tokens on {ranks} ranks of {capacity}: at most {ranks * capacity} fit; give --capacity "
            f"{-(-max(lengths) // ranks)}, more ranks, or cut it."
        )
