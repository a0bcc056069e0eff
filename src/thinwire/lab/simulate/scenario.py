"""The setting of a simulated run: the speeds of the replicas, their wires, and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, log, sqrt

import numpy as np

from thinwire.codecs import Shapes
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.rng import derive
from thinwire.strategy import Strategy

LONGEST_STEP = 1e9  # seconds of a step: thirty years


@dataclass(frozen=True)
class Outages:
    """Random times in which a wire is down; both durations are exponentially distributed.

    Args:
        every_seconds: mean seconds between two outages, at least a millisecond.
        seconds: mean seconds of an outage.
        seed: seed of the random times; an integer number.

    Raises:
        ConfigurationError: a time is not positive, or outages are less than a millisecond apart.

    >>> begin, end = next(iter(Outages(every_seconds=3600, seconds=30)))
    >>> 0 < begin < end
    True
    """

    every_seconds: float
    seconds: float
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "every_seconds", "seconds")
        if self.every_seconds < 1e-3:
            raise ConfigurationError(
                f"every_seconds={self.every_seconds}: outages more than a millisecond apart are needed."
            )

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Yield (begin, end) without end; every iteration gives the same times."""
        random, end = np.random.default_rng(self.seed), 0.0
        while True:
            begin = end + random.exponential(self.every_seconds)
            yield begin, (end := begin + random.exponential(self.seconds))


@dataclass(frozen=True)
class Wire:
    """An uplink: a link, the share of lost bytes, and its outages.

    Lost bytes are sent again: n bytes occupy the wire for 8·n / (rate·(1 − loss)) seconds. Congestion control is not
    modelled: the rate is that of a stream. A message on a wire that goes down continues when the wire is up again.

    Args:
        link: rate and delay.
        loss: share of the bytes that is lost, [0, 1).
        outages: pairs (begin, end) in seconds, ascending and apart; or `Outages` for random ones.

    Raises:
        ConfigurationError: the loss is out of range, or the outages are not ascending.

    >>> Wire(Link(1e8, 0.05), loss=0.01, outages=((60.0, 90.0),)).loss
    0.01
    """

    link: Link
    loss: float = 0.0
    outages: tuple[tuple[float, float], ...] | Outages = ()

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise ConfigurationError(f"loss={self.loss}: a share of the bytes, 0 or more and less than 1, is needed.")
        given = () if isinstance(self.outages, Outages) else self.outages
        times = [time for outage in given for time in outage]
        if times != sorted(times) or len(set(times)) < len(times) or not all(isfinite(t) and t >= 0 for t in times):
            raise ConfigurationError(f"outages={given}: pairs of seconds (begin, end) are needed, ascending and apart.")


@dataclass(frozen=True)
class Stragglers:
    """Random pauses in inner steps, independent for each replica; both durations are exponentially distributed.

    Args:
        every_seconds: mean seconds of computing between two pauses.
        seconds: mean seconds of a pause.

    Raises:
        ConfigurationError: a time is not positive.

    >>> Stragglers(every_seconds=60, seconds=5).seconds
    5
    """

    every_seconds: float
    seconds: float

    def __post_init__(self) -> None:
        _positive(self, "every_seconds", "seconds")


@dataclass(frozen=True)
class Failures:
    """Random deaths of replicas, each of which returns; the time between deaths is exponentially distributed.

    The group is elastic: the others continue without the replica as soon as they notice its death. A returning replica takes the
    anchors at the next landing and continues from there. Missed steps are not made up.

    Args:
        every_seconds: mean seconds between two deaths of one replica.
        repair_seconds: seconds until it returns.
        detect_seconds: seconds until the others notice.

    Raises:
        ConfigurationError: a time is not positive; `detect_seconds` may be 0.

    >>> Failures(every_seconds=86400, repair_seconds=600, detect_seconds=30).repair_seconds
    600
    """

    every_seconds: float
    repair_seconds: float
    detect_seconds: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "every_seconds", "repair_seconds")
        if not (isfinite(self.detect_seconds) and self.detect_seconds >= 0):
            raise ConfigurationError(f"detect_seconds={self.detect_seconds}: zero or a positive time is needed.")


