"""Formats bytes, rates and seconds for people, and parses times."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from thinwire.errors import ConfigurationError

UNITS = ("tokens", "samples", "batches")  # units of data
NOTHING = "–"  # the text for an unknown number
_LONG = 1e7  # of the largest unit: from here on three digits and an exponent


_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _scaled(value: float, units: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    if abs(value) >= _LONG:
        return f"{value:.3g} {units[index]}".rstrip()
    digits = 0 if (index == 0 and value == int(value)) or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[index]}".rstrip()


def text_of_nbytes(nbytes: float | None) -> str:
    """Bytes in decimal units, as links are sold: `text_of_nbytes(1_250_000) == "1.25 MB"`."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB")) if known(nbytes) else NOTHING


def text_of_rate(bits_per_second: float | None) -> str:
    """`text_of_rate(20e6) == "20.0 Mbit/s"`."""
    units = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    return _scaled(bits_per_second, units) if known(bits_per_second) else NOTHING


def text_of_count(count: float | None) -> str:
    """Parameters, tokens: `text_of_count(7_100_000) == "7.10 M"`."""
    return _scaled(count, ("", "k", "M", "B", "T")) if known(count) else NOTHING


def text_of_seconds(seconds: float | None) -> str:
    """`0.0123 -> "12.3 ms"`, `75 -> "1 min 15 s"`, `90061 -> "1 d 1 h"`."""
    if not known(seconds):
        return NOTHING
    if seconds < 0:
        return "-" + text_of_seconds(-seconds)
    if seconds < 59.95:
        if seconds >= 0.9995 or seconds == 0:
            return f"{seconds:.1f} s"
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds >= _LONG * _TIMES["d"]:
        return f"{seconds / _TIMES['d']:.3g} d"
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def text_of_share(share: float | None) -> str:
    """`0.953 -> "95.3 %"`."""
    return f"{share * 100:.1f} %" if known(share) else NOTHING


def text_of_bits(bits: float | None) -> str:
    """Bits per parameter and step, three significant digits: `text_of_bits(0.13463) == "0.135"`."""
    return f"{bits:.3g}" if known(bits) else NOTHING


def text_of_loss(loss: float | None) -> str:
    """Four digits after the point; a small or huge loss, as a job may have, has four in all: `0.0000123 -> "1.23e-05"`."""
    if loss is None:
        return NOTHING
    return f"{loss:.4f}" if loss == 0 or 0.01 <= abs(loss) < _LONG or not math.isfinite(loss) else f"{loss:.4g}"


def unit_of(start: Mapping[str, Any]) -> str:
    """What a run counts its data in, by its start event."""
    said = start["run"].get("unit") if isinstance(start["run"], dict) else None
    return said if isinstance(said, str) and said in UNITS else UNITS[0]


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def seconds_of_text(text: str) -> float:
    """A time with its unit: us, ms, s, min, h or d. Raises `ConfigurationError`.

    >>> seconds_of_text("1.5h"), seconds_of_text("30 ms")
    (5400.0, 0.03)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _TIMES:
        raise ConfigurationError(
            f"the time {text!r} was given; a number with a unit is needed, one of {', '.join(_TIMES)}. Write it like 30s or 1.5h."
        )
    return float(match[1]) * _TIMES[match[2]]
