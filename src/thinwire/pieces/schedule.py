"""Schedules: when fragments depart and land, as pure functions of the inner step, or of the learning rate at the start of a round.

Steps count from 1. Departures and landings happen after inner step t; a round that departs at t lands at t + `delay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from thinwire.errors import ConfigurationError


@runtime_checkable
class Schedule(Protocol):
    """When fragments depart. `every` is H and `delay` is τ, both in inner steps."""

    @property
    def every(self) -> int: ...

    @property
    def delay(self) -> int: ...

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round; empty: a replica may join at any step."""

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        """The fragments (0..fragments-1) whose delta departs after inner step `step`, in the order of departure."""


@runtime_checkable
class Adaptive(Protocol):
    """A schedule whose period follows the learning rate: all fragments depart together, at the end of every round. `every` is the least
    period."""

    @property
    def every(self) -> int: ...

    @property
    def delay(self) -> int: ...

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round."""

    def length(self, lr: float, before: float | None) -> int:
        """Inner steps of a round whose first step has the learning rate `lr`; `before` is that of the previous round."""


Rates = Callable[[int], float]
"""The learning rate of an inner step."""


MOST_STEPS = 1_000_000  # between two rounds: plans walk through each step of a period


def _check(schedule: Schedule | Adaptive) -> None:
    for name, value in (("every", schedule.every), ("delay", schedule.delay)):
        if type(value) is not int:
            raise ConfigurationError(f"{name}={value!r}: a whole number of inner steps is needed.")
    if not 1 <= schedule.every <= MOST_STEPS:
        raise ConfigurationError(
            f"every={schedule.every}: at least 1 inner step between two rounds is needed, and at most {MOST_STEPS:,}."
        )
    if not 0 <= schedule.delay <= schedule.every:
        raise ConfigurationError(
            f"delay={schedule.delay} with every={schedule.every}: a round must land before its fragment departs again; "
            f"choose 0 <= delay <= every, so at most {schedule.every}."
        )


@dataclass(frozen=True)
class Every:
    """All fragments together, every `every` inner steps: t mod H = 0 (DiLoCo, arXiv 2311.08105, Algorithm 1).

        departs at t mod H = 0,   lands at t + τ

    *Differs*: DiLoCo's rounds land at once, τ = 0.

    Args:
        every: H, inner steps.
        delay: τ, inner steps from departure to landing.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> [t for t in range(1, 10) if Every(3).departs(t, fragments=2)]
    [3, 6, 9]
    """

    every: int
    delay: int = 0

    needs_fixed_group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _check(self)

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        return tuple(range(fragments)) if step % self.every == 0 else ()


@dataclass(frozen=True)
class Staggered:
    """Fragments in turn, each every `every` inner steps: (t − t_p) mod H = 0 and t − t_p ≥ H.

        t_p = ⌊p·H/P⌋,   or t_p + H = `offsets`[p], the step of fragment p's first departure

    *Source*: Streaming DiLoCo (arXiv 2501.18512, Algorithm 2). *Differs*: the authors' figures use ⌊H/P⌋ between fragments and so a
    period of P·⌊H/P⌋; here the period is exactly `every`, also when P does not divide it. `short_first` gives the
    offsets of torchft and MaxText, whose first interval is shorter than H.

    Args:
        every: H, inner steps.
        delay: τ, inner steps from departure to landing.
        offsets: the inner step of each fragment's first departure; None: as above.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Staggered(every=100).departs(150, fragments=2)
    (1,)
    >>> [t for t in range(1, 40) if Staggered(every=10).departs(t, fragments=3) == (1,)]  # t_1 = 3
    [13, 23, 33]
    """

    every: int
    delay: int = 0
    offsets: tuple[int, ...] | None = None

    needs_fixed_group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _check(self)
        if self.offsets is None:
            return
        if not isinstance(self.offsets, tuple) or any(type(first) is not int for first in self.offsets):
            raise ConfigurationError(
                f"offsets={self.offsets!r}: a tuple of whole numbers is needed, the inner steps of the first departures."
            )
        if any(first < 1 for first in self.offsets):
            raise ConfigurationError(f"offsets={self.offsets}: every fragment first departs at inner step 1 or later.")

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        if self.offsets is not None and len(self.offsets) != fragments:
            raise ConfigurationError(
                f"offsets={self.offsets} are for {len(self.offsets)} fragments, the partition makes {fragments}; give one offset a fragment."
            )
        if self.offsets is not None:
            return tuple(p for p, at in enumerate(self.offsets) if step >= at and (step - at) % self.every == 0)
        if step < self.every:
            return ()
        # those with ⌊p·H/P⌋ = t mod H; there may be hundreds of fragments
        first, end = (-(-rest * fragments // self.every) for rest in (step % self.every, step % self.every + 1))
        return tuple(range(first, end))


def short_first(every: int, fragments: int, delay: int = 0) -> tuple[int, ...]:
    """Offsets so that fragment p first *lands* at ⌊(p+1)·H/P⌋ and departs `delay` steps before (the phase of
    torchft).

    A fragment that would have to depart before the first inner step waits for one more period.

    Args:
        every, delay: of the schedule, in inner steps.
        fragments: number of fragments, with the one outside the layers.

    >>> short_first(every=6, fragments=2, delay=1)
    (2, 5)
    """
    departures = [(p + 1) * every // fragments - delay for p in range(fragments)]
    return tuple(step if step >= 1 else step + every for step in departures)


LONGEST_ROUND = 1 << 31  # inner steps of a round: it ends with the training


@dataclass(frozen=True)
class Quadratic:
    """H = max(`every`, ⌊(scale / η)^power⌋) for a round whose first inner step has the learning rate η: the smaller the steps of a
    replica, the longer it may train alone.

        H = max(every, ⌊(scale / η)^power⌋);   in warm-up H = every: in the first round, and while η is higher than a round before

    *Source*: the Quadratic Synchronization Rule (Gu, Lyu, Arora, Zhang, Huang, ICLR 2024, arXiv 2310.14423), with `every` for H_base, `scale`
    for α, `power` 2 (1 is the linear rule, 0 is `Every`). `Replica.finish` cuts the last round short, so that training ends with agreed
    weights. *Differs*: in their code the length of warm-up is a setting. Their theory covers averaging (`Average`).

    *Wire*: published settings exchange in 7 to 40 % of the rounds of data-parallel training, see docs/methods/qsr.md.

    Args:
        every: the fewest inner steps of a round.
        scale, power: as in the equation; the scale has the unit of a learning rate.
        delay: τ, inner steps from departure to landing; less than `every`.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> [Quadratic(every=4, scale=0.0175).length(lr, before=0.008) for lr in (0.008, 0.004, 0.0008)]
    [4, 19, 478]
    """

    every: int
    scale: float
    power: float = 2.0
    delay: int = 0

    needs_fixed_group: ClassVar[str] = "counts from the beginning of a round, which a new replica does not know"

    def __post_init__(self) -> None:
        _check(self)
        if self.delay >= self.every:
            raise ConfigurationError(
                f"{self}: a round may be as short as every={self.every} steps and must land within; choose delay <= {self.every - 1}."
            )
        if not 0 <= self.scale < math.inf or not 0 <= self.power <= 8:
            raise ConfigurationError(
                f"{self}: scale >= 0 and a power from 0 to 8 are needed; √every times the highest learning rate and 2 are usual."
            )

    def length(self, lr: float, before: float | None) -> int:
        if before is None or not lr <= before:  # warm-up; or NaN
            return self.every
        if lr <= 0:  # the parameters no longer move
            return LONGEST_ROUND
        share = min(self.scale / lr, float(LONGEST_ROUND))
        return min(LONGEST_ROUND, max(self.every, int(float(share**self.power))))


class Calendar:
    """Follows a schedule from step to step. An `Adaptive` schedule calls `rates` for the learning rate of the step just taken; its state
    is saved (`facts`).

    >>> calendar = Calendar(Quadratic(every=2, scale=0.2), fragments=1, rates=lambda step: 0.1 if step < 5 else 0.05)
    >>> [step for step in range(1, 40) if calendar.departs(step)]
    [2, 6, 22, 38]
    """

    def __init__(self, schedule: Schedule | Adaptive, fragments: int, rates: Rates) -> None:
        self.fragments, self._rates = fragments, rates
        # asked once: `isinstance` compares all attributes of a protocol
        self._adaptive = schedule if isinstance(schedule, Adaptive) else None
        self._fixed = None if isinstance(schedule, Adaptive) else schedule
        # the last inner step before this round; and its number of inner steps, once it is known
        self._began, self._length = 0, 0
        self._lr: float | None = None  # the learning rate of its first step

    def departs(self, step: int) -> tuple[int, ...]:
        """Like `Schedule.departs`; call it once after every inner step."""
        if self._fixed is not None:
            return self._fixed.departs(step, self.fragments)
        assert self._adaptive is not None
        if step == self._began + 1:
            lr = self._rates(step)
            self._length, self._lr = self._adaptive.length(lr, self._lr), lr
        if step < self._began + self._length:
            return ()
        self._began = step
        return tuple(range(self.fragments))

    def facts(self) -> dict[str, Any]:
        """The state to save, for JSON."""
        return {"began": self._began, "length": self._length, "lr": self._lr}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Resume from `facts()`."""
        self._began, self._length, self._lr = facts["began"], facts["length"], facts["lr"]


def busiest(schedule: Schedule | Adaptive) -> Schedule:
    """The schedule itself; for an `Adaptive` one, the fixed schedule with its shortest period."""
    return Every(schedule.every, schedule.delay) if isinstance(schedule, Adaptive) else schedule
