"""What a strategy costs in time on given links: utilisation by following one period, and what cannot work. *Predicted*.

All replicas take their steps together, at the pace of the slowest, and the slowest wire carries one round after the
other. That is a closed form only while no flight is late; so departures and landings of a few periods are followed
in order, which takes microseconds. `thinwire simulate` has jitter, stragglers, outages and shared wires beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.pieces.schedule import Schedule, busiest
from thinwire.plan.links import Links
from thinwire.plan.outline import Shape
from thinwire.records.units import text_of_seconds
from thinwire.strategy import Strategy

_PERIODS = 12  # followed; the first half does not count (long flights take some to settle)


@dataclass(frozen=True)
class FragmentSeconds:
    """How long one fragment keeps what busy: the exchange thread before and after, the slowest wire, and the way."""

    encode_seconds: float
    wire_seconds: float
    way_seconds: float
    decode_seconds: float

    @property
    def flight_seconds(self) -> float:
        """On an idle wire."""
        return self.encode_seconds + self.wire_seconds + self.way_seconds + self.decode_seconds


@dataclass(frozen=True)
class Pace:
    """Where the time goes in the long run."""

    utilization: float
    stall_seconds: float  # of an inner step, on average
    wire_use: float  # share of the time in which the slowest wire is busy
    latest_seconds: float  # by how much the latest landing was late


def wire_seconds(links: Links, nbytes: float, places: Sequence[int] | None = None) -> float:
    """How long it takes until each of `places` (without: of all) has sent `nbytes` to each of the others, all at once.

    The fullest of three: a link by itself (at its rate `together` while all are there, where that was measured), a
    replica's way up, and its way down, which carry what goes to and what comes from all others.
    """
    chosen = np.arange(len(links)) if places is None else np.array(places)
    others = len(chosen) - 1
    if not others:
        return 0.0
    rates = links.rates[np.ix_(chosen, chosen)]
    together = links.together.values() if len(chosen) == len(links) else ()
    link: float = min([float(rates.min()), *together])
    shared: float = min(min(links.up[place], links.down[place]) for place in chosen)
    return 8 * nbytes * max(1 / link, others / shared)


def way_seconds(links: Links, places: Sequence[int] | None = None) -> float:
    """The longest delay between two of the replicas."""
    return float((links.delays if places is None else links.delays[np.ix_(places, places)]).max(initial=0.0))


def follow(strategy: Strategy, step_seconds: float, fragments: Sequence[FragmentSeconds]) -> Pace:
    """Follow departures and landings, as `Replica` orders them, through a few periods.

    >>> from thinwire import diloco
    >>> follow(diloco(every=9), 1.0, [FragmentSeconds(0.0, 0.9, 0.1, 0.0)]).utilization
    0.9
    """
    every, delay = strategy.schedule.every, strategy.schedule.delay
    eager = strategy.merge.whole_period
    clock = outbound = wire = inbound = busy = latest = 0.0
    landing: dict[int, tuple[int, float]] = {}  # by fragment: step, time
    before = (0.0, 0.0, 0)  # clock, busy, step after the first half
    done = 0
    for step, what, p in _events(busiest(strategy.schedule), len(fragments), eager):  # type: ignore[arg-type]  # frozen values hash
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
            wire = max(outbound, wire) + traffic.wire_seconds
            busy += traffic.wire_seconds
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
def _events(schedule: Schedule, fragments: int, eager: bool) -> tuple[tuple[int, int, int], ...]:
    """(step, what, fragment) of some periods in which all depart, in order. What: 1 departs, 2 lands, 0 lands before it departs."""
    first = 2 * schedule.every
    steps = range(first + 1, first + schedule.every + 1)
    departures = [(step - first, p) for step in steps for p in schedule.departs(step, fragments)]
    events: list[tuple[int, int, int]] = []
    for period in range(_PERIODS):
        for step, p in departures:
            at = period * schedule.every + step
            events += [(at, 1, p), (at + schedule.delay, 0 if eager else 2, p)]
    return tuple(sorted(events))


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
    ways = links.delays + 8 * 4 * micro_batch * sequence * shape.width / links.rates
    both = np.maximum(ways, ways.T) + np.diag([np.inf] * len(links))
    best = np.unravel_index(both.argmin(), both.shape)
    once = float(both[best])
    waiting = 4 * shape.layers * once
    share = micro_seconds / 2 / (micro_seconds / 2 + waiting)
    a, b = (links.names[place] for place in best)
    return Refusal(
        f"tensor parallelism over {a} – {b}",
        f"4 all-reduces in each of {shape.layers} layers, {text_of_seconds(once)} each, are {text_of_seconds(waiting)} of waiting "
        f"for {text_of_seconds(micro_seconds / 2)} of work, in every micro-batch",
        share,
    )
