"""Stragglers in virtual time: the cost of waiting for them, of ignoring them, and of codes, in rounds of gradients.

In a round every replica computes its share of a batch and sends one message to all that need it; the round ends when they stop
waiting. *Not simulated*: the wire; work of a late replica after the round, because it stops and begins the next round with the
others.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import isfinite

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.methods.bursty import Late
from thinwire.lab.methods.gradient_codes import Repetition, gradient_code
from thinwire.lab.methods.sequential_codes import Coded, Master, Multiplexed, Scheme, SelectiveRepeat
from thinwire.lab.simulate.layers import Floats
from thinwire.rng import derive

MOST_DELAYS = 4_000_000  # most delays: rounds times replicas
PATIENCE_SHARE = 0.1
_LEVELS = 12  # number of values of λ, and of s, in a search
_WINDOWS = 4  # largest W − 1 in a search


@dataclass(frozen=True, eq=False)
class Delays:
    """Seconds from the beginning of a round until each replica's result arrives, if it computes 1/n of the batch [round, replica].

    A replica that computes the share L takes `batch_seconds`·(L − 1/n) longer (§F of arXiv 2211.13802: linear in the load).

    Args:
        seconds: float64 [round, replica].
        batch_seconds: seconds in which one replica computes a whole batch.

    Raises:
        ConfigurationError: a time is not positive and finite, fewer than two replicas, or more than four million times.

    >>> Delays(np.ones((10, 4)), batch_seconds=2.0).replicas
    4
    """

    seconds: Floats
    batch_seconds: float

    def __post_init__(self) -> None:
        _check_size(*self.seconds.shape)
        if not bool(np.isfinite(self.seconds).all() and (self.seconds > 0).all()) or not 0 <= self.batch_seconds < 1e9:
            raise ConfigurationError(
                f"delays from {self.seconds.min()} to {self.seconds.max()} s, batch_seconds={self.batch_seconds}: positive, finite times are needed."
            )

    @property
    def replicas(self) -> int:
        return int(self.seconds.shape[1])

    def part(self, begin: int, end: int | None = None) -> Delays:
        """Some of the rounds."""
        return Delays(self.seconds[begin:end], self.batch_seconds)


def gilbert_elliott(
    rounds: int, replicas: int, step_seconds: float, pause_seconds: float, every: float, length: float, seed: int
) -> Floats:
    """Seconds of each round and replica, with bursts: a Markov chain of two states, started from its steady state.

    A replica takes `step_seconds`, and `pause_seconds` more while it is in its bad state.

    Args:
        rounds: number of rounds.
        replicas: number of replicas.
        step_seconds: seconds of an undisturbed round.
        pause_seconds: additional seconds in the bad state.
        every: mean rounds in the good state, at least 1.
        length: mean rounds in the bad state, at least 1.
        seed: of the draws; an integer number.

    Returns:
        Float64 [round, replica].

    Raises:
        ConfigurationError: a number is out of range.

    >>> gilbert_elliott(3, 2, 1.0, 5.0, every=1e9, length=1, seed=0).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    _check(rounds, replicas, step_seconds, pause_seconds)
    if not (isfinite(every) and every >= 1 and isfinite(length) and length >= 1):
        raise ConfigurationError(
            f"bursts of {length} rounds every {every} rounds: both are means, at least 1 round each."
        )
    draws = np.random.default_rng(derive(seed, "bursts"))
    bad = draws.random(replicas) < length / (length + every)
    rows = []
    for _ in range(rounds):
        rows.append(bad)
        drawn = draws.random(replicas)
        bad = np.where(bad, drawn >= 1 / length, drawn < 1 / every)
    found: Floats = step_seconds + pause_seconds * np.array(rows, dtype=np.float64)
    return found


