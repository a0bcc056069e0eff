"""The order of samples: the sample at each position of all epochs, computed on demand, without O(n) memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.rng import derive


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random order of 0..size-1, computed on demand in constant memory.

    A Feistel network on pairs (l, r) in Z_a x Z_b with a·b just above `size`: l += F(r) mod a, r += F(l) mod b, four
    times over. Each step can be undone, so the pairs are permuted; an image ≥ `size` is sent through again until it
    falls inside ("cycle walking", Black & Rogaway 2002), which keeps it one to one.

    Args:
        size: number of indices.
        seed: of the order; an integer number.

    >>> sorted(Permutation(5, seed=3)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    size: int
    seed: int

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of a one-dimensional array of indices."""
        place = index.astype(np.uint64)
        moving = np.ones(len(place), bool)
        while moving.any():
            place[moving] = self._permuted(place[moving])
            moving = place >= self.size
        return place.astype(np.int64)

    def _permuted(self, place: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows = math.isqrt(max(self.size - 1, 0)) + 1
        a, b = np.uint64(rows), np.uint64(-(-self.size // rows))
        left, right = place // b, place % b
        for i in range(4):
            left = (left + self._noise(right, 2 * i) % a) % a
            right = (right + self._noise(left, 2 * i + 1) % b) % b
        return left * b + right

    def _noise(self, x: NDArray[np.uint64], step: int) -> NDArray[np.uint64]:
        """SplitMix64's finisher (Steele et al. 2014) of x and the key of a step, modulo 2^64 as uint64 arrays are."""
        x = x + np.uint64(derive(self.seed, "turn", step))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """The sample at each position (0, 1, 2 and so on) of all epochs; epoch e has the positions from e·samples on, in its own order.

    An epoch has `lanes` parts, one after the other, as many as the run had replicas at the start. Part m holds the samples m,
    m + lanes, ..., in a seeded order. So a replica that reads its part reads the same samples in every epoch, in another order.

    Args:
        samples: number of samples in an epoch.
        seed: of the order; an integer number.
        lanes: number of parts.

    >>> sorted(Order(5, seed=3, lanes=2).samples_at(np.arange(5, 10)).tolist())
    [0, 1, 2, 3, 4]
    """

    samples: int
    seed: int
    lanes: int

    def samples_at(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at a one-dimensional array of positions."""
        epoch, place = np.divmod(position, self.samples)
        found = np.empty_like(place)
        begins = np.array([part_of(self.samples, self.lanes, m)[0] for m in range(self.lanes + 1)])
        lane = np.searchsorted(begins, place, side="right") - 1
        for e, m in {(int(e), int(m)) for e, m in zip(epoch, lane)}:
            here = (epoch == e) & (lane == m)
            begin, end = part_of(self.samples, self.lanes, m)
            order = Permutation(end - begin, derive(self.seed, "order", m, e))
            found[here] = order(place[here] - begin) * self.lanes + m
        return found


def part_of(whole: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of one part when a range from 0 is cut into parts, the longer ones first.

    Args:
        whole: number of elements of the range.
        parts: number of parts.
        index: number of the part, from 0.

    >>> [part_of(7, 3, index) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    size, longer = divmod(whole, parts)
    begin = index * size + min(index, longer)
    return begin, begin + size + (index < longer)
