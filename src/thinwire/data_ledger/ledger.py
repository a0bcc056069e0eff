"""The ledger of samples: which replica reads which, and which are done. All replicas compute the same value, commit by commit. No I/O.

Positions 0, 1, 2, ... are the samples of all epochs in their order (`Order`). A **lease** gives a replica ranges of positions, to
be read in turn. After them it reads its part of every later epoch (the *tail*), so that no replica waits for data. What a replica
has read is a **count** 0, 1, 2, ... along its lease. A delta names the counts it was trained on (its **claim**), by fragment.

    read, its deltas in no fragment's anchor     in flight
    its deltas in every fragment's anchor        trained: done, exactly once
    in some anchors, and never in others         lost with the replica that had it, which is named

When a round commits, the claims of the deltas that it counted have landed. A replica that was absent from `patience` commits in a
row loses its lease: samples that are in no anchor go to other replicas; those that are in some are named as lost. When members join
or leave, the rest is split anew: each member keeps the samples that it may have read before it learns of the split (`ahead` samples),
and the remainder is cut into equal parts. A delta of a replica that read more than that, or that comes back after its lease was
returned, is not admitted: the replica restarts from the anchors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from thinwire.data_ledger.order import Order, part_of
from thinwire.data_ledger.ranges import Range, cut, join_adjacent, total, union, without

FENCES = 64  # number of re-splits by which a claim may be behind


@dataclass(frozen=True)
class Claim:
    """The samples behind a delta, as counts along the lease of the replica that trained on them.

    Args:
        serial, version: number of the lease, and number of its re-splits when the samples were read.
        segments: ranges of counts, ascending.

    >>> Claim(serial=0, version=0, segments=((0, 64),)).segments
    ((0, 64),)
    """

    serial: int
    version: int
    segments: tuple[Range, ...]


@dataclass(frozen=True)
class ReadCount:
    """How far a replica has read along its lease: all counts below `count`.

    Args:
        serial, version, count: number of the lease (−1 without one), of its re-splits, and of samples read.

    >>> ReadCount().serial
    -1
    """

    serial: int = -1
    version: int = 0
    count: int = 0


@dataclass(frozen=True)
class Named:
    """The samples that a commit settled: (name, range of positions), by the replica whose lease had them.

    Args:
        trained: those that are now in the anchors of all fragments.
        lost, returned: those that are in some anchors and will never be in the others; those that go to other replicas.

    >>> Named(trained=(("replica-0", (0, 64)),)).lost
    ()
    """

    trained: tuple[tuple[str, Range], ...] = ()
    lost: tuple[tuple[str, Range], ...] = ()
    returned: tuple[tuple[str, Range], ...] = ()


@dataclass(frozen=True)
class Lease:
    """The samples of one replica.

    Args:
        name: of the replica.
        serial, version: number of the commit that gave the lease, unique under that name; number of re-splits since.
        landed: for each fragment the number of counts that are in its anchor, or lost to it.
        first, tail_at: number of the first count that is not settled, and of the first that lies in its part of the tail.
        ranges: ranges of the positions of the counts between these two.
        holes: ranges of counts, from `first` on, that are lost to some fragment.
        fences: numbers of the counts from which the last 64 re-splits changed what is read.
        absent: number of commits in a row in which the replica took no part.

    >>> Lease("replica-0", serial=0, landed=(64, 128)).high
    128
    """

    name: str
    serial: int
    landed: tuple[int, ...]
    first: int = 0
    tail_at: int = 0
    ranges: tuple[Range, ...] = ()
    holes: tuple[Range, ...] = ()
    version: int = 0
    fences: tuple[int, ...] = ()
    absent: int = 0

    @property
    def high(self) -> int:
        """The first count above all counts that have landed in a fragment."""
        return max(self.first, *self.landed)

    def reads_alike(self, reading: ReadCount | Claim, end: int) -> bool:
        """Whether the counts below `end` are the same samples now as when `reading` was made."""
        behind = self.version - reading.version
        if reading.serial != self.serial or not 0 <= behind <= len(self.fences):
            return False
        return behind == 0 or end <= min(self.fences[-behind:])

    def land(self, fragment: int, claim: Claim) -> Lease:
        """The lease after a delta of `fragment` with this claim landed: earlier counts that it leaves out are lost to the fragment."""
        holes, at = list(self.holes), self.landed[fragment]
        for begin, end in claim.segments:
            holes.append((at, begin))
            at = end
        landed = tuple(at if index == fragment else before for index, before in enumerate(self.landed))
        return replace(self, landed=landed, holes=union(holes))


@dataclass(frozen=True)
class DataLedger:
    """All leases of a run, and how many samples are done. Only `number`, `tail_from`, `leases`, `trained` and `lost` change during a run.

    Args:
        samples, trained, lost: number of samples in an epoch; of those trained and lost so far.
        seed: of the order; an integer number.
        lanes, fragments: number of replicas at the start (`Order`), and of fragments of the model.
        ahead: number of samples that a member may read between sending its status and hearing of the commit.
        patience, number: number of commits for which a lease outlives its replica, and of commits so far.
        tail_from: number of the position at which the tail begins.
        leases: by name, in `in_order`.

    >>> ledger = DataLedger(samples=10, seed=0, lanes=2, fragments=1, ahead=0, patience=2).begin(["replica-0", "replica-1"])
    >>> ledger.positions(ledger.leases[1], begin=0, end=5)
    ((5, 10),)
    """

    samples: int
    seed: int
    lanes: int
    fragments: int
    ahead: int
    patience: int
    number: int = 0
    tail_from: int = 0
    leases: tuple[Lease, ...] = ()
    trained: int = 0
    lost: int = 0
    _by_name: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {lease.name: index for index, lease in enumerate(self.leases)})

    @property
    def terms(self) -> tuple[int, ...]:
        """The settings that are fixed for a run; `lanes` is not among them, but the number of replicas at the start."""
        return self.samples, self.seed, self.fragments, self.ahead, self.patience

    @property
    def order(self) -> Order:
        return Order(self.samples, self.seed, self.lanes)

    def begin(self, names: Iterable[str]) -> DataLedger:
        """The ledger with a lease for each of `names`: an equal part of every epoch. If `names` are some of replica-0, replica-1, ... up to
        the number of lanes, all of these get a lease, so that a replica that starts late has one.
        """
        zeros, numbered = (0,) * self.fragments, {f"replica-{number}" for number in range(self.lanes)}
        names = numbered if set(names) <= numbered else names
        return replace(self, leases=tuple(Lease(name, 0, zeros) for name in in_order(names)))

    def lease(self, name: str) -> Lease | None:
        """The lease of `name`, if it has one."""
        index = self._by_name.get(name)
        return None if index is None else self.leases[index]

    def positions(self, lease: Lease, begin: int, end: int) -> tuple[Range, ...]:
        """The positions of the counts `begin` to `end` of `lease`, in the order in which they are read."""
        return tuple(join_adjacent(self._walk(lease, begin, end)))

    def read(self, lease: Lease, begin: int, end: int) -> NDArray[np.int64]:
        """The samples of the counts `begin` to `end` of `lease`."""
        ranges = self.positions(lease, begin, end)
        places = [np.arange(a, b, dtype=np.int64) for a, b in ranges] or [np.empty(0, np.int64)]
        return self.order.samples_at(np.concatenate(places))

    def admits(self, name: str, fragment: int, claim: Claim) -> bool:
        """Whether a delta of `fragment` with this claim may be counted: its samples are `name`'s, and not in the anchor yet."""
        lease = self.lease(name)
        if lease is None:
            return False
        at = lease.landed[fragment]
        for begin, end in claim.segments:
            if not at <= begin < end:
                return False
            at = end
        return lease.reads_alike(claim, at)

    def commit(
        self, fragment: int, claims: Mapping[str, Claim], present: Mapping[str, ReadCount]
    ) -> tuple[DataLedger, Named]:
        """The ledger after a round that counted deltas of `fragment` with these `claims` (admitted ones), while `present` took part."""
        done, lost = list[tuple[str, Range]](), list[tuple[str, Range]]()
        leases, dead, trained, gone = list[Lease](), set[str](), self.trained, self.lost
        for before in self.leases:
            name = before.name
            landed = before.land(fragment, claims[name]) if name in claims else before
            lease, holes = self._settle(landed)
            lease = replace(lease, absent=0 if name in present else lease.absent + 1)
            trained += lease.first - before.first - total(holes)
            sound = without((before.first, lease.first), holes)
            done += [(name, positions) for some in sound for positions in self.positions(landed, *some)]
            if lease.absent > self.patience:
                dead.add(name)
                holes = (*holes, (lease.first, lease.high))
            gone += total(holes)
            lost += [(name, positions) for hole in holes for positions in self.positions(landed, *hole)]
            leases.append(lease)
        after = replace(self, number=self.number + 1, leases=tuple(leases), trained=trained, lost=gone)
        new = [name for name in present if self.lease(name) is None]
        after, returned = after._split(present, dead, new) if dead or new else (after, ())
        return after, Named(tuple(done), tuple(lost), returned)

    def will_split(self, present: Iterable[str]) -> bool:
        """Whether the next commit, in which `present` take part, splits the remaining samples anew: a lease ends, or a member has none."""
        there = set(present)
        ends = any(lease.name not in there and lease.absent >= self.patience for lease in self.leases)
        return ends or any(self.lease(name) is None for name in there)

    # ---- the parts of a commit

    def _settle(self, lease: Lease) -> tuple[Lease, tuple[Range, ...]]:
        """Advance `first` past the counts that are in all anchors or lost; return the lease, and the lost counts."""
        low = min(lease.landed)
        if low <= lease.first:
            return lease, ()
        explicit = self.positions(lease, low, max(low, lease.tail_at))
        holes = tuple((a, min(b, low)) for a, b in lease.holes if a < low)
        left = tuple((max(a, low), b) for a, b in lease.holes if b > low)
        return replace(lease, first=low, ranges=explicit, holes=left), holes

    def _split(
        self, present: Mapping[str, ReadCount], dead: set[str], new: Sequence[str]
    ) -> tuple[DataLedger, tuple[tuple[str, Range], ...]]:
        """Split the remaining samples anew; return the ledger, and the ranges that the `dead` replicas return."""
        fence: dict[str, int] = {}
        for lease in self.leases:
            if lease.name in present:
                reading = present[lease.name]
                known = lease.reads_alike(reading, reading.count)
                fence[lease.name] = max(lease.high, reading.count if known else 0) + self.ahead
        tail_from = self._next_tail(fence)
        kept, pool, back = list[Lease](), list[Range](), list[tuple[str, Range]]()
        for index, lease in enumerate(self.leases):
            own, block = self._part(index)
            tail_at = lease.tail_at + (tail_from - self.tail_from) // block * (own[1] - own[0])
            if lease.name in dead:
                left = self.positions(lease, lease.high, tail_at)
                back += [(lease.name, r) for r in left]
                pool += left
                continue
            at = min(fence.get(lease.name, tail_at), tail_at)  # an absent one keeps what it may be reading
            at = max(at, lease.high)
            pool += self.positions(lease, at, tail_at)
            ranges = self.positions(lease, lease.first, at)
            fences = (*lease.fences, at)[-FENCES:]
            kept.append(replace(lease, ranges=ranges, tail_at=at, version=lease.version + 1, fences=fences))
        zeros = (0,) * self.fragments
        kept += [Lease(name, self.number, zeros) for name in new]
        receivers = in_order(present)
        parts = dict(zip(receivers, cut(union(pool), len(receivers))))
        leases = {lease.name: _given(lease, parts.get(lease.name, ())) for lease in kept}
        ordered = tuple(leases[name] for name in in_order(leases))
        return replace(self, tail_from=tail_from, leases=ordered), tuple(back)

    def _next_tail(self, fence: Mapping[str, int]) -> int:
        """The beginning of the new tail: the first epoch in which no replica may be reading yet."""
        blocks = 0
        for index, lease in enumerate(self.leases):
            own, _ = self._part(index)
            past = max(fence.get(lease.name, 0), lease.high) - lease.tail_at
            blocks = max(blocks, -(-past // (own[1] - own[0])))
        return self.tail_from + blocks * self._block

    @property
    def _block(self) -> int:
        """Positions of the tail that are split at a time: an epoch, or as many epochs as give every replica a sample."""
        return self.samples * -(-len(self.leases) // self.samples)

    def _part(self, index: int) -> tuple[Range, int]:
        """The part of the lease of this index in each block of the tail, and the block's length."""
        block = self._block
        return part_of(block, len(self.leases), index), block

    def _walk(self, lease: Lease, begin: int, end: int) -> Iterator[Range]:
        at = lease.first
        for a, b in lease.ranges:
            low, high = max(begin, at), min(end, at + b - a)
            if low < high:
                yield a + low - at, a + high - at
            at += b - a
        (first, last), block = self._part(self._by_name[lease.name])
        count = max(begin, lease.tail_at)
        while count < end:
            number, place = divmod(count - lease.tail_at, last - first)
            some = min(end - count, last - first - place)
            position = self.tail_from + number * block + first + place
            yield position, position + some
            count += some


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names without duplicates; numbers in them count by size.

    Args:
        names: of replicas.

    >>> in_order(["replica-10", "replica-2", "paris"])
    ['paris', 'replica-2', 'replica-10']
    """
    return sorted(set(names), key=lambda name: ([_key(part) for part in re.split(r"(\d+)", name)], name))


def _key(part: str) -> tuple[int, int, str]:
    return (0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part)


def _given(lease: Lease, more: Sequence[Range]) -> Lease:
    """`lease` with `more` to read before its tail."""
    ranges = tuple(join_adjacent([*lease.ranges, *more]))
    return replace(lease, ranges=ranges, tail_at=lease.tail_at + total(more))
