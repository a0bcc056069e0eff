"""What a strategy costs in time on given links: utilisation by following one period, and what cannot work. *Predicted*.

All replicas take their steps together, at the pace of the slowest, and the slowest uplink carries one round after the
other. That is a closed form only while no flight is late; so departures and landings of a few periods are followed
in order, which takes microseconds. `thinwire simulate` has jitter, stragglers, outages and shared wires beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from thinwire.observe.units import text_of_seconds
from thinwire.plan.links import Links
from thinwire.plan.outline import Shape
from thinwire.schedule import Schedule, busiest
from thinwire.strategy import Strategy

_PERIODS = 12  # followed; the first half does not count (long flights take some to settle)


@dataclass(frozen=True)
class Traffic:
    """How long one fragment keeps what busy: the exchange thread before and after, the uplink, and the way."""

    encode_seconds: float
    uplink_seconds: float
    way_seconds: float
    decode_seconds: float

    @property
    def flight_seconds(self) -> float:
        """On an idle uplink."""
        return self.encode_seconds + self.uplink_seconds + self.way_seconds + self.decode_seconds


@dataclass(frozen=True)
class Pace:
    """Where the time goes in the long run."""

    utilization: float
    stall_seconds: float  # of an inner step, on average
    uplink_use: float  # share of the time in which the slowest uplink is busy
    latest_seconds: float  # by how much the latest landing was late


def uplink_seconds(links: Links, nbytes: float) -> float:
    """How long the slowest replica's uplink needs to send `nbytes` to each of the others.

    Where `together` was measured, each pair at that rate, side by side. Else one message after the other at the rate
    that the pair has alone, as over one wire.
    """
    slowest = 0.0
    for a in range(len(links)):
        others = [b for b in range(len(links)) if b != a]
        if all((a, b) in links.together for b in others):
            seconds = max((8 * nbytes / links.together[a, b] for b in others), default=0.0)
        else:
            seconds = sum(8 * nbytes / links.alone[a, b].bits_per_second for b in others)
        slowest = max(slowest, seconds)
    return slowest


def way_seconds(links: Links) -> float:
    """The longest delay between two of the replicas."""
    return max((link.delay_seconds for link in links.alone.values()), default=0.0)


def follow(strategy: Strategy, step_seconds: float, fragments: Sequence[Traffic]) -> Pace:
    """Follow departures and landings, as `Replica` orders them, through a few periods.

    >>> from thinwire import diloco
    >>> follow(diloco(every=9), 1.0, [Traffic(0.0, 0.9, 0.1, 0.0)]).utilization
    0.9
    """
    every, delay = strategy.schedule.every, strategy.schedule.delay
    eager = strategy.merge.whole_period
    clock = outbound = wire = inbound = busy = latest = 0.0
    landing: dict[int, tuple[int, float]] = {}  # by fragment: step, time
    before = (0.0, 0.0, 0)  # clock, busy, step after the first half
    done = 0
    events: list[tuple[int, int, int]] = []  # step, what (landings of eager rounds come first), fragment
    for period in range(_PERIODS):
        for step, p in _departures(busiest(strategy.schedule), len(fragments)):  # type: ignore[arg-type]  # frozen values hash
            at = period * every + step
            events += [(at, 1, p), (at + delay, 0 if eager else 2, p)]
    for step, what, p in sorted(events):
        if step > _PERIODS * every:
            break
        if step > _PERIODS // 2 * every and not before[2]:
            half = _PERIODS // 2 * every
            clock, done = clock + (half - done) * step_seconds, half
            before = (clock, busy, half)
        clock, done = clock + (step - done) * step_seconds, step
        if what == 1:
            traffic = fragments[p]
            outbound = max(clock, outbound) + traffic.encode_seconds
            wire = max(outbound, wire) + traffic.uplink_seconds
            busy += traffic.uplink_seconds
            inbound = max(wire + traffic.way_seconds, inbound) + traffic.decode_seconds
            landing[p] = (step + delay, inbound)
        elif p in landing and landing[p][0] == step:
            _, arrives = landing.pop(p)
            late = max(0.0, arrives - clock)
            clock += late
            latest = max(latest, late) if before[2] else 0.0
    clock += (_PERIODS * every - done) * step_seconds
    steps = _PERIODS * every - before[2]
    wall = clock - before[0]
    computing = steps * step_seconds
    return Pace(
        min(1.0, computing / wall), max(0.0, wall - computing) / steps, min(1.0, (busy - before[1]) / wall), latest
    )


@lru_cache(maxsize=1024)
def _departures(schedule: Schedule, fragments: int) -> tuple[tuple[int, int], ...]:
    """(step in 1..every, fragment) of a period in which all depart."""
    first = 2 * schedule.every
    steps = range(first + 1, first + schedule.every + 1)
    return tuple((step - first, p) for step in steps for p in schedule.departs(step, fragments))


@dataclass(frozen=True)
class Refusal:
    """What cannot work over these links, with the number."""

    what: str
    because: str
    utilization: float


def tensor_parallel(links: Links, shape: Shape, sequence: int, micro_batch: int, micro_seconds: float) -> Refusal:
    """Every layer split over two sites: 4 all-reduces of its activations a layer and micro-batch, none of which can wait.

    Each takes at least the way and 4·batch·sequence·D bytes (fp32) over the better pair's slower direction; computing halves.
    """
    pairs = [(a, b) for a, b in links.alone if a < b]

    def once(pair: tuple[int, int]) -> float:
        ways = [links.alone[pair], links.alone[pair[1], pair[0]]]
        return max(way.seconds(4 * micro_batch * sequence * shape.width) for way in ways)

    best = min(pairs, key=once)
    waiting = 4 * shape.layers * once(best)
    share = micro_seconds / 2 / (micro_seconds / 2 + waiting)
    a, b = (links.names[place] for place in best)
    return Refusal(
        f"tensor parallelism over {a} – {b}",
        f"4 all-reduces in each of {shape.layers} layers, {text_of_seconds(once(best))} each, are {text_of_seconds(waiting)} of waiting "
        f"for {text_of_seconds(micro_seconds / 2)} of work, in every micro-batch",
        share,
    )