@dataclass(frozen=True)
class Scenario:
    """The machines and the network on which a strategy is simulated.

    Args:
        step_seconds: seconds of an inner step of each replica [M].
        wires: the uplinks [W].
        shares: for each replica the number of its wire [M]. Replicas on one wire share it, first in
            first out. None: one wire for each replica.
        jitter: coefficient of variation of a step's duration (gamma distributed), 0 to 10.
        stragglers: pauses in inner steps.
        failures: deaths and returns of replicas.
        encode_seconds: seconds in which an exchange thread encodes one parameter.
        decode_seconds: seconds in which it decodes one parameter of one packet.
        seed: seed of all random numbers; an integer number.

    Raises:
        ConfigurationError: a time is not positive or too long, wires and replicas do not fit, or failures are less than a
            step apart.

    >>> Scenario.alike(replicas=4, step_seconds=0.1, link=Link(1e8)).replicas
    4
    """

    step_seconds: tuple[float, ...]
    wires: tuple[Wire, ...]
    shares: tuple[int, ...] | None = None
    jitter: float = 0.0
    stragglers: Stragglers | None = None
    failures: Failures | None = None
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.step_seconds or not all(0 < s <= LONGEST_STEP for s in self.step_seconds):
            shown = self.step_seconds if len(self.step_seconds) < 9 else f"{len(self.step_seconds)} times"
            raise ConfigurationError(
                f"step_seconds={shown}: a positive time for every replica, at most {LONGEST_STEP:g} s, is needed."
            )
        shares = range(self.replicas) if self.shares is None else self.shares
        if len(shares) != self.replicas or not all(0 <= wire < len(self.wires) for wire in shares):
            raise ConfigurationError(
                f"{self.replicas} replicas, {len(self.wires)} wires, shares={self.shares and self.shares[:8]}: a wire for every "
                "replica, or for every replica the number of its wire, is needed."
            )
        if self.failures and self.failures.every_seconds < max(self.step_seconds):
            raise ConfigurationError(
                f"a failure every {self.failures.every_seconds:g} s with steps of {max(self.step_seconds):g} s: hardly a step would "
                "ever be finished; failures at least a step apart are needed."
            )
        for name, most in (("jitter", 10.0), ("encode_seconds", 1.0), ("decode_seconds", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigurationError(f"{name}={getattr(self, name)}: between 0 and {most:g} is needed.")

    @property
    def replicas(self) -> int:
        return len(self.step_seconds)

    def floor_bits_per_second(self, strategy: Strategy, fragments: Sequence[int | Shapes]) -> float:
        """Predicted: the rate that the busiest wire needs to carry a period's bytes while the slowest replica computes."""
        period = strategy.schedule.every * max(self.step_seconds)
        sharing = max(Counter(range(self.replicas) if self.shares is None else self.shares).values())
        return 8 * sharing * strategy.nbytes_per_period(fragments, self.replicas) / period

    @classmethod
    def alike(cls, replicas: int, step_seconds: float, link: Link) -> Scenario:
        """Equal replicas, each with its own uplink."""
        return cls((step_seconds,) * replicas, (Wire(link),) * replicas)


def spread(mean: float, variation: float, count: int, seed: int, purpose: str) -> tuple[float, ...]:
    """`count` lognormal draws with the given mean and coefficient of variation: speeds of machines, rates of links.

    Args:
        mean: number, the mean of the draws, in any unit.
        variation: standard deviation over mean.
        count: number of draws.
        seed: seed of the draws; an integer number.
        purpose: a name; another purpose gives other draws.

    >>> spread(2.0, 0.0, 3, seed=0, purpose="steps")
    (2.0, 2.0, 2.0)
    """
    deviation = sqrt(log(1 + variation**2))
    drawn = np.random.default_rng(derive(seed, purpose)).normal(-(deviation**2) / 2, deviation, count)
    return tuple((mean * np.exp(drawn)).tolist())


def _positive(piece: object, *names: str) -> None:
    for name in names:
        if not (isfinite(getattr(piece, name)) and getattr(piece, name) > 0):
            raise ConfigurationError(f"{name}={getattr(piece, name)}: a positive time is needed.")
