"""The elastic part of the bridges (with a `Membership`): join the others, read samples that no other member trains, and keep the final state.

A trainer counts its own steps. A replica that was behind continues at the step of the others: each bridge moves its trainer's count and its
learning rate schedule there, and does the evaluations and saves of the skipped steps.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from thinwire.data_ledger import LeasedReader
from thinwire.errors import ConfigurationError, EndedError, LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.replica import Replica


def meet(membership: Membership, attach: Callable[[], Replica], seconds: float) -> Replica:
    """Call `attach`, repeatedly for `seconds` while there are too few members, and return its result. Raises its errors."""
    until, times = time.monotonic() + seconds, membership.timeouts
    try:
        while True:
            left = max(1.0, until - time.monotonic())
            membership.use_timeouts(replace(times, view=min(times.view, left)))
            try:
                return attach()
            except LinkError as error:
                if time.monotonic() > until:
                    raise
                print(f"thinwire: still waiting for other members: {error}", file=sys.stderr, flush=True)
    finally:
        membership.use_timeouts(times)


def keep_to_the_end(membership: Membership, seconds: float) -> None:
    """Wait while this replica keeps the final state for missing members, after `Replica.finish(keep_seconds=seconds)`."""
    if not membership.closed:
        told = f"{membership.name} has finished, and keeps the final weights for missing members: {seconds:g} s at most"
        print(f"thinwire: {told}", file=sys.stderr, flush=True)
    while not membership.closed:
        time.sleep(0.05)


def refuse(membership: Membership, refused: dict[str, tuple[bool, str]]) -> None:
    """Raise `ConfigurationError` for the first refused setting that is used; each has its advice."""
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(
                f"{name}: replica {membership.name!r} is a member of an elastic run, whose members may be at different steps; {advice}."
            )


class MemberSampler(Sampler[int]):
    """Iterates without end over the indices of this member's samples; all members together train each sample once per epoch.

    A loader may read ahead. When the members split the samples anew, samples that it has read and not trained may belong to others: the
    step that would train them must change nothing.
    """

    def __init__(self, samples: int, seed: int, membership: Membership, before: Callable[[], None]) -> None:
        """`before` is called before the first sample is read: this replica must have joined, and reading may change its parameters."""
        self.samples, self.seed, self.ended = samples, seed, False
        self._replicas, self._before = membership.least, before
        self._ahead: deque[int] = deque()  # for each sample that was read and not trained: the era in which it was read
        self._era = self._generation = 0
        self.reader: LeasedReader | None = None

    def open(self, batch: int) -> LeasedReader:
        """Make the reader of a replica that trains `batch` samples in an inner step."""
        self.reader = LeasedReader(self.seed, self._replicas, batch, self.samples)
        return self.reader

    def facts(self, batch: int) -> dict[str, str]:
        """The facts about the data that must be equal on all members."""
        return {"samples": f"{self.samples} in an epoch, {batch} in an inner step", "seed of the data": str(self.seed)}

    def __iter__(self) -> Iterator[int]:
        self._before()  # a trainer may read its first batch before it calls its callbacks
        reader = self._begun()
        self._ahead.clear()
        self._anew(reader)
        while not self.ended:
            self._before()
            try:
                (index,) = reader.draw(1)
            except EndedError:
                self.ended = True
                return
            self._follow(reader)
            self._ahead.append(self._era)
            yield int(index)

    def trains(self, samples: int) -> bool:
        """Note that the present step trains the next `samples` that were read; False if they belong to others now."""
        reader = self._begun()
        self._follow(reader)
        eras = {self._ahead.popleft() for _ in range(samples)}
        if eras == {self._era}:
            reader.trained(samples)
            return True
        if self._era in eras:  # later reads no longer match the counts
            self._anew(reader)
        return False

    def _begun(self) -> LeasedReader:
        if self.reader is None:
            raise ConfigurationError(
                "samples were read before training began: the replica must have joined first. Let the trainer read its own data."
            )
        return self.reader

    def _follow(self, reader: LeasedReader) -> None:
        """Discard samples that were read before the reader's `generation`."""
        if reader.generation != self._generation:
            self._generation = reader.generation
            self._era += 1

    def _anew(self, reader: LeasedReader) -> None:
        reader.restart()
        self._era += 1


class Drawn(IterableDataset[Any]):
    """The samples of `data` that a sampler gives, for transformers' `Trainer`."""

    def __init__(self, data: Any, sampler: MemberSampler) -> None:
        self._data, self.sampler = data, sampler

    def __iter__(self) -> Iterator[Any]:
        yield from (self._data[index] for index in self.sampler)
        while True:  # the run has ended and steps change nothing, but accelerate's loaders raise without a batch
            yield self._data[0]