def shifted_exponential(rounds: int, replicas: int, step_seconds: float, mean_seconds: float, seed: int) -> Floats:
    """Seconds of each round and replica: `step_seconds` and a draw from an exponential distribution.

    Args:
        rounds: number of rounds.
        replicas: number of replicas.
        step_seconds: seconds of an undisturbed round.
        mean_seconds: mean seconds of the random delay.
        seed: of the draws; an integer number.

    Returns:
        Float64 [round, replica].

    Raises:
        ConfigurationError: a number is out of range.

    >>> shifted_exponential(2, 2, 1.0, 0.0, seed=0).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    _check(rounds, replicas, step_seconds, mean_seconds)
    draws = np.random.default_rng(derive(seed, "exponential"))
    found: Floats = step_seconds + draws.exponential(1.0, (rounds, replicas)) * mean_seconds
    return found


def _check_size(rounds: int, replicas: int) -> None:
    if rounds < 1 or replicas < 2 or rounds * replicas > MOST_DELAYS:
        raise ConfigurationError(
            f"{rounds} rounds of {replicas} replicas: at least 1 round, 2 replicas, and at most {MOST_DELAYS:,} delays are needed."
        )


def _check(rounds: int, replicas: int, step_seconds: float, more_seconds: float) -> None:
    _check_size(rounds, replicas)
    if not (isfinite(step_seconds) and step_seconds > 0 and isfinite(more_seconds) and more_seconds >= 0):
        raise ConfigurationError(
            f"step_seconds={step_seconds}, delays of {more_seconds} s: a positive time and one that is not negative are needed."
        )


@dataclass(frozen=True)
class CodedRun:
    """A simulated run of coded gradients.

    Args:
        scheme: the code.
        ends: seconds at which each round ended.
        jobs: number of batches.
        late: number of results that no round waited for.
        lost: share of all batches that was lost, [0, 1]; 0 for codes.

    >>> CodedRun(Coded(Repetition(4, 1)), ends=(1.0, 2.0), jobs=2, late=1).seconds_per_job
    1.0
    """

    scheme: Scheme
    ends: tuple[float, ...]
    jobs: int
    late: int
    lost: float = 0.0

    @property
    def seconds_per_job(self) -> float:
        """Mean seconds per batch, with the last rounds in which late jobs are completed."""
        return self.ends[-1] / self.jobs


def simulate(scheme: Scheme, delays: Delays, patience: float = PATIENCE_SHARE) -> CodedRun:
    """Simulate a run with as many jobs as fit into these rounds, each of them decoded exactly.

    A round does not wait for a replica that takes more than (1 + `patience`) times as long as the first, if the scheme
    allows the pattern of late replicas that follows (arXiv 2211.13802; there `patience` is 1).
    *Differs*: if the pattern is not allowed, the round ends with the first further arrival that makes it allowed, not with the last of
    all. A round ends at once if that costs later rounds nothing.

    Args:
        scheme: the code.
        delays: seconds of each round and replica.
        patience: how much longer than the first replica a round waits, as a share of its time.

    Raises:
        ConfigurationError: other numbers of replicas, too few rounds, or a negative patience.

    >>> run = simulate(Coded(Repetition(4, 1)), Delays(np.ones((10, 4)), batch_seconds=0.0))
    >>> run.jobs, run.seconds_per_job
    (10, 1.0)
    """
    replicas, extra = delays.replicas, delays.batch_seconds * float(scheme.load - Fraction(1, delays.replicas))
    jobs = len(delays.seconds) - scheme.delay
    if scheme.replicas != replicas or jobs < 1:
        raise ConfigurationError(
            f"{scheme} over {len(delays.seconds)} rounds of {replicas} replicas: delays of as many replicas, and more than "
            f"{scheme.delay} rounds, are needed."
        )
    if not (isfinite(patience) and patience >= 0):
        raise ConfigurationError(
            f"patience={patience}: 0 or more is needed; 0.1 waits a tenth longer than the first one takes."
        )
    master, now, late_in_all = Master(scheme, jobs), 0.0, 0
    ends = []
    for arrivals in delays.seconds + extra:
        seconds, late = _end(master, arrivals, patience)
        master.finish(late)
        now, late_in_all = now + seconds, late_in_all + len(late)
        ends.append(now)
    return CodedRun(scheme, tuple(ends), jobs, late_in_all)


def _end(master: Master, arrivals: Floats, patience: float) -> tuple[float, Late]:
    """The end of a round, and its late replicas."""
    order = np.argsort(arrivals, kind="stable").tolist()
    times = arrivals[order]

    def late(heard: int) -> Late:
        return frozenset(order[heard:])

    free = _first(len(order), lambda heard: not master.burden(late(heard)))
    deadline = (1 + patience) * float(times[0])
    by_then = int(np.searchsorted(times, deadline, side="right"))
    allowed = max(by_then, _first(len(order), lambda heard: master.allows(late(heard))))
    waited = float(times[-1]) if allowed == len(order) else max(deadline, float(times[allowed - 1]))
    if float(times[free - 1]) <= waited:
        return float(times[free - 1]), late(free)
    return waited, late(allowed)


def _first(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest number of arrivals, 1 to `most`, that is enough; larger numbers are then enough too."""
    return bisect.bisect_left(range(1, most), True, key=enough) + 1


