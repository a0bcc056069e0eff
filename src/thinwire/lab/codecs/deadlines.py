"""Predicts how much of a round can arrive before it must land, from the times of earlier rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_PAIRS = 8  # last pairs of rounds of different sizes, which give the time that does not depend on bytes
_UNLIKE = 1.5  # two sizes differ if one is at least this many times the other
_PROBE = 5  # until such a pair is known, one round at a time may have this many times the bytes of the last
_ROUNDS = 4  # number of last rounds; the slowest of them counts
_MOST_MARGIN, _LEAST_MARGIN = 0.9, 0.3  # bounds of the margin, the share of the remaining time that is used
_LATE_FACTOR = 0.7  # multiplies the margin after a late round
_ON_TIME_GROWTH = 0.003  # is added to the margin after a round that was not late


class Deadlines:
    """Times of one replica's rounds: a round of n bytes takes `fixed` + n·`per_byte` seconds, after the rounds before it.

    `per_byte` is that of the slowest of the last four rounds that sent values, or more: a round on its way has already taken so long.
    `fixed` is computed from two consecutive rounds of different sizes. The least value of the last few pairs is used, because a falling
    rate makes it too large. A late round lowers the share of the remaining time that is used, to three tenths at least.

    >>> known = Deadlines()
    >>> known.share(now=0.0, nbytes=1000, deadline=1.0)  # no round has arrived yet
    1.0
    >>> known.departed("a", now=0.0, nbytes=1000)
    >>> known.arrived("a", now=4.0, nbytes=1000, seconds=4.0)
    >>> known.share(now=4.0, nbytes=1000, deadline=6.0)
    0.45
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS)
        self._fixed: deque[float] = deque(maxlen=_PAIRS)
        self._flying: dict[Hashable, tuple[float, int]] = {}  # times of departure and bytes, in order
        self._arrived_at = float("-inf")
        self._margin = _MOST_MARGIN

    def share(self, now: float, nbytes: int, deadline: float) -> float:
        """The share of `nbytes` that can depart `now` and arrive before `deadline`; 0 or more, and 1 if nothing is known."""
        if not self._rounds:
            return 1.0
        fixed = min(self._fixed, default=0.0)
        per_byte = max(max(0.0, seconds - fixed) / many for many, seconds in self._rounds)
        queued = 0.0
        for at, (departed, first) in enumerate(self._flying.values()):
            if at == 0:  # the round that is on the link
                taken = now - max(departed, self._arrived_at)
                per_byte = max(per_byte, (taken - fixed) / first)
                queued -= min(taken, first * per_byte)
            queued += first * per_byte
        left = self._margin * (deadline - now) - queued - fixed
        share = max(0.0, left / (per_byte * nbytes)) if per_byte > 0 else float(left >= 0)
        assert self._last is not None
        last = self._last[0]
        unlike = self._fixed or any(many >= _UNLIKE * last for _, many in self._flying.values())
        return max(share, _PROBE * last / nbytes) if not unlike and last <= share * nbytes < nbytes else share

    def departed(self, round_: Hashable, now: float, nbytes: int) -> None:
        """Record that `round_` of `nbytes`, more than 0, has departed."""
        self._flying[round_] = now, nbytes

    def arrived(self, round_: Hashable, now: float, nbytes: int, seconds: float, values: bool = True) -> None:
        """Record that `round_` of `nbytes` arrived `now`, after `seconds` on the link; without `values` it was skipped."""
        self._flying.pop(round_, None)
        self._arrived_at = max(now, self._arrived_at)
        if not nbytes:
            return
        if self._last is not None:
            (few, short), (many, long) = sorted([self._last, (nbytes, seconds)])
            if many >= _UNLIKE * few:
                self._fixed.append(min(short, max(0.0, (short * many - long * few) / (many - few))))
        self._last = nbytes, seconds
        if values:  # few bytes tell nothing of the rate
            self._rounds.append(self._last)

    def landed(self, late: bool) -> None:
        """Record whether training waited for a round."""
        if late:
            self._margin = max(_LEAST_MARGIN, self._margin * _LATE_FACTOR)
        else:
            self._margin = min(_MOST_MARGIN, self._margin + _ON_TIME_GROWTH)
