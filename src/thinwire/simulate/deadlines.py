"""Rounds of one replica on an uplink whose rate changes, in virtual time: their levels, and the stalls of training."""

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
        """The time at which the last bit of a message leaves whose first bit leaves `now`."""
        bits, place = 8.0 * nbytes, bisect_right(self.begins, now) - 1
        for begin, rate in zip(self.begins[place + 1 :], self.rates[place:]):
            if bits <= (begin - now) * rate:
                return now + bits / rate
            bits, now = bits - (begin - now) * rate, begin
        return now + bits / self.rates[-1]


@dataclass(frozen=True)
class Asked:
    """The facts at a round's departure: its bytes at each level, the times of departure and landing, and the time at which the uplink
    will be free, which only an oracle knows.

    Args:
        nbytes: bytes of the round at each level, the finest first.
        now: time of departure, in seconds.
        deadline: time at which it must land, in seconds.
        free_at: time at which the uplink has sent all earlier rounds, in seconds.

    >>> fixed(1)(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))
    1
    """

    nbytes: Sequence[int]
    now: float
    deadline: float
    free_at: float


Choose = Callable[[Asked], int]


def fixed(level: int) -> Choose:
    """Always choose the same level.

    Args:
        level: number of the level, from 0, the finest.

    >>> fixed(0)(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))
    0
    """
    return lambda asked: level


def oracle(trace: RateTrace) -> Choose:
    """Choose the finest level that will arrive in time at the future rates; the coarsest if none will.

    Args:
        trace: the uplink of the rounds.

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
    """Choose like a replica (`RoundPipeline`): the finest level that is expected in time; the coarsest if none is.

    Args:
        known: the times of earlier rounds; each departure is added to it.

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
    """The cost of the rounds of a run.

    Args:
        levels: the level of each round, by fragment and number of the round.
        stalls: seconds that training waited for each round that landed late.
        seconds: duration of the run, in seconds.
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
    """Simulate `steps` inner steps of `step_seconds` each, with fragments of `nbytes` at each level. Landings are added to `known`.

    Args:
        trace: the uplink.
        schedule: the steps at which each fragment departs and lands.
        nbytes: bytes of each fragment at each level, the finest first.
        steps: number of inner steps.
        step_seconds: seconds of one inner step.
        choose: gives the level of each round from the facts at its departure.
        known: the times from which `observed` chooses.

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
