"""Reads sizes, counts and times with units."""

from __future__ import annotations

import re
from collections.abc import Mapping

from thinwire.errors import ConfigurationError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*")
LARGEST = 1e30  # bytes, tokens, parameters, seconds
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
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def nbytes(text: str | int) -> int:
    """`nbytes("16GB") == 16_000_000_000`, `nbytes("2GiB") == 2_147_483_648`; a number without a unit is in bytes."""
    return int(_read(str(text), _NBYTES, "a size", "16GB, 900MB or 2GiB", 1))


def seconds(text: str) -> float:
    """`seconds("3d") == 259200.0`; us, ms, s, min, h, d."""
    return _read(text, SECONDS, "a time", "90s, 45min, 12h or 3d")


def count(text: str) -> int:
    """`count("20B") == 20_000_000_000`: tokens, parameters."""
    return int(_read(text, _COUNT, "a count", "300M or 20B", 1))


def number_and_unit(text: str, units: Mapping[str, float]) -> tuple[float, float] | None:
    """The number of `text`, and what its unit is worth; None if it has no number or another unit."""
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), units[match[2].lower()]) if match and match[2].lower() in units else None


def _read(text: str, units: Mapping[str, float], what: str, example: str, least: int = 0) -> float:
    found = number_and_unit(text, units)
    if found is None:
        known = ", ".join(name for name in units if name)
        raise ConfigurationError(
            f"{text!r} was given; {what} is needed, a number and one of {known}. Write it like {example}."
        )
    value = found[0] * found[1]
    if not least <= value <= LARGEST:
        raise ConfigurationError(f"{text!r} was given; {what} of at least {least} is needed, and at most {LARGEST:g}.")
    return value
