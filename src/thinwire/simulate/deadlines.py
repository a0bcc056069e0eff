"""Rounds of one replica on an uplink whose rate changes, in virtual time: at which level they travel, and what training waits for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.pieces.schedule import Staggered
from thinwire.runtime.deadlines import Deadlines


@dataclass(frozen=True)
class RateTrace:
    """An uplink with the rate `rates[k]` from `begins[k]` seconds on, and then a delay.

    Args:
        begins: seconds, ascending, from 0.
        rates: bits a second, above 0, as many.
        delay_seconds: from the last bit's departure to its arrival, in seconds.

    >>> RateTrace((0.0, 1.0), (8e6, 8e3)).left(0.5, nbytes=501_000)  # 500 kB, then 1 kB a second later
    2.0
    """

    begins: tuple[float, ...]
    rates: tuple[float, ...]
    delay_seconds: float = 0.0

    def left(self, now: float, nbytes: int) -> float:
        """When the last bit has left of what begins to leave `now`."""
        bits, place = 8.0 * nbytes, bisect_right(self.begins, now) - 1
        for begin, rate in zip(self.begins[place + 1 :], self.rates[place:]):
            if bits <= (begin - now) * rate:
                return now + bits / rate
            bits, now = bits - (begin - now) * rate, begin
        return now + bits / self.rates[-1]


@dataclass(frozen=True)
class Asked:
    """What is known where a round of a fragment departs: its bytes at each level, when it departs and is to land, and when the uplink
    will be free, which only an oracle knows.

    Args:
        nbytes: bytes of the round at each level, the finest first.
        now: when it departs, in seconds.
        deadline: when it is to land, in seconds.
        free_at: when the uplink has sent what departed before, in seconds.

    >>> fixed(1)(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))
    1
    """

    nbytes: Sequence[int]
    now: float
    deadline: float
    free_at: float


Choose = Callable[[Asked], int]


def fixed(level: int) -> Choose:
    """The same level always.

    Args:
        level: number of the level, from 0, the finest.

    >>> fixed(0)(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))
    0
    """
    return lambda asked: level


def oracle(trace: RateTrace) -> Choose:
    """The finest level that will arrive in time, by what the rate will be; the coarsest if none will.

    Args:
        trace: the uplink on which the rounds travel.

    >>> oracle(RateTrace((0.0,), (4000.0,)))(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))  # 500 bytes a second
    1
    """

    def choose(asked: Asked) -> int:
        begin = max(asked.now, asked.free_at)
        for level, nbytes in enumerate(asked.nbytes):
            if trace.left(begin, nbytes) + trace.delay_seconds <= asked.deadline:
                return level
        return len(asked.nbytes) - 1

    return choose


def observed(known: Deadlines) -> Choose:
    """As a replica chooses (`RoundPipeline`): the finest level that is expected in time; the coarsest if none is.

    Args:
        known: what the rounds before have taken; it is told of each departure.

    >>> known = Deadlines()
    >>> known.landed(nbytes=1000, seconds=1.5)
    >>> observed(known)(Asked(nbytes=(1000, 500), now=2.0, deadline=3.0, free_at=0.0))
    1
    """

    def choose(asked: Asked) -> int:
        most = known.share(asked.now, asked.nbytes[0], asked.deadline) * asked.nbytes[0]
        level = next((k for k, nbytes in enumerate(asked.nbytes) if nbytes <= most), len(asked.nbytes) - 1)
        known.departed(asked.now, asked.nbytes[level])
        return level

    return choose


@dataclass(frozen=True)
class Played:
    """What the rounds of a run have cost.

    Args:
        levels: the level of each round, by fragment and number of the round.
        stalls: seconds that training waited for each round that landed late.
        seconds: of the run in all, in seconds.
        nbytes: bytes sent.

    >>> Played({(0, 0): 1}, stalls=(1.0, 1.5), seconds=10.0, nbytes=500).utilization
    0.75
    """

    levels: dict[tuple[int, int], int]
    stalls: tuple[float, ...]
    seconds: float
    nbytes: int

    @property
    def stall_seconds(self) -> float:
        return sum(self.stalls)

    @property
    def utilization(self) -> float:
        return 1 - self.stall_seconds / self.seconds


@dataclass(frozen=True)
class _Flight:
    lands: int
    arrival: float
    nbytes: int
    seconds: float


def play(
    trace: RateTrace,
    schedule: Staggered,
    nbytes: Sequence[Sequence[int]],
    steps: int,
    step_seconds: float,
    choose: Choose,
    known: Deadlines,
) -> Played:
    """`steps` inner steps of `step_seconds` each, with fragments of so many `nbytes` at each level. `known` hears of landings.

    Args:
        trace: the uplink.
        schedule: when which fragment departs and lands.
        nbytes: bytes of each fragment at each level, the finest first.
        steps: number of inner steps.
        step_seconds: seconds of one.
        choose: the level of each round, by what is known where it departs.
        known: what `observed` chooses by.

    >>> played = play(RateTrace((0.0,), (4000.0,)), Staggered(every=2, delay=1), [(1000, 500)], 4, 1.0, fixed(0), Deadlines())
    >>> played.stalls, played.nbytes  # a round takes 2 seconds, and 1 is left; the second has not landed
    ((1.0,), 2000)
    """
    now, free_at = 0.0, 0.0
    flights: list[_Flight] = []
    levels, stalls = dict[tuple[int, int], int](), list[float]()
    numbers, sent = [0] * len(nbytes), 0
    for step in range(1, steps + 1):
        now += step_seconds
        for index in schedule.departs(step, len(nbytes)):
            level = choose(Asked(nbytes[index], now, now + schedule.delay * step_seconds, free_at))
            begin, of = max(now, free_at), nbytes[index][level]
            free_at = trace.left(begin, of)
            arrival = free_at + trace.delay_seconds
            flights.append(_Flight(step + schedule.delay, arrival, of, arrival - begin))
            levels[index, numbers[index]] = level
            numbers[index], sent = numbers[index] + 1, sent + of
        for flight in [one for one in flights if one.lands == step]:
            flights.remove(flight)
            if flight.arrival > now:
                stalls.append(flight.arrival - now)
                now = flight.arrival
            known.landed(flight.nbytes, flight.seconds)
    return Played(levels, tuple(stalls), now, sent)
