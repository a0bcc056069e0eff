"""Rounds of one replica on an uplink whose rate changes, in virtual time: their levels, and the stalls of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.comm.rates import RateTrace as RateTrace
from thinwire.lab.codecs.deadlines import Deadlines
from thinwire.pieces.schedule import Staggered


@dataclass(frozen=True)
class Asked:
    """The facts at a round's departure: its bytes at each level, the times of departure and landing, and the time at which the uplink
    will be free, which only an oracle knows.

    Args:
        nbytes: bytes of the round at each level, the finest first; the last may be a skipped round.
        now: time of departure, in seconds.
        deadline: time at which it must land, in seconds.
        free_at: time at which the uplink has sent all earlier rounds, in seconds.
        first: whether it is the first round of its fragment.

    >>> fixed(1)(Asked(nbytes=(1000, 500), now=0.0, deadline=1.0, free_at=0.0))
    1
    """

    nbytes: Sequence[int]
    now: float
    deadline: float
    free_at: float
    first: bool = False


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
    """Choose like a replica (`RoundPipeline`): the coarsest level in a first round; then the finest that is expected in time, or the coarsest.

    Args:
        known: the times of earlier rounds; `play` adds to it.

    >>> known = Deadlines()
    >>> known.arrived("a round", now=1.5, nbytes=1000, seconds=1.5)
    >>> observed(known)(Asked(nbytes=(1000, 500), now=2.0, deadline=3.0, free_at=0.0))
    1
    """

    def choose(asked: Asked) -> int:
        if asked.first:
            return len(asked.nbytes) - 1
        most = known.share(asked.now, asked.nbytes[0], asked.deadline) * asked.nbytes[0]
        return next((k for k, nbytes in enumerate(asked.nbytes) if nbytes <= most), len(asked.nbytes) - 1)

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
    of: tuple[int, int]
    lands: int
    arrival: float
    nbytes: int
    seconds: float
    values: bool


def play(
    trace: RateTrace,
    schedule: Staggered,
    nbytes: Sequence[Sequence[int]],
    steps: int,
    step_seconds: float,
    choose: Choose,
    known: Deadlines,
    skips: int = 0,
) -> Played:
    """Simulate `steps` inner steps of `step_seconds` each, with fragments of `nbytes` at each level. The rounds are told to `known`.

    Args:
        trace: the uplink.
        schedule: the steps at which each fragment departs and lands.
        nbytes: bytes of each fragment at each level, the finest first; with `skips`, the last of a skipped round.
        steps: number of inner steps.
        step_seconds: seconds of one inner step.
        choose: gives the level of each round from the facts at its departure.
        known: the times from which `observed` chooses.
        skips: the most rounds of a fragment in a row that may be skipped.

    >>> played = play(RateTrace((0.0,), (4000.0,)), Staggered(every=2, delay=1), [(1000, 500)], 4, 1.0, fixed(0), Deadlines())
    >>> played.stalls, played.nbytes  # a round takes 2 seconds, and 1 is left; the second has not landed
    ((1.0,), 2000)
    """
    now = free_at = 0.0
    flights, arriving, stalls = list[_Flight](), deque[_Flight](), list[float]()
    levels, sent = dict[tuple[int, int], int](), 0
    numbers, skipped = [0] * len(nbytes), [0] * len(nbytes)

    def hear() -> None:
        while arriving and arriving[0].arrival <= now:
            one = arriving.popleft()
            known.arrived(one.of, one.arrival, one.nbytes, one.seconds, one.values)

    for step in range(1, steps + 1):
        now += step_seconds
        for index in schedule.departs(step, len(nbytes)):
            hear()
            first = numbers[index] == 0
            sizes = nbytes[index][:-1] if skips and (first or skipped[index] >= skips) else nbytes[index]
            level = choose(Asked(sizes, now, now + schedule.delay * step_seconds, free_at, first))
            values = not skips or level < len(nbytes[index]) - 1
            skipped[index] = 0 if values else skipped[index] + 1
            begin, of, key = max(now, free_at), sizes[level], (index, numbers[index])
            free_at = trace.left(begin, of)
            arrival = free_at + trace.delay_seconds
            arriving.append(_Flight(key, step + schedule.delay, arrival, of, arrival - begin, values))
            flights.append(arriving[-1])
            known.departed(key, now, of)
            levels[key], numbers[index], sent = level, numbers[index] + 1, sent + of
        for flight in [one for one in flights if one.lands == step]:
            flights.remove(flight)
            if (stall := flight.arrival - now) > 0:
                stalls.append(stall)
                now = flight.arrival
            hear()
            known.landed(late=stall > 0)
    return Played(levels, tuple(stalls), now, sent)
