"""Curves as one SVG: for a paper, a README, or wherever a page with a script is too much. Nothing beside the standard library draws it.

It reads the `View` that the report page draws too: scatter lines, a linear or logarithmic x axis, a linear y axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from thinwire.observe.charts import View

LEFT, RIGHT, TOP, BOTTOM = 64, 18, 45, 52  # margins in pixels
INK, SOFT, GRID = "#1d2530", "#5b6776", "#e2e6ea"
LINE_HEIGHT = 17

Scale = Callable[[float], float]


def drawing(view: View, title: str, remark: str = "", width: int = 820, height: int = 480) -> str:
    """The view as SVG, below its title, the remark and the legend, which has as many rows as it needs."""
    rows, remarks = _legend(view.data, width), wrap(remark, int((width - LEFT - RIGHT) / 6.2))
    below = 40 + LINE_HEIGHT * len(remarks)
    top = TOP + LINE_HEIGHT * (len(remarks) + len(rows))
    xs = [x for trace in view.data for x in trace["x"]]
    ys = view.layout["yaxis"].get("range") or [y for trace in view.data for y in trace["y"]]
    x_axis, log = view.layout["xaxis"], view.layout["xaxis"].get("type") == "log"
    x = _scale(min(xs), max(xs), LEFT, width - RIGHT, math.log10 if log else float)
    y = _scale(min(ys), max(ys), height - BOTTOM, top, float)
    percent = str(view.layout["yaxis"].get("tickformat", "")).endswith("%")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 22, title, INK, size=15),
        *(_text(LEFT, 40 + LINE_HEIGHT * number, line, SOFT) for number, line in enumerate(remarks)),
        *(mark for number, row in enumerate(rows) for mark in _legend_row(row, below + LINE_HEIGHT * number)),
    ]
    for value in _decades(min(xs), max(xs)) if log else _steps(min(xs), max(xs)):
        parts.append(_line(x(value), top, x(value), height - BOTTOM, GRID))
        parts.append(_text(x(value), height - BOTTOM + 18, f"{value:g}", SOFT, "middle"))
    for value in _steps(min(ys), max(ys)):
        parts.append(_line(LEFT, y(value), width - RIGHT, y(value), GRID))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.0%}" if percent else f"{value:g}", SOFT, "end"))
    parts += [_curve(trace, x, y) for trace in view.data]
    middle = (top + height - BOTTOM) / 2
    parts += [
        _text((LEFT + width - RIGHT) / 2, height - 12, x_axis["title"]["text"], INK, "middle"),
        f'<g transform="rotate(-90 16 {middle:.1f})">{_text(16, middle, view.layout["yaxis"]["title"]["text"], INK, "middle")}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(low: float, high: float, begin: float, end: float, measure: Callable[[float], float]) -> Scale:
    first, span = measure(low), (measure(high) - measure(low)) or 1.0
    return lambda value: begin + (end - begin) * (measure(value) - first) / span


def _decades(low: float, high: float) -> list[float]:
    """1, 10, 100, … within the range; with 2 and 5 too where that leaves few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(powers) > 5 else (1, 2, 5)
    values = [digit * 10.0**power for power in powers for digit in digits]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _steps(low: float, high: float) -> list[float]:
    """Round values within the range, at most ten or so."""
    span = (high - low) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    unit *= next(factor for factor in (0.1, 0.2, 0.5, 1.0) if span / (unit * factor) <= 10)
    return [unit * n for n in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def _curve(trace: dict[str, Any], x: Scale, y: Scale) -> str:
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(trace["x"], trace["y"], strict=True))
    line = trace["line"]
    dash = ' stroke-dasharray="5 4"' if line.get("dash") else ""
    return f'<polyline points="{points}" fill="none" stroke="{line["color"]}" stroke-width="{line.get("width", 2)}"{dash}/>'


def _legend(traces: Sequence[dict[str, Any]], width: int) -> list[list[tuple[float, dict[str, Any]]]]:
    """Rows of (x, trace)."""
    rows: list[list[tuple[float, dict[str, Any]]]] = [[]]
    at = float(LEFT)
    for trace in traces:
        needed = 36 + 6.6 * len(trace["name"])
        if rows[-1] and at + needed > width - RIGHT:
            rows.append([])
            at = float(LEFT)
        rows[-1].append((at, trace))
        at += needed
    return rows


def _legend_row(row: Sequence[tuple[float, dict[str, Any]]], y: float) -> list[str]:
    marks = [
        _line(at, y - 4, at + 18, y - 4, trace["line"]["color"], trace["line"].get("width", 2)) for at, trace in row
    ]
    return marks + [_text(at + 23, y, trace["name"], INK) for at, trace in row]


def _line(x1: float, y1: float, x2: float, y2: float, paint: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{paint}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, paint: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{paint}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text, quote=False)}</text>"
    )
