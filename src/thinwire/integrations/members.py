"""What the bridges do where replicas come and go (a `Membership`): meet the others, read samples that no other trains, and keep the end.

A trainer counts its own steps. A replica that was behind goes on at the step of the others: each bridge moves its trainer's count, its
learning rate schedule, and what is due at the steps between along with it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from thinwire.data_ledger import LeasedReader
from thinwire.errors import ConfigurationError, EndedError, LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.replica import Replica


def meet(attach: Callable[[], Replica], seconds: float) -> Replica:
    """Call `attach`, and again for `seconds` while too few are there: return what it returns. Raises what it raises."""
    until = time.monotonic() + seconds
    while True:
        try:
            return attach()
        except LinkError:
            if time.monotonic() > until:
                raise


def keep_to_the_end(membership: Membership, seconds: float) -> None:
    """Wait while this replica keeps the final state for members that are missing, as `Replica.finish(keep_seconds=seconds)` began to."""
    if not membership.closed:
        told = f"{membership.name} has finished, and keeps the final weights for members that are missing: {seconds:g} s at most"
        print(f"thinwire: {told}", file=sys.stderr, flush=True)
    while not membership.closed:
        time.sleep(0.05)


def refuse(membership: Membership, refused: dict[str, tuple[bool, str]]) -> None:
    """Raise `ConfigurationError` for the first that was asked for; each has its advice."""
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(
                f"{name} · replica {membership.name!r} is one of members that come and go, and are at steps of their own · {advice}"
            )


class MemberSampler(Sampler[int]):
    """Iterates for ever over the indices of the samples that this member trains, each once an epoch in all; it ends with the run.

    A loader may read ahead. What it has read and not trained when the members split the samples anew is others' by then: the step that
    would train it must change nothing.
    """

    def __init__(self, samples: int, seed: int, membership: Membership, before: Callable[[], None]) -> None:
        """`before` is called before anything is read: then this replica must have joined, and reading may change its parameters."""
        self.samples, self.seed, self.ended = samples, seed, False
        self._replicas, self._before = membership.least, before
        self._ahead: deque[int] = deque()  # the era in which each sample was drawn that no step has had
        self._era = self._generation = 0
        self.reader: LeasedReader | None = None

    def open(self, batch: int) -> LeasedReader:
        """The reader, for a replica that trains `batch` samples in an inner step."""
        self.reader = LeasedReader(self.seed, self._replicas, batch, self.samples)
        return self.reader

    def facts(self, batch: int) -> dict[str, str]:
        """In what the data of all members must be alike."""
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
        """Note that the step in progress trains the next `samples` of those drawn; False: others train them by now."""
        reader = self._begun()
        self._follow(reader)
        eras = {self._ahead.popleft() for _ in range(samples)}
        if eras == {self._era}:
            reader.trained(samples)
            return True
        if self._era in eras:  # what was drawn since is no longer in step with its counts
            self._anew(reader)
        return False

    def _begun(self) -> LeasedReader:
        if self.reader is None:
            raise ConfigurationError(
                "samples were asked for before training has begun · a replica that has joined is needed · let the trainer read its own data"
            )
        return self.reader

    def _follow(self, reader: LeasedReader) -> None:
        """What was drawn before the reader's `generation` is void."""
        if reader.generation != self._generation:
            self._generation = reader.generation
            self._era += 1

    def _anew(self, reader: LeasedReader) -> None:
        reader.restart()
        self._era += 1