def without_the_slowest(delays: Delays, stragglers: int) -> CodedRun:
    """Simulate a run without a code: each step takes the mean of the first n − `stragglers` results; the other results are lost.

    Args:
        delays: seconds of each round and replica.
        stragglers: number of replicas that a round does not wait for.

    Raises:
        ConfigurationError: no replica would be left.

    >>> without_the_slowest(Delays(np.array([[1.0, 1.0, 1.0, 9.0]]), batch_seconds=0.0), stragglers=1).ends
    (1.0,)
    """
    scheme = Coded(Repetition(delays.replicas, 0))
    if not 0 <= stragglers < delays.replicas:
        raise ConfigurationError(
            f"stragglers={stragglers} of {delays.replicas} replicas: at least one must be left; at most {delays.replicas - 1} are possible."
        )
    times = np.sort(delays.seconds, axis=1)[:, delays.replicas - stragglers - 1]
    jobs = len(delays.seconds)
    return CodedRun(scheme, tuple(np.cumsum(times).tolist()), jobs, stragglers * jobs, stragglers / delays.replicas)


# ---- search of parameters


FAMILIES: tuple[str, ...] = ("gradient coding", "SR-SGC", "M-SGC")


def candidates(family: str, replicas: int) -> Iterator[Scheme]:
    """The schemes of a family for a search: B < W ≤ 5, and up to 12 values of λ, or of s, from 1 to n.

    Args:
        family: one of `FAMILIES`.
        replicas: number n of replicas.

    >>> len(list(candidates("gradient coding", replicas=4)))
    3
    """
    levels = sorted({round(float(value)) for value in np.geomspace(1, replicas, min(_LEVELS, replicas))})
    for (window, burst), stragglers in product(_shapes(), levels):
        try:
            if family == "gradient coding" and window == 2:
                yield Coded(gradient_code(replicas, stragglers))
            elif family == "SR-SGC":
                yield SelectiveRepeat(replicas, burst, window, stragglers)
            elif family == "M-SGC":
                yield Multiplexed(replicas, burst, window, stragglers)
        except ConfigurationError:  # B does not divide W − 1, or s = n
            continue


def _shapes() -> list[tuple[int, int]]:
    """(W, B)"""
    return [(window, burst) for window in range(2, _WINDOWS + 2) for burst in range(1, window)]


def search(family: str, probe: Delays, patience: float = PATIENCE_SHARE) -> Scheme:
    """The scheme of a family that would have been fastest in the probed rounds; the one with the least load among equally fast ones.

    No code was used in the probed rounds.

    Args:
        family: one of `FAMILIES`.
        probe: seconds of the probed rounds and replicas.
        patience: how much longer than the first replica a round waits, as a share of its time.

    Raises:
        ConfigurationError: the family is not known, or there are too few rounds.

    >>> search("gradient coding", Delays(np.ones((12, 4)), batch_seconds=1.0)).load
    Fraction(1, 2)
    """
    if family not in FAMILIES:
        raise ConfigurationError(f"family={family!r} is not known; there are {', '.join(FAMILIES)}.")
    tried: Sequence[Scheme] = [s for s in candidates(family, probe.replicas) if s.delay < len(probe.seconds)]
    if not tried:
        raise ConfigurationError(f"{len(probe.seconds)} rounds to probe: at least 10 are needed for a search.")
    return min(tried, key=lambda scheme: (simulate(scheme, probe, patience).seconds_per_job, scheme.load))
