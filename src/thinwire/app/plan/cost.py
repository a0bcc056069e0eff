"""The time that a strategy costs on given links: the utilization of a period, and methods that cannot work. *Predicted*.

All replicas take their steps together, at the pace of the slowest one. The slowest wire carries one round after the
other. A closed form exists only while no flight is late, so departures and landings of a few periods are followed in
order, which takes microseconds. `thinwire simulate` also models jitter, stragglers, outages and shared wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.app.plan.links import Links
from thinwire.app.plan.outline import Shape
from thinwire.app.records.units import text_of_seconds
from thinwire.codecs import Codec
from thinwire.comm import Link
from thinwire.exchange import Exchange
from thinwire.pieces.schedule import Schedule, busiest
from thinwire.strategy import Strategy

DEAR = 0.1  # share of the time from which the work of an exchange is worth a warning
_PERIODS = 12  # that are followed; the first half does not count, because long flights need some periods to settle


@dataclass(frozen=True)
class FragmentSeconds:
    """Seconds of one fragment's exchange: encoding, the slowest wire, the delay of the way, and decoding; and those that training loses by it,
    because its own cores do the work (`RoundPrice`).
    """

    encode_seconds: float
    wire_seconds: float
    way_seconds: float
    decode_seconds: float
    taken_seconds: float = 0.0

    @property
    def flight_seconds(self) -> float:
        """Seconds from departure to arrival on an idle wire."""
        return self.encode_seconds + self.wire_seconds + self.way_seconds + self.decode_seconds


@dataclass(frozen=True)
class Pace:
    """How the time of a long run is spent."""

    utilization: float
    stall_seconds: float  # of an inner step, on average
    wire_use: float  # share of the time in which the slowest wire is busy
    latest_seconds: float  # by how much the latest landing was late
    taken: float  # share of the time in which training's cores do the exchange's work


def wire_seconds(links: Links, nbytes: float, places: Sequence[int] | None = None) -> float:
    """Seconds until each of `places` (default: all) has sent `nbytes` to each of the others, all at once.

    The longest of three times: of the slowest link (at its rate `together`, if that was measured and all take part), of a replica's
    uplink, which carries what it sends to all others, and of its downlink, which carries what it receives.
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


def delays(exchange: Exchange, codec: Codec, numel: int, size: int) -> int:
    """The number of consecutive one-way delays of the link in a round, derived from the exchange's own prediction.

    Args:
        exchange: how packets become their mean.
        codec: the codec of the packets.
        numel: number of elements.
        size: number of replicas.

    >>> from thinwire.codecs import E3M0
    >>> from thinwire.exchange import Direct, TwoShot
    >>> delays(Direct(), E3M0(), 1000, 4), delays(TwoShot(), E3M0(), 1000, 4)
    (1, 2)
    """
    return max(1, round(exchange.seconds(codec, numel, size, _INSTANT)))


_INSTANT = Link(1e30, 1.0)  # only the delay takes time: one second


def follow(strategy: Strategy, step_seconds: float, fragments: Sequence[FragmentSeconds]) -> Pace:
    """Follow the departures and landings of a few periods, in the order of `Replica`.

    >>> from thinwire import diloco
    >>> follow(diloco(every=9), 1.0, [FragmentSeconds(0.0, 0.9, 0.1, 0.0)]).utilization
    0.9
    """
    every, delay = strategy.schedule.every, strategy.schedule.delay
    eager = strategy.merge.whole_period
    clock = outbound = wire = inbound = busy = latest = taken = 0.0
    traffic = [
        (one.taken_seconds, one.encode_seconds, one.wire_seconds, one.way_seconds, one.decode_seconds)
        for one in fragments
    ]
    lands, arrives = [-1] * len(traffic), [0.0] * len(traffic)  # by fragment: step, time
    before = (0.0, 0.0, 0.0, 0)  # clock, busy, taken, step after the first half
    done = 0
    for step, what, p in _events(busiest(strategy.schedule), len(traffic), eager):  # type: ignore[arg-type]  # frozen values hash
        if step > _PERIODS * every:
            break
        if step > _PERIODS // 2 * every and not before[3]:
            half = _PERIODS // 2 * every
            clock, done = clock + (half - done) * step_seconds, half
            before = (clock, busy, taken, half)
        clock, done = clock + (step - done) * step_seconds, step
        if what == 1:  # conditions in place of `max`, which takes half of the time of a plan with many fragments
            own, encode, on_wire, way, decode = traffic[p]
            clock, taken = clock + own, taken + own
            outbound = (clock if clock > outbound else outbound) + encode
            wire = (outbound if outbound > wire else wire) + on_wire
            busy += on_wire
            inbound = (wire + way if wire + way > inbound else inbound) + decode
            lands[p], arrives[p] = step + delay, inbound
        elif lands[p] == step:
            lands[p] = -1
            late = max(0.0, arrives[p] - clock)
            clock += late
            latest = max(latest, late) if before[3] else 0.0
    clock += (_PERIODS * every - done) * step_seconds
    steps = _PERIODS * every - before[3]
    wall = clock - before[0]
    computing = steps * step_seconds
    own = taken - before[2]
    stalled = max(0.0, wall - computing - own)
    return Pace(
        min(1.0, computing / wall), stalled / steps, min(1.0, (busy - before[1]) / wall), latest, min(1.0, own / wall)
    )


@lru_cache(maxsize=1024)
def _events(schedule: Schedule, fragments: int, eager: bool) -> tuple[tuple[int, int, int], ...]:
    """(step, event, fragment) in order, of `_PERIODS` periods in which all fragments depart. The event is 1 for a departure, 2 for a
    landing, and 0 for a landing that comes before a departure at the same step."""
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
    """A method that cannot work over these links, and its predicted utilization."""

    what: str
    because: str
    utilization: float


def tensor_parallel(links: Links, shape: Shape, sequence: int, micro_batch: int, micro_seconds: float) -> Refusal:
    """Refuses to split each layer over two sites: every layer needs 4 blocking all-reduces of its activations in each micro-batch.

    Each takes at least the link's delay and 4·batch·sequence·D bytes (fp32) over the slower direction of the best pair; compute halves.
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
