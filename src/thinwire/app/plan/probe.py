"""Measures the links of a group: delay and rate of every direction, alone and all together, and the cost of a round.

Every replica calls `probe_links` at the same point, and all get the same result. The group's carrier is measured: on a
`LinkedGroup` the emulated link, under torch.distributed the real one.

Alone: rounds of disjoint pairs (the circle method: every pair meets once, in M − 1 rounds, or M if M is odd). A pair measures
round trips, then three trains of blocks in each direction. The receiver notes when each block is complete. The rate is the bytes
after the first block over the time that they took, so neither the delay nor a slow start counts. The delay is half of the shortest
round trip, so other load on a machine counts little; all round trips are in the samples. The clocks of two machines are not
compared, so a difference between the delays of the two directions is not seen. Together: every replica sends to every other at
once. Rounds: the traffic of `Direct` at three sizes, and a straight line through them.
"""

from __future__ import annotations

import json
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.app.plan.links import Links, Pair
from thinwire.comm import Group, Link, gather
from thinwire.errors import ConfigurationError

BLOCKS = 16  # in a train; the first one is not counted
TRAINS = 3  # each way; the median counts
_FIRST_NBYTES = 1024  # of a block, in the first train
_LIMIT_NBYTES = 64 << 20  # of a block
_GROWTH = 32
_TAG = 1 << 29
_PURPOSE = "probe"
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round in which every replica sends a packet to every other: latency + (M−1)·8·nbytes / rate."""

    latency_seconds: float
    bits_per_second: float
    samples: tuple[tuple[int, float], ...]  # bytes of a packet, seconds of the slowest replica


@dataclass(frozen=True)
class Probe:
    """The result of a probe, and all samples."""

    links: Links
    round: RoundCost | None
    samples: dict[str, Any]


class _Train(NamedTuple):
    block_nbytes: int
    arrivals: list[float]  # seconds after the first block

    @property
    def bits_per_second(self) -> float:
        return 8 * self.block_nbytes * (len(self.arrivals) - 1) / max(self.arrivals[-1], 1e-9)


def pairings(size: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which every two of `size` meet exactly once.

    >>> pairings(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = list(range(size)) + ([-1] if size % 2 else [])
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = [(min(a, b), max(a, b)) for a, b in zip(places[:half], reversed(places[half:])) if min(a, b) >= 0]
        rounds.append(sorted(met))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def probe_links(group: Group, name: str, seconds: float = 0.5, trips: int = 20) -> Probe:
    """Measure every link of `group`. A train of blocks lasts about `seconds`; a pair measures `trips` round trips.

    Takes about (M−1)·(7·`seconds` + `trips` round trips), then `seconds` for all together and `seconds` for the rounds. Figures from
    trains shorter than 0.2 s are not reliable. `name` is this replica's name in the result; replicas of the same name get their rank
    appended. Collective. Raises `LinkError`.
    """
    if not seconds > 0 or trips < 1:
        raise ConfigurationError(
            f"seconds={seconds}, trips={trips}: more than 0 s and at least 1 round trip are needed."
        )
    if group.size < 2:
        raise ConfigurationError("1 replica has no link to measure; at least 2 are needed.")
    names = _unique([text.decode() for text in gather(group, name.encode()[:80], 80, _PURPOSE)])
    own: dict[str, Any] = {"round_trips": {}, "apart": {}, "together": {}}
    for pairs in pairings(group.size):
        for first, second in pairs:
            if group.rank in (first, second):
                _apart(group, first, second, seconds, trips, own)
        _meet(group)
    seen = [json.loads(text) for text in gather(group, json.dumps(own).encode(), 1 << 24, _PURPOSE)]
    apart = {
        (int(a), b): [_Train(*train) for train in seen[b]["apart"][a]]
        for b in range(group.size)
        for a in seen[b]["apart"]
    }
    rates = {pair: statistics.median(train.bits_per_second for train in trains) for pair, trains in apart.items()}
    trips_of = {(a, int(b)): seen[a]["round_trips"][b] for a in range(group.size) for b in seen[a]["round_trips"]}
    own["together"] = _together(group, rates, seconds)
    seen = [json.loads(text) for text in gather(group, json.dumps(own).encode(), 1 << 24, _PURPOSE)]
    together = {(int(a), b): _Train(*seen[b]["together"][a]) for b in range(group.size) for a in seen[b]["together"]}
    alone = {}
    for pair, rate in rates.items():
        alone[pair] = Link(rate, min(trips_of[min(pair), max(pair)]) / 2)
    links = Links(names, alone, {pair: train.bits_per_second for pair, train in together.items()}, "measured")
    cost = _rounds(group, min(train.bits_per_second for train in together.values()), seconds)
    samples = {
        "names": names,
        "round_trips": [{"between": [names[a], names[b]], "seconds": s} for (a, b), s in trips_of.items()],
        "apart": [_described(names, pair, train) for pair, trains in apart.items() for train in trains],
        "together": [_described(names, pair, train) for pair, train in together.items()],
        "rounds": [{"nbytes": nbytes, "seconds": s} for nbytes, s in cost.samples],
    }
    return Probe(links, cost, samples)


# ---- one pair


def _apart(group: Group, first: int, second: int, seconds: float, trips: int, own: dict[str, Any]) -> None:
    """Measure round trips, then a train in each direction. The receiver keeps the measurement."""
    peer = second if group.rank == first else first
    round_trips = _round_trips(group, peer, trips, leads=group.rank == first)
    if group.rank == first:
        own["round_trips"][str(peer)] = round_trips
    for sender in (first, second):
        if group.rank == sender:
            _send_trains(group, peer)
        else:
            own["apart"][str(peer)] = _receive_trains(group, peer, seconds)


def _round_trips(group: Group, peer: int, count: int, leads: bool) -> list[float]:
    """Seconds of `count` round trips of a byte, after one that is not counted. Receives are posted before the byte is sent."""
    found = []
    byte = torch.zeros(1, dtype=torch.uint8)
    arriving = group.post(_TAG, {}, {peer: torch.zeros_like(byte)}, _PURPOSE)
    for number in range(count + 1):
        began = time.perf_counter()
        leaving = group.post(_TAG, {peer: byte}, {}, _PURPOSE) if leads else None
        arriving.wait()
        found.append(time.perf_counter() - began)
        if number < count:
            arriving = group.post(_TAG, {}, {peer: torch.zeros_like(byte)}, _PURPOSE)
        (leaving or group.post(_TAG, {peer: byte}, {}, _PURPOSE)).wait()
    return found[1:]


def _send_trains(group: Group, peer: int) -> None:
    """Send trains of the size that the receiver asks for, until it asks for none."""
    while nbytes := _hear(group, peer):
        block = torch.zeros(nbytes, dtype=torch.uint8)
        for transfer in [group.post(_TAG + 1, {peer: block}, {}, _PURPOSE) for _ in range(BLOCKS)]:
            transfer.wait()


def _receive_trains(group: Group, peer: int, seconds: float) -> list[_Train]:
    """Ask for larger and larger trains until they last long enough. The last `TRAINS`, of one size, count."""
    nbytes, trains = _FIRST_NBYTES, list[_Train]()
    while len(trains) < TRAINS:
        due = [
            group.post(_TAG + 1, {}, {peer: torch.zeros(nbytes, dtype=torch.uint8)}, _PURPOSE) for _ in range(BLOCKS)
        ]
        _tell(group, peer, nbytes)
        train = _Train(nbytes, _arrivals(due))
        if trains or train.arrivals[-1] >= 0.7 * seconds or nbytes == _LIMIT_NBYTES:
            trains.append(train)
        else:
            growth = min(_GROWTH, max(2.0, seconds / max(train.arrivals[-1], 1e-9)))
            nbytes = min(_LIMIT_NBYTES, int(nbytes * growth))
    _tell(group, peer, 0)
    return trains


def _arrivals(due: Sequence[Any]) -> list[float]:
    times = []
    for transfer in due:
        transfer.wait()
        times.append(time.perf_counter())
    return [moment - times[0] for moment in times]


def _tell(group: Group, peer: int, number: int) -> None:
    message = torch.frombuffer(bytearray(_NUMBER.pack(number)), dtype=torch.uint8)
    group.post(_TAG + 2, {peer: message}, {}, _PURPOSE).wait()


def _hear(group: Group, peer: int) -> int:
    message = torch.zeros(_NUMBER.size, dtype=torch.uint8)
    group.post(_TAG + 2, {}, {peer: message}, _PURPOSE).wait()
    return min(_LIMIT_NBYTES, int(_NUMBER.unpack(bytes(message.tolist()))[0]))


# ---- all replicas together


def _together(group: Group, rates: dict[Pair, float], seconds: float) -> dict[str, _Train]:
    """Every replica sends a train to every other, one block of each in turn."""
    others = [peer for peer in range(group.size) if peer != group.rank]

    def block(a: int, b: int) -> int:
        share = rates[a, b] / (group.size - 1)
        return max(1, min(_LIMIT_NBYTES, int(share * seconds / 8 / BLOCKS)))

    due = {
        peer: [
            group.post(_TAG + 3, {}, {peer: torch.zeros(block(peer, group.rank), dtype=torch.uint8)}, _PURPOSE)
            for _ in range(BLOCKS)
        ]
        for peer in others
    }
    _meet(group)
    found: dict[str, _Train] = {}
    errors: list[BaseException] = []

    def listen(peer: int) -> None:
        try:
            found[str(peer)] = _Train(block(peer, group.rank), _arrivals(due[peer]))
        except BaseException as error:
            errors.append(error)

    listening = [threading.Thread(target=listen, args=(peer,), daemon=True) for peer in others]
    for thread in listening:
        thread.start()
    blocks = {peer: torch.zeros(block(group.rank, peer), dtype=torch.uint8) for peer in others}
    leaving = [group.post(_TAG + 3, {peer: blocks[peer]}, {}, _PURPOSE) for _ in range(BLOCKS) for peer in others]
    for transfer in leaving:
        transfer.wait()
    for thread in listening:
        thread.join()
    if errors:
        raise errors[0]
    _meet(group)
    return found


def _rounds(group: Group, bits_per_second: float, seconds: float) -> RoundCost:
    """Time rounds of three sizes, three times each, by the slowest replica, and fit a line through them."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    largest = max(3, min(_LIMIT_NBYTES, int(bits_per_second * seconds / 8 / 2)))
    samples = []
    for nbytes in (largest // 100 + 1, largest // 3, largest):
        own = torch.zeros(nbytes, dtype=torch.uint8)
        for _ in range(3):
            buffers: dict[int, Tensor] = {peer: torch.zeros_like(own) for peer in others}
            _meet(group)
            began = time.perf_counter()
            group.post(_TAG + 4, {peer: own for peer in others}, buffers, _PURPOSE).wait()
            spent = time.perf_counter() - began
            told = gather(group, struct.pack("<d", spent), 8, _PURPOSE)
            samples.append((nbytes, max(struct.unpack("<d", text)[0] for text in told)))
    seen = {nbytes: [spent for size, spent in samples if size == nbytes] for nbytes, _ in samples}
    latency, per_byte = line([(nbytes, statistics.median(times)) for nbytes, times in seen.items()])
    return RoundCost(max(0.0, latency), 8 * (group.size - 1) / max(per_byte, 1e-15), tuple(samples))


def line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (value at 0, slope).

    >>> line([(0, 1.0), (10, 3.0), (20, 5.0)])
    (1.0, 0.2)
    """
    fitted = statistics.linear_regression([x for x, _ in samples], [y for _, y in samples])
    return fitted.intercept, fitted.slope


def _meet(group: Group) -> None:
    """A barrier: wait until all replicas are here."""
    gather(group, b"", 0, _PURPOSE)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}-{rank}" if names.count(name) > 1 else name for rank, name in enumerate(names))


def _described(names: Sequence[str], pair: Pair, train: _Train) -> dict[str, Any]:
    return {
        "from": names[pair[0]],
        "to": names[pair[1]],
        "block_nbytes": train.block_nbytes,
        "arrivals": train.arrivals,
    }
