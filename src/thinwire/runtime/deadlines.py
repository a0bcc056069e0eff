"""How much of a round arrives before it is to land, by what the rounds before have taken."""

from __future__ import annotations

from collections import deque

_PAIRS = 8  # of rounds of unlike size, by which the time that does not depend on bytes is known
_UNLIKE = 1.5  # times as many bytes
_MARGIN = 0.9  # of the time that is left


class Deadlines:
    """Of one replica: a round of n bytes takes `fixed` + n·`per_byte` seconds, and waits for those of its own before it.

    `per_byte` is that of the last round that has landed. `fixed` is the least that two neighbouring rounds of unlike size speak for, in
    the last few pairs: a rate that falls makes it too large, so the least is the safe one.

    >>> known = Deadlines()
    >>> known.share(now=0.0, nbytes=1000, deadline=1.0)  # nothing is known
    1.0
    >>> known.landed(nbytes=1000, seconds=4.0)
    >>> known.share(now=4.0, nbytes=1000, deadline=6.0)
    0.45
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._fixed: deque[float] = deque(maxlen=_PAIRS)
        self._free_at = 0.0  # when what has departed will have left

    def share(self, now: float, nbytes: int, deadline: float) -> float:
        """The share of `nbytes` that can depart `now` and arrive until `deadline`; 0 or more."""
        if self._last is None or not nbytes:
            return 1.0
        fixed, per_byte = self._taken()
        left = _MARGIN * (deadline - now) - max(0.0, self._free_at - now) - fixed
        return max(0.0, left / (per_byte * nbytes)) if per_byte > 0 else float(left >= 0)

    def departed(self, now: float, nbytes: int) -> None:
        """A round of `nbytes` has departed."""
        if self._last is not None:
            self._free_at = max(now, self._free_at) + nbytes * self._taken()[1]

    def landed(self, nbytes: int, seconds: float) -> None:
        """A round of `nbytes` has taken so many `seconds` to arrive. None of 0 bytes."""
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
