"""A replica's position in the data: its next samples, and the samples that are in its parameters and in no anchor.

`FixedReader` computes it from the number of the micro-batch. `LeasedReader` follows the ledger that the members of an elastic run
agree on. Each is used by one thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.data_ledger.layout import decode, encode
from thinwire.data_ledger.ledger import Claim, DataLedger, Lease, ReadCount
from thinwire.data_ledger.ranges import Range, total, union
from thinwire.errors import DataError

_BLOCK = 256  # number of samples that are looked up together


class Reader(Protocol):
    """Gives a job the numbers of its samples."""

    generation: int  # counts up whenever samples that were drawn and not trained are void, and must be drawn again
    count: int  # number of trained samples
    packed: bool  # whether a sample is a batch of documents, which has its own number of tokens

    @property
    def samples(self) -> int | None:
        """In an epoch; None before `open`."""

    def open(self, samples: int) -> None:
        """Set the number of samples in an epoch. Raises `DataError` if another number was set before."""

    def draw(self, number: int) -> NDArray[np.int64]:
        """The next samples."""

    def trained(self, number: int | None = None) -> None:
        """Note that `number` of the samples drawn (None: all) are in the parameters."""

    def restart(self) -> None:
        """Draw again from the first sample that is not trained."""

    def micro_batch(self, micro: int, number: int) -> NDArray[np.int64]:
        """The samples of micro-batch `micro`, of `number` each; they are in the parameters from now on."""

    def facts(self) -> dict[str, int]:
        """Counts of samples for a summary: in_an_epoch, trained, lost, in_flight; empty if nothing is counted."""

    def notes(self) -> dict[str, Any]:
        """What a checkpoint needs beside a driver's own state, for JSON."""

    def load_notes(self, notes: Mapping[str, Any]) -> str:
        """Restore `notes()`. Returns a warning for the user, or "". Raises `DataError`."""


