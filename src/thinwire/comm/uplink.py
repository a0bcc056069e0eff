"""An uplink by its rate and delay, or by a trace of its rate, and when messages leave and arrive on it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite
from pathlib import Path

from thinwire.comm.rates import RateTrace
from thinwire.errors import ConfigurationError

_RATES = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(10**3), "bit": Decimal(1)}
_TIMES = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_BEGAN = time.monotonic()  # new groups of an elastic run do not begin a trace anew
_TRACE = "trace:"
_DELAY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|ms|us)")
_LINK = re.compile(r"([0-9]+(?:\.[0-9]+)?)(gbit|mbit|kbit|bit)(?:,([0-9]+(?:\.[0-9]+)?)(s|ms|us))?")


@dataclass(frozen=True)
class Link:
    """An uplink: a rate and a one-way delay.

    Args:
        bits_per_second: bits a second, above 0.
        delay_seconds: seconds from sending a bit to its arrival, 0 or more.

    Raises:
        ConfigurationError: the rate is not positive, or the delay is negative.

    >>> link = Link.parse("50mbit,30ms")
    >>> link
    Link(bits_per_second=50000000.0, delay_seconds=0.03)
    >>> str(link), link.seconds(nbytes=1_000_000)
    ('50mbit,30ms', 0.19)
    """

    bits_per_second: float
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.bits_per_second) and self.bits_per_second > 0):
            raise ConfigurationError(f"a rate of {self.bits_per_second} bit/s was given; a positive rate is needed.")
        if not (isfinite(self.delay_seconds) and self.delay_seconds >= 0):
            raise ConfigurationError(f"a delay of {self.delay_seconds} s was given; zero or a positive time is needed.")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a rate (bit, kbit, mbit, gbit per second), and after a comma a one-way delay (us, ms, s), if any."""
        match = _LINK.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"the link {text!r} was given; a rate, or a rate and a delay are needed, "
                "with units bit, kbit, mbit, gbit and us, ms, s. Write it like 50mbit or 2.5mbit,30ms."
            )
        rate, rate_unit, delay, delay_unit = match.groups()
        seconds = float(Decimal(delay) * _TIMES[delay_unit]) if delay else 0.0
        return cls(float(Decimal(rate) * _RATES[rate_unit]), seconds)

    def __str__(self) -> str:
        rate = _in_units(self.bits_per_second, _RATES)
        return f"{rate},{_in_units(self.delay_seconds, _TIMES)}" if self.delay_seconds else rate

    def serialisation_seconds(self, nbytes: int) -> float:
        """Seconds for which a message of `nbytes` occupies the uplink; with a trace, at its mean rate."""
        return 8 * nbytes / self.bits_per_second

    def occupied_seconds(self, start: float, nbytes: int) -> float:
        """Seconds for which a message of `nbytes` occupies the uplink whose first bit leaves at `start`."""
        return self.serialisation_seconds(nbytes)

    def seconds(self, nbytes: int) -> float:
        """Seconds of a message of `nbytes` on an idle link, to the arrival of its last bit."""
        return self.serialisation_seconds(nbytes) + self.delay_seconds


@dataclass(frozen=True)
class TracedLink(Link):
    """An uplink whose rate follows a file. `bits_per_second` is the mean rate, which predictions use.

    Args:
        path: the file; `RateTrace.load` says what it may hold.
        trace: what it holds. It begins anew after its end.
        began: the time at which the trace begins, on the clock of the messages; by default that at which this process loaded this module.

    >>> link = TracedLink(5e5, path="up.txt", trace=RateTrace((0.0, 1.0), (8e5, 2e5), period=2.0), began=0.0)
    >>> [link.occupied_seconds(start, nbytes=50_000) for start in (0.0, 1.0)]
    [0.5, 1.25]
    """

    path: str = ""
    trace: RateTrace = field(default=RateTrace((0.0,), (1.0,)), repr=False, compare=False)
    began: float = field(default=_BEGAN, repr=False, compare=False)

    @classmethod
    def load(cls, path: str, delay_seconds: float = 0.0) -> TracedLink:
        """Read the trace at `path`. Raises `ConfigurationError`."""
        trace = RateTrace.load(Path(path))
        return cls(trace.mean, delay_seconds, path, trace)

    def __str__(self) -> str:
        return f"{_TRACE}{self.path}" + (f",{_in_units(self.delay_seconds, _TIMES)}" if self.delay_seconds else "")

    def occupied_seconds(self, start: float, nbytes: int) -> float:
        """See `Link.occupied_seconds`."""
        since = max(0.0, start - self.began)
        return self.trace.left(since, nbytes) - since


def parse_link(text: str) -> Link | None:
    """Like `Link.parse`; None for "none"; `trace:FILE` or `trace:FILE,30ms` is an uplink whose rate follows a file.

    Args:
        text: such as 20mbit,40ms, or none.

    Raises:
        ConfigurationError: `text` is no link, or its file cannot be read.

    >>> parse_link("none"), str(parse_link("8mbit,20ms"))
    (None, '8mbit,20ms')
    """
    if text == "none":
        return None
    return TracedLink.load(*_trace(text)) if text.startswith(_TRACE) else Link.parse(text)


def check_link(text: str) -> None:
    """Raise `ConfigurationError` if `parse_link` would refuse `text`, without reading a file."""
    if text.startswith(_TRACE):
        _trace(text)
    else:
        parse_link(text)


def _trace(text: str) -> tuple[str, float]:
    """The path and the delay of `trace:FILE,DELAY`. Raises `ConfigurationError`."""
    path, _, delay = text.removeprefix(_TRACE).rpartition(",")
    match = _DELAY.fullmatch(delay)
    if match is None:  # the path may hold a comma
        path = text.removeprefix(_TRACE)
    if not path:
        raise ConfigurationError(
            f"the link {text!r} was given; a file is needed, such as trace:uplink.txt or trace:uplink.txt,30ms."
        )
    return path, float(Decimal(match[1]) * _TIMES[match[2]]) if match else 0.0


class Uplink:
    """The bookings of one uplink, in any clock: the times of its messages. Not thread-safe.

    >>> uplink = Uplink(Link(bits_per_second=8e6, delay_seconds=0.5))
    >>> [uplink.book(10.0, nbytes=1_000_000) for _ in range(2)]  # start, arrival
    [(10.0, 11.5), (11.0, 12.5)]
    >>> uplink.busy_seconds
    2.0
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.busy_seconds = 0.0
        self._free_at = float("-inf")

    def book(self, now: float, nbytes: int) -> tuple[float, float]:
        """Book the next message. Returns the times at which its first bit leaves and its last bit arrives."""
        start = max(now, self._free_at)
        occupied = self.link.occupied_seconds(start, nbytes)
        self._free_at = start + occupied
        self.busy_seconds += occupied
        return start, self._free_at + self.link.delay_seconds

    def waiting_seconds(self, now: float) -> float:
        """Seconds that a message would wait for the uplink now."""
        return max(0.0, self._free_at - now)


def _in_units(value: float, units: Mapping[str, Decimal]) -> str:
    """`value` in the largest unit that is not larger than it; exact, so that it can be parsed again."""
    exact = Decimal(repr(value))
    unit = next((name for name, scale in units.items() if exact >= scale), list(units)[-1])
    number = f"{exact / units[unit]:f}"
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit
