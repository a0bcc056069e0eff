"""Rates of an uplink that change over time, and the files that hold them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ConfigurationError

_PACKET_BITS = 8 * 1500  # of one line of a Mahimahi trace
_BINS = 10  # a second, in which such lines are counted
_MOST_NBYTES = 64 << 20  # of a file
_MOST_SECONDS = 1_000_000  # of a trace of such lines
_FORMS = (
    "Each line is a time in seconds and a rate in Mbit/s (the rate from that time on), or, as in Mahimahi's traces, "
    "a time in milliseconds alone, at which 1500 bytes may leave."
)


@dataclass(frozen=True)
class RateTrace:
    """An uplink with the rate `rates[k]` from `begins[k]` seconds on, and then a delay.

    Args:
        begins: seconds, ascending, from 0.
        rates: bits a second, 0 or more, as many.
        delay_seconds: from the last bit's departure to its arrival, in seconds.
        period: seconds after which it begins anew; infinity: the last rate stays.

    Raises:
        ConfigurationError: the times do not ascend from 0, or there is a time after which no bit leaves.

    >>> RateTrace((0.0, 1.0), (8e6, 8e3)).left(0.5, nbytes=501_000)  # 500 kB, then 1 kB a second later
    2.0
    >>> RateTrace((0.0, 1.0), (8e3, 0.0), period=2.0).left(0.5, nbytes=1000)  # half of it in each period
    2.5
    """

    begins: tuple[float, ...]
    rates: tuple[float, ...]
    delay_seconds: float = 0.0
    period: float = math.inf
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False, default=())  # bits before each begin

    def __post_init__(self) -> None:
        ends = (*self.begins[1:], self.period)
        ascend = self.begins[:1] == (0.0,) and all(begin < end for begin, end in zip(self.begins, ends))
        fits = len(self.rates) == len(self.begins) and all(0 <= rate < math.inf for rate in self.rates)
        if not ascend or not fits or not max(self.rates if self.period < math.inf else self.rates[-1:]) > 0:
            raise ConfigurationError(
                f"a trace of {len(self.begins)} times and {len(self.rates)} rates with a period of {self.period} s was given; times that "
                "ascend from 0 to the period, and a finite rate of 0 or more for each are needed, one above 0 (the last, if it stays)."
            )
        sums = [0.0]
        for begin, end, rate in zip(self.begins, self.begins[1:], self.rates):
            sums.append(sums[-1] + (end - begin) * rate)
        object.__setattr__(self, "_sums", tuple(sums))

    @classmethod
    def load(cls, path: Path, delay_seconds: float = 0.0) -> RateTrace:
        """Read a trace that begins anew after its end.

        Lines have two numbers, seconds and Mbit/s, with a space or a comma between them; or one, milliseconds, at each of which 1500
        bytes may leave (Mahimahi, Netravali et al., USENIX ATC 2015). Text after # is ignored. *Differs* from Mahimahi: its lines are
        counted in tenths of a second. Raises `ConfigurationError`.
        """
        try:
            if path.stat().st_size > _MOST_NBYTES:
                raise ConfigurationError(f"the trace {path} has more than {_MOST_NBYTES >> 20} MiB; cut it.")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the trace {path} cannot be read: {error}. {_FORMS}") from None
        rows = _rows(path, lines)
        if len(rows[0]) == 1 and rows[-1][0] > 1000 * _MOST_SECONDS:
            raise ConfigurationError(
                f"the trace {path} ends at {rows[-1][0]:g} ms; at most {_MOST_SECONDS:,} s are needed, from the beginning of the trace. {_FORMS}"
            )
        begins, rates, period = _packets(rows) if len(rows[0]) == 1 else _pairs(rows)
        try:
            return cls(begins, rates, delay_seconds, period)
        except ConfigurationError:
            raise ConfigurationError(f"the trace {path} has no rate above 0, so no message would arrive.") from None

    @property
    def mean(self) -> float:
        """The mean rate in bits a second: of a period, or of all times after the last change."""
        return self._bits(self.period) / self.period if self.period < math.inf else self.rates[-1]

    def left(self, now: float, nbytes: int) -> float:
        """The time at which the last bit of a message leaves whose first bit leaves `now`."""
        if not nbytes:
            return now
        whole, at = divmod(now, self.period)
        bits = self._bits(at) + 8.0 * nbytes
        if self.period < math.inf:
            most = self._bits(self.period)
            more = math.ceil(bits / most) - 1
            more -= bits <= more * most  # the quotient was rounded up
            whole, bits = whole + more, min(bits - more * most, most)
            now = max(now, whole * self.period)
        place = bisect_left(self._sums, bits) - 1
        at = self.begins[place] + (bits - self._sums[place]) / self.rates[place]
        return max(now, whole * self.period + at if whole else at)

    def _bits(self, at: float) -> float:
        """The bits that leave in the first `at` seconds of a period."""
        place = bisect_right(self.begins, at) - 1
        return self._sums[place] + (at - self.begins[place]) * self.rates[place]


def _rows(path: Path, lines: list[str]) -> list[tuple[float, ...]]:
    """The numbers of each line that has some. Raises `ConfigurationError` for what is no trace."""
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            row = tuple(map(float, words))
        except ValueError:
            row = ()
        if len(row) not in (1, 2) or (rows and len(row) != len(rows[0])) or not all(0 <= x < math.inf for x in row):
            raise ConfigurationError(f"line {number} of the trace {path} is {line[:60]!r}. {_FORMS}")
        if rows and (row[0] < rows[-1][0] or (len(row) == 2 and row[0] == rows[-1][0])):
            raise ConfigurationError(
                f"line {number} of the trace {path} is at {row[0]:g}, the one before at {rows[-1][0]:g}; times must ascend."
            )
        rows.append(row)
    if len(rows) < 2:
        raise ConfigurationError(f"the trace {path} has {len(rows)} times; two or more are needed. {_FORMS}")
    return rows


def _pairs(rows: list[tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Begins, rates and period. The last rate lasts as long as the one before."""
    begins = tuple(row[0] - rows[0][0] for row in rows)
    return begins, tuple(1e6 * row[1] for row in rows), 2 * begins[-1] - begins[-2]


def _packets(rows: list[tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    counts = [0] * (int(rows[-1][0] * _BINS / 1000) + 1)
    for row in rows:
        counts[int(row[0] * _BINS / 1000)] += 1
    begins = tuple(k / _BINS for k in range(len(counts)))
    return begins, tuple(float(_BINS * _PACKET_BITS * count) for count in counts), len(counts) / _BINS