class Along:
    """Reads samples along a lease, and looks them up a block at a time."""

    def __init__(self, ledger: DataLedger, lease: Lease) -> None:
        self.ledger, self.lease = ledger, lease
        self._begin, self._block = 0, np.empty(0, np.int64)

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """The samples of the counts `begin` to `end`."""
        if not self._begin <= begin <= end <= self._begin + len(self._block):
            some = max(end - begin, min(_BLOCK, self.ledger.samples // len(self.ledger.leases)))
            self._begin, self._block = begin, self.ledger.read(self.lease, begin, begin + some)
        return self._block[begin - self._begin : end - self._begin]


class LeasedReader:
    """The reader of a member of an elastic run; the driver connects it to the ledger.

    `count` is how far it has read along its lease. `holds` has, for each fragment, the counts that are in the parameters and not
    in the anchor.

    Args:
        seed: of the order; an integer number.
        replicas: number of replicas with which the run begins: replica-0 and so on.
        step: number of samples in an inner step.
        samples: number of samples in an epoch; `open` may set it later.

    >>> reader = LeasedReader(seed=0, replicas=2, step=8, samples=1000)
    >>> reader.template(fragments=4, every=30, delay=5).ahead
    1000
    """

    def __init__(self, seed: int, replicas: int, step: int, samples: int | None = None) -> None:
        self.seed, self.replicas, self.step, self.samples = seed, replicas, step, samples
        self.name, self.generation, self.count, self._drawn, self.packed = "", 0, 0, 0, False
        self.holds: list[tuple[Range, ...]] = []
        self._along: Along | None = None
        self._fresh: list[Range] = []  # positions, for the record
        self._wait: Callable[[], None] = lambda: None
        self._await_split: Callable[[int], None] = lambda end: None
        self._micros: dict[int, NDArray[np.int64]] = {}  # the last inner step's micro-batches

    def template(self, fragments: int, every: int, delay: int) -> DataLedger:
        """The ledger of a run that has not begun. A re-split leaves a member what it reads in four periods and a flight; a lease
        outlives its replica by the rounds of two cycles.
        """
        if not self.samples:
            raise DataError("a reader was given no samples; call open(len(data)) before the Replica is made.")
        ahead = self.step * (4 * every + delay)
        return DataLedger(self.samples, self.seed, self.replicas, fragments, ahead, 2 * fragments)

    def connect(
        self, name: str, fragments: int, wait: Callable[[], None], await_split: Callable[[int], None] = lambda end: None
    ) -> None:
        """Called by the driver. `wait` asks for a lease, and returns when there may be one. `await_split` is called before it reads up to a
        count: it waits if the samples before that may be given to others in this moment.
        """
        self.name, self._wait, self._await_split, self.holds = name, wait, await_split, [()] * fragments

    # ---- what the job asks

    def open(self, samples: int) -> None:
        """Set the number of samples in an epoch. Raises `DataError` if another number was set before."""
        if samples < 1 or self.samples not in (None, samples):
            raise DataError(
                f"{samples} samples given, {self.samples or 'at least 1'} needed; give the same data every time."
            )
        self.samples = samples

    def draw(self, number: int) -> NDArray[np.int64]:
        """The next samples. Waits while this replica has no lease."""
        while self._along is None:
            self._wait()
        self._await_split(self._drawn + number)
        self._drawn += number
        return self._along.read(self._drawn - number, self._drawn)

    def trained(self, number: int | None = None) -> None:
        """Note that `number` of the samples drawn (None: all) are in the parameters."""
        end = self._drawn if number is None else self.count + number
        if end > self.count and self._along is not None:
            self.holds = [union([*held, (self.count, end)]) for held in self.holds]
            self._fresh += self._along.ledger.positions(self._along.lease, self.count, end)
            self.count = end

    def restart(self) -> None:
        """Draw again from the first sample that is not trained."""
        self._drawn = self.count

    def micro_batch(self, micro: int, number: int) -> NDArray[np.int64]:
        """The next samples; the same again for a micro-batch of the same inner step."""
        if micro not in self._micros:
            samples, first = self.draw(number), micro - self.step // number + 1
            self.trained(number)
            self._micros = {one: held for one, held in self._micros.items() if first <= one < micro} | {micro: samples}
        return self._micros[micro]

    # ---- what the driver does

    @property
    def read_count(self) -> ReadCount:
        """How far it has read, for the member's status."""
        lease = self._along.lease if self._along else None
        return ReadCount(lease.serial, lease.version, self.count) if lease else ReadCount()

    def claim(self, fragment: int) -> Claim:
        """The claim of a delta of `fragment` that departs now."""
        reading = self.read_count
        return Claim(reading.serial, reading.version, self.holds[fragment])

    def landed(self, fragment: int, claim: Claim) -> None:
        """Called when a delta with this claim is in the anchor."""
        end = claim.segments[-1][1] if claim.segments else 0
        self.holds[fragment] = tuple((max(a, end), b) for a, b in self.holds[fragment] if b > end)

    def returned(self, fragment: int, claim: Claim) -> None:
        """Called when a delta with this claim is not in the anchor after all."""
        self.holds[fragment] = union([*claim.segments, *self.holds[fragment]])

    def dropped(self, fragment: int) -> None:
        """Called when the parameters of `fragment` hold nothing that this replica trained."""
        self.holds[fragment] = ()

    def adopt(self, ledger: DataLedger | None) -> None:
        """Read by `ledger` from now on, unless it gives samples to other replicas that this one has read."""
        if ledger is None or (self._along and self._along.ledger is ledger):
            return
        lease = ledger.lease(self.name)
        if self._along is None:
            if lease is not None:
                self._begin(ledger, lease)
            return
        if lease is None or not lease.reads_alike(self.read_count, self.count):
            return  # the members drop what this replica brings, and then it begins again
        alike = lease.reads_alike(self.read_count, self._drawn)
        self._along, self.count = Along(ledger, lease), max(self.count, lease.high)
        if not alike or self._drawn < self.count:  # what was drawn ahead is another's, or has landed before a restart
            self.generation += 1
            self._drawn = self.count
            self._micros = {}

    def begin_again(self, ledger: DataLedger | None) -> None:
        """Discard all that this replica has read, and continue at the first of its samples that is in no anchor."""
        self.holds = [()] * len(self.holds)
        lease = ledger.lease(self.name) if ledger else None
        self._along, self._micros = None, {}
        self.generation += 1
        if ledger is not None and lease is not None:
            self._begin(ledger, lease)

    def _begin(self, ledger: DataLedger, lease: Lease) -> None:
        self._along, self.count = Along(ledger, lease), lease.high
        self._drawn = self.count

    def fresh(self) -> list[Range]:
        """The positions read since the last call."""
        read, self._fresh = list(union(self._fresh)), []
        return read

    @property
    def in_flight(self) -> int:
        """Samples that are in the parameters, and not in every anchor."""
        return total(union(held for one in self.holds for held in one))

    def facts(self) -> dict[str, int]:
        """What became of the samples of all replicas, as far as this one knows; in flight are its own."""
        ledger = self._along.ledger if self._along else None
        known = {"trained": ledger.trained, "lost": ledger.lost} if ledger else {}
        return {"in_an_epoch": self.samples or 0, **known, "in_flight": self.in_flight}

    def notes(self) -> dict[str, Any]:
        """Empty: the driver saves this reader with the ledger."""
        return {}

    def load_notes(self, notes: Mapping[str, Any]) -> str:
        """Does nothing; see `notes`."""
        return ""

    @staticmethod
    def held_by(state: Mapping[str, Any]) -> int:
        """Samples in flight in a `state()`."""
        return total(union((int(a), int(b)) for held in state["holds"] for a, b in held))

    def state(self) -> dict[str, Any]:
        """For JSON, saved beside the ledger."""
        reading = self.read_count
        return {"at": [reading.serial, reading.version, reading.count], "holds": [list(held) for held in self.holds]}

    def load(self, state: Mapping[str, Any], saved: DataLedger | None, known: DataLedger | None) -> bool:
        """Restore `state()` and the ledger `saved` with it; `known` is the ledger of the other members. Returns False if the lease was
        returned meanwhile: then what this replica had trained does not count. Raises `KeyError`, `TypeError`, `ValueError`.
        """
        serial, version, count = map(int, state["at"])
        holds = [union((int(a), int(b)) for a, b in held) for held in state["holds"]]
        newer = known if known and (saved is None or known.number > saved.number) else saved
        lease = newer.lease(self.name) if newer else None
        reading = ReadCount(serial, version, count)
        self._micros = {}
        if newer is None or lease is None or len(holds) != len(self.holds) or not lease.reads_alike(reading, count):
            self.begin_again(newer)
            return False
        self._begin(newer, lease)
        self.count = self._drawn = max(count, lease.high)
        self.holds, self.generation = holds, self.generation + 1
        return True


class FixedReader:
    """The reader of a replica of a fixed group: micro-batch m, of n samples, begins at count m·n − `offset` of its lease.

    Args:
        seed: of the order; an integer number.
        names: of all replicas.
        name: of this one.

    >>> reader = FixedReader(seed=0, names=["0", "1"], name="1")
    >>> reader.open(samples=4)
    >>> sorted([*reader.micro_batch(0, 2).tolist()])
    [1, 3]
    """

    def __init__(self, seed: int, names: Sequence[str], name: str) -> None:
        self._seed, self._names, self._name = seed, names, name
        self.generation, self.count, self.offset, self._drawn, self.packed = 0, 0, 0, 0, False
        self.ledger: DataLedger | None = None
        self._along: Along | None = None

    @property
    def samples(self) -> int | None:
        """In an epoch; None before `open`."""
        return self.ledger.samples if self.ledger else None

    def facts(self) -> dict[str, int]:
        """What became of the samples of all replicas; all of them have read equally many since the group has this size."""
        if self.ledger is None or self._along is None:
            return {}
        ledger, since = self.ledger, self.count - self._along.lease.first
        return {
            "in_an_epoch": ledger.samples, "trained": ledger.trained + len(ledger.leases) * since, "lost": ledger.lost,
            "in_flight": 0,
        }  # fmt: skip

    def notes(self) -> dict[str, Any]:
        """For JSON."""
        return {"ledger": encode(self.ledger).hex(), "offset": self.offset, "count": self.count} if self.ledger else {}

    def load_notes(self, state: Mapping[str, Any]) -> str:
        """Restore `notes()`. If other data were opened, their first epoch begins here. Returns a warning about that, or "". Raises `DataError`."""
        if not state:
            return ""
        saved, offset, count = decode(bytes.fromhex(state["ledger"])), int(state["offset"]), int(state["count"])
        if self.ledger is None or self.ledger.samples == saved.samples:
            self.use(saved, offset)
            self.count = self._drawn = count
            return ""
        self.offset, self.count, self._drawn = offset + count, 0, 0
        return (
            f"the data have {self.ledger.samples:,} samples, and had {saved.samples:,}: a new epoch of them begins here"
        )

    def open(self, samples: int) -> None:
        """Set the number of samples in an epoch. Raises `DataError` if another number was set before."""
        if self.ledger is None:
            if samples < len(self._names):
                raise DataError(
                    f"{samples} samples for {len(self._names)} replicas; each needs one. Give more data, or fewer replicas."
                )
            self.use(DataLedger(samples, self._seed, len(self._names), 1, 0, 0).begin(self._names), 0)
        elif samples != self.ledger.samples:
            raise DataError(
                f"{samples} samples given, the run began with {self.ledger.samples}; give the same data every time."
            )

    def use(self, ledger: DataLedger, offset: int) -> None:
        """Read by `ledger`: micro-batch m, of n samples, begins at count m·n − `offset`."""
        lease = ledger.lease(self._name)
        if lease is None:
            raise DataError(
                f"{self._name} has no part of the data; it needs one of {len(ledger.leases)}. Resume with the run's own number."
            )
        self.ledger, self.offset, self._along = ledger, offset, Along(ledger, lease)

    def draw(self, number: int) -> NDArray[np.int64]:
        """The next samples."""
        assert self._along is not None, "open comes first"
        self._drawn += number
        return self._along.read(self._drawn - number, self._drawn)

    def trained(self, number: int | None = None) -> None:
        """Note that `number` of the samples drawn (None: all) are in the parameters."""
        self.count = self._drawn if number is None else self.count + number

    def restart(self) -> None:
        """Draw again from the first sample that is not trained."""
        self._drawn = self.count

    def micro_batch(self, micro: int, number: int) -> NDArray[np.int64]:
        """The samples of micro-batch `micro`, in any order of calls."""
        self.count = self._drawn = micro * number - self.offset
        samples = self.draw(number)
        self.trained()
        return samples


def drawn_for_ever(reader: Reader) -> Iterator[int]:
    """Yield one sample after the other without end, from the first that is not trained.

    Args:
        reader: of this replica, opened.

    >>> reader = FixedReader(seed=0, names=["0"], name="0")
    >>> reader.open(samples=3)
    >>> samples = drawn_for_ever(reader)
    >>> sorted(next(samples) for _ in range(3))
    [0, 1, 2]
    """
    reader.restart()
    while True:
        yield int(reader.draw(1)[0])
