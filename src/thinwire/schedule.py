"""When fragments depart and when they land: pure functions of the inner step.

Steps count from 1; both tests happen after inner step t. A round that departs at t lands at t + `delay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from thinwire.errors import ConfigurationError


@runtime_checkable
class Schedule(Protocol):
    """`every` is H and `delay` is τ, both in inner steps."""

    @property
    def every(self) -> int: ...

    @property
    def delay(self) -> int: ...

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        """The fragments (0..fragments-1) whose delta departs after inner step `step`, in the order of departure."""


def _check(schedule: Schedule) -> None:
    for name, value in (("every", schedule.every), ("delay", schedule.delay)):
        if type(value) is not int:
            raise ConfigurationError(f"{name}={value!r}: a whole number of inner steps is needed.")
    if schedule.every < 1:
        raise ConfigurationError(f"every={schedule.every}: at least 1 inner step between two rounds is needed.")
    if not 0 <= schedule.delay <= schedule.every:
        raise ConfigurationError(
            f"delay={schedule.delay} with every={schedule.every}: a round must land before its fragment departs again; "
            f"choose 0 <= delay < every, so at most {schedule.every - 1}."
        )


@dataclass(frozen=True)
class Every:
    """All fragments together, every `every` inner steps: t mod H = 0 (DiLoCo, arXiv 2311.08105, Algorithm 1).

    >>> [t for t in range(1, 10) if Every(3).departs(t, fragments=2)]
    [3, 6, 9]
    """

    every: int
    delay: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        return tuple(range(fragments)) if step % self.every == 0 else ()


@dataclass(frozen=True)
class Staggered:
    """Fragments in turn, each every `every` inner steps: (t − t_p) mod H = 0 and t − t_p ≥ H.

    Source: Streaming DiLoCo (arXiv 2501.18512, Algorithm 2). `offsets` holds t_p + H, the step of each fragment's
    first departure; by default t_p = ⌊p·H/P⌋. *Differs*: the authors' figures use ⌊H/P⌋ between fragments and so a
    period of P·⌊H/P⌋; here the period is exactly `every`, also when P does not divide it. `short_first` gives the
    offsets of torchft and MaxText, whose first interval is shorter than H.

    >>> Staggered(every=100).departs(150, fragments=2)
    (1,)
    >>> [t for t in range(1, 40) if Staggered(every=10).departs(t, fragments=3) == (1,)]  # t_1 = 3
    [13, 23, 33]
    """

    every: int
    delay: int = 0
    offsets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.offsets is not None and any(first < 1 for first in self.offsets):
            raise ConfigurationError(f"offsets={self.offsets}: every fragment first departs at inner step 1 or later.")

    def departs(self, step: int, fragments: int) -> tuple[int, ...]:
        if self.offsets is not None and len(self.offsets) != fragments:
            raise ConfigurationError(
                f"offsets={self.offsets} are for {len(self.offsets)} fragments, the partition makes {fragments}; give one offset a fragment."
            )
        first = self.offsets or tuple(self.every + p * self.every // fragments for p in range(fragments))
        return tuple(p for p in range(fragments) if step >= first[p] and (step - first[p]) % self.every == 0)


def short_first(every: int, fragments: int, delay: int = 0) -> tuple[int, ...]:
    """Offsets so that fragment p first *lands* at ⌊(p+1)·H/P⌋ and departs `delay` steps before (the phase of
    torchft).

    A fragment that would have to depart before the first inner step waits for one more period.

    >>> short_first(every=6, fragments=2, delay=1)
    (2, 5)
    """
    departures = [(p + 1) * every // fragments - delay for p in range(fragments)]
    return tuple(step if step >= 1 else step + every for step in departures)
