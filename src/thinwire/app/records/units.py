"""Formats bytes, rates and seconds for people."""

from __future__ import annotations

import math
from typing import TypeGuard

UNITS = ("tokens", "samples", "batches")  # units of data
NOTHING = "–"  # the text for an unknown number
_LONG = 1e7  # of the largest unit: from here on three digits and an exponent


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
    if seconds >= _LONG * 86400:
        return f"{seconds / 86400:.3g} d"
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


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)
