"""Reads sizes, rates and times with units into bytes, bits per second and seconds."""

from __future__ import annotations

import re

from thinwire.comm import Link
from thinwire.errors import ConfigurationError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*")
MOST = 1e30  # bytes, tokens, parameters, seconds
_NBYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def nbytes(text: str | int) -> int:
    """`nbytes("16GB") == 16_000_000_000`, `nbytes("2GiB") == 2_147_483_648`; a number without a unit is in bytes."""
    return int(_read(str(text), _NBYTES, "a size", "16GB, 900MB or 2GiB", 1))


def seconds(text: str) -> float:
    """`seconds("3d") == 259200.0`; us, ms, s, min, h, d."""
    return _read(text, _SECONDS, "a time", "90s, 45min, 12h or 3d")


def count(text: str) -> int:
    """`count("20B") == 20_000_000_000`: tokens, parameters."""
    return int(_read(text, _COUNT, "a count", "300M or 20B", 1))


def rate(text: str) -> float:
    """`rate("50mbit") == 50e6` bits per second."""
    return Link.parse(text).bits_per_second


def rounded(link: Link) -> Link:
    """Round to four significant digits, because a measurement is no more exact.

    >>> str(rounded(Link(49_876_543.21, 0.03012345)))
    '49.88mbit,30.12ms'
    """
    return Link(float(f"{link.bits_per_second:.4g}"), float(f"{link.delay_seconds:.4g}"))


def _read(text: str, units: dict[str, int] | dict[str, float], what: str, example: str, least: int = 0) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        raise ConfigurationError(
            f"{text!r} was given; {what} is needed, a number and one of {known}. Write it like {example}."
        )
    value = float(match[1]) * units[unit]
    if not least <= value <= MOST or not value:
        raise ConfigurationError(
            f"{text!r} was given; {what} {f'of at least {least}' if least else 'above 0'} is needed, and at most {MOST:g}."
        )
    return value
