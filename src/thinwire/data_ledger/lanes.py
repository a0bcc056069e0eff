"""The reader of a replica whose micro-batches are larger or smaller than those of others.

Micro-batches of b samples on each replica, with g the greatest common divisor of all b: the data have one lane for each g samples, and a
replica reads b/g of them, g samples of each in every micro-batch. So all lanes are read equally far, and all replicas reach the end of an
epoch together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data_ledger.reader import FixedReader
from thinwire.errors import DataError


def lanes_of(batches: Sequence[int]) -> list[range]:
    """The numbers of the lanes of each replica.

    Args:
        batches: number of samples in a micro-batch of each replica.

    >>> lanes_of([8, 4, 2])
    [range(0, 4), range(4, 6), range(6, 7)]
    """
    unit, ends = math.gcd(*batches), [0]
    for batch in batches:
        ends.append(ends[-1] + batch // unit)
    return [range(begin, end) for begin, end in pairwise(ends)]


class LanesReader:
    """Reads the lanes of replica `index`, of replicas with these micro-batches, in a fixed group.

    Args:
        seed: of the order; an integer number.
        batches: number of samples in a micro-batch of each replica.
        index: number of this replica, from 0.

    >>> readers = [LanesReader(seed=0, batches=[2, 1], index=index) for index in range(2)]
    >>> for reader in readers:
    ...     reader.open(samples=6)
    >>> sorted(int(one) for micro in range(2) for reader, n in zip(readers, [2, 1]) for one in reader.micro_batch(micro, n))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, seed: int, batches: Sequence[int], index: int) -> None:
        names = [f"replica-{lane}" for lane in range(lanes_of(batches)[-1].stop)]
        self._unit, self._batch = math.gcd(*batches), batches[index]
        self._lanes = [FixedReader(seed, names, names[lane]) for lane in lanes_of(batches)[index]]
        self.generation, self.count, self._drawn, self.packed = 0, 0, 0, False

    @property
    def samples(self) -> int | None:
        """In an epoch; None before `open`."""
        return self._lanes[0].samples

    def open(self, samples: int) -> None:
        """Set the number of samples in an epoch. Raises `DataError` if another number was set before."""
        for lane in self._lanes:
            lane.open(samples)

    def draw(self, number: int) -> NDArray[np.int64]:
        """The next samples."""
        drawn = [self._sample(at) for at in range(self._drawn, self._drawn + number)]
        self._drawn += number
        return np.array(drawn, dtype=np.int64)

    def _sample(self, at: int) -> int:
        micro, place = divmod(at, self._batch)
        lane, row = divmod(place, self._unit)
        return int(self._lanes[lane].micro_batch(micro, self._unit)[row])

    def trained(self, number: int | None = None) -> None:
        """Note that `number` of the samples drawn (None: all) are in the parameters."""
        self.count = self._drawn if number is None else self.count + number

    def restart(self) -> None:
        """Draw again from the first sample that is not trained."""
        self._drawn = self.count

    def micro_batch(self, micro: int, number: int) -> NDArray[np.int64]:
        """The samples of micro-batch `micro`, in any order of calls."""
        self.count = self._drawn = (micro + 1) * number
        return np.concatenate([lane.micro_batch(micro, self._unit) for lane in self._lanes])

    def facts(self) -> dict[str, int]:
        """What became of the samples of all replicas; all lanes are read equally far."""
        return self._lanes[0].facts()

    def notes(self) -> dict[str, Any]:
        """For JSON."""
        if self.samples is None:
            return {}
        read, noted = self.count // self._batch * self._unit, [lane.notes() for lane in self._lanes]
        lanes = [{"offset": one["offset"], "count": read - one["offset"]} for one in noted]
        return {"ledger": noted[0]["ledger"], "lanes": lanes}

    def load_notes(self, state: Mapping[str, Any]) -> str:
        """Restore `notes()`. Returns a warning for the user, or "". Raises `DataError`."""
        if not state:
            return ""
        lanes = state.get("lanes", ())
        if len(lanes) != len(self._lanes):
            raise DataError(
                f"{len(lanes)} parts of the data there, {len(self._lanes)} are needed for micro-batches of {self._batch}; resume with "
                "the run's own --batch."
            )
        told = [lane.load_notes({"ledger": state["ledger"], **place}) for lane, place in zip(self._lanes, lanes)]
        read = int(lanes[0]["offset"]) + int(lanes[0]["count"])
        self.count = self._drawn = read // self._unit * self._batch
        return told[0]
