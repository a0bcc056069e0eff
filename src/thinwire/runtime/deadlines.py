"""Predicts how much of a round can arrive before it must land, from the times of earlier rounds."""

from __future__ import annotations

from collections import deque

_PAIRS = 8  # last pairs of rounds of different sizes, which give the time that does not depend on bytes
_UNLIKE = 1.5  # sizes differ if one is so many times the other
_MARGIN = 0.9  # share of the remaining time that is used


class Deadlines:
    """Times of one replica's rounds: a round of n bytes takes `fixed` + n·`per_byte` seconds, after its earlier rounds have left.

    `per_byte` is that of the last landed round. `fixed` is computed from two consecutive rounds of different sizes. The least value of
    the last few pairs is used, because a falling rate makes it too large.

    >>> known = Deadlines()
    >>> known.share(now=0.0, nbytes=1000, deadline=1.0)  # no round has landed yet
    1.0
    >>> known.landed(nbytes=1000, seconds=4.0)
    >>> known.share(now=4.0, nbytes=1000, deadline=6.0)
    0.45
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._fixed: deque[float] = deque(maxlen=_PAIRS)
        self._free_at = 0.0  # the time at which all departed bytes will have left

    def share(self, now: float, nbytes: int, deadline: float) -> float:
        """The share of `nbytes` that can depart `now` and arrive before `deadline`; 0 or more."""
        if self._last is None or not nbytes:
            return 1.0
        fixed, per_byte = self._taken()
        left = _MARGIN * (deadline - now) - max(0.0, self._free_at - now) - fixed
        return max(0.0, left / (per_byte * nbytes)) if per_byte > 0 else float(left >= 0)

    def departed(self, now: float, nbytes: int) -> None:
        """Record that a round of `nbytes` has departed."""
        if self._last is not None:
            self._free_at = max(now, self._free_at) + nbytes * self._taken()[1]

    def landed(self, nbytes: int, seconds: float) -> None:
        """Record that a round of `nbytes`, more than 0, took `seconds` to arrive."""
        if not nbytes:
            return
        if self._last is not None:
            (few, short), (many, long) = sorted([self._last, (nbytes, seconds)])
            if many >= _UNLIKE * few:
                self._fixed.append(min(short, max(0.0, (short * many - long * few) / (many - few))))
        self._last = nbytes, seconds

    def _taken(self) -> tuple[float, float]:
        assert self._last is not None
        nbytes, seconds = self._last
        fixed = min(self._fixed, default=0.0)
        return fixed, max(0.0, seconds - fixed) / nbytes
