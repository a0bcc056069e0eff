"""Bursts of stragglers: which replicas may be late when (arXiv 2211.13802, §2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigurationError

Late = frozenset[int]  # the replicas whose results of a round are not waited for


@dataclass(frozen=True)
class Bursty:
    """(B, W, λ)-bursty stragglers: in any `window` rounds at most `stragglers` different replicas are late, and the late rounds of one
    replica lie within `burst` rounds.

    Args:
        burst: number B of rounds.
        window: number W of rounds, more than `burst`.
        stragglers: number λ of replicas.

    >>> [Bursty(1, 2, 1).allows([frozenset({0}), frozenset({late})]) for late in (0, 1)]
    [False, False]
    >>> Bursty(1, 2, 1).allows([frozenset({0}), frozenset(), frozenset({0})])
    True
    """

    burst: int
    window: int
    stragglers: int

    def check(self, replicas: int) -> None:
        """Raise `ConfigurationError` unless such stragglers can be among `replicas`."""
        numbers = (replicas, self.burst, self.window, self.stragglers)
        if any(type(number) is not int for number in numbers) or not 1 <= self.burst < self.window or replicas < 1:
            raise ConfigurationError(
                f"{self} among {replicas} replicas: whole numbers with 1 <= burst < window are needed."
            )
        if not 0 <= self.stragglers <= replicas:
            raise ConfigurationError(f"{self}: 0 <= stragglers <= {replicas}, the number of replicas, is needed.")

    def allows(self, late: Sequence[Late]) -> bool:
        """Whether the last `window` of these rounds fit the pattern. Asked after each round, it covers all rounds."""
        recent = late[-self.window :]
        if len(frozenset().union(*recent)) > self.stragglers:
            return False
        for begin, first in enumerate(recent):
            for later in recent[begin + self.burst :]:
                if first & later:
                    return False
        return True
