"""Draws curves and dots as one SVG, to show in a paper, a README, or another place without scripts. Needs the standard library only.

It reads the `ChartState` that the report page draws too: scatter lines and markers, linear or logarithmic axes. A browser
shows it in light or dark colours; other programs, such as a converter to PNG, show it in light ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from textwrap import wrap
from typing import Any

from thinwire.app.records.printable import printable
from thinwire.app.report.charts import ChartState, Json

LEFT, RIGHT, TOP, BOTTOM = 64, 18, 45, 52  # margins in pixels
LINE_HEIGHT = 17
DOT = 8  # diameter in pixels, if a trace gives none
STYLE = (
    ".ground{fill:#fff}.ink{fill:#1d2530}.soft{fill:#5b6776}.grid{stroke:#e2e6ea}.dot{stroke:#fff}"
    "@media (prefers-color-scheme:dark){.ground{fill:#171c23}.ink{fill:#e4e8ee}.soft{fill:#98a4b3}.grid{stroke:#2b333d}.dot{stroke:#171c23}}"
)

Scale = Callable[[float], float]


@dataclass(frozen=True)
class _Axis:
    """The layout of one axis, and the range of values that it shows."""

    given: Json
    low: float
    high: float

    @classmethod
    def of(cls, given: Json, values: Sequence[float], dots: bool) -> _Axis:
        """Take the range from the layout, or from the values; dots keep some distance from the edges."""
        if given.get("range"):  # Plotly gives the range of a logarithmic axis in powers of ten
            low, high = given["range"]
            return cls(given, *((10**low, 10**high) if given.get("type") == "log" else (low, high)))
        low, high = (min(values), max(values)) if values else (1.0, 2.0)
        if dots and given.get("type") == "log":
            room = (high / low) ** 0.05 * 1.1
            return cls(given, low / room, high * room)
        room = 0.06 * ((high - low) or abs(high) or 1.0) if dots else 0.0
        return cls(given, low - room, high + room)

    @property
    def title(self) -> str:
        return str(self.given["title"]["text"])

    def scale(self, begin: float, end: float) -> Scale:
        """Converts values to pixels."""
        measure = math.log10 if self.given.get("type") == "log" else float
        first, span = measure(self.low), (measure(self.high) - measure(self.low)) or 1.0
        return lambda value: begin + (end - begin) * (measure(value) - first) / span

    def ticks(self) -> list[tuple[float, str]]:
        if "tickvals" in self.given:
            texts = zip(self.given["tickvals"], self.given["ticktext"], strict=True)
            return [(value, text) for value, text in texts if self.low <= value <= self.high]
        steps = _decades if self.given.get("type") == "log" else _steps
        percent = str(self.given.get("tickformat", "")).endswith("%")
        return [(value, f"{value:.0%}" if percent else f"{value:g}") for value in steps(self.low, self.high)]


def drawing(view: ChartState, title: str, remark: str = "", width: int = 820, height: int = 480) -> str:
    """The view as SVG, below its title, the remark and the legend, which has as many rows as it needs."""
    named = [trace for trace in view.data if trace.get("showlegend", True)]
    rows, remarks = _legend(named, width), wrap(remark, int((width - LEFT - RIGHT) / 6.2))
    below = 40 + LINE_HEIGHT * len(remarks)
    top = TOP + LINE_HEIGHT * (len(remarks) + len(rows))
    dots = any("markers" in trace["mode"] for trace in view.data)
    x_axis, y_axis = (
        _Axis.of(view.layout[f"{name}axis"], [v for t in view.data for v in t[name] if v is not None], dots)
        for name in ("x", "y")
    )
    x, y = x_axis.scale(LEFT, width - RIGHT), y_axis.scale(height - BOTTOM, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12"><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" class="ground"/>',
        _text(LEFT, 22, title, size=15),
        *(_text(LEFT, 40 + LINE_HEIGHT * number, line, "soft") for number, line in enumerate(remarks)),
        *(mark for number, row in enumerate(rows) for mark in _legend_row(row, below + LINE_HEIGHT * number)),
    ]
    for value, text in x_axis.ticks():
        parts.append(_line(x(value), top, x(value), height - BOTTOM))
        parts.append(_text(x(value), height - BOTTOM + 18, text, "soft", "middle"))
    for value, text in y_axis.ticks():
        parts.append(_line(LEFT, y(value), width - RIGHT, y(value)))
        parts.append(_text(LEFT - 8, y(value) + 4, text, "soft", "end"))
    parts += [mark for trace in view.data for mark in _trace(trace, x, y)]
    parts += _labels([trace for trace in view.data if "text" in trace["mode"]], x, y, width - RIGHT)
    middle = (top + height - BOTTOM) / 2
    parts += [
        _text((LEFT + width - RIGHT) / 2, height - 12, x_axis.title, anchor="middle"),
        f'<g transform="rotate(-90 16 {middle:.1f})">{_text(16, middle, y_axis.title, anchor="middle")}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _decades(low: float, high: float) -> list[float]:
    """1, 10, 100, … within the range; also multiples of 2 and 5 if these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(powers) > 5 else (1, 2, 5)
    values = [digit * 10.0**power for power in powers for digit in digits]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _steps(low: float, high: float) -> list[float]:
    """Round values within the range, about ten at most."""
    span = (high - low) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    unit *= next(factor for factor in (0.1, 0.2, 0.5, 1.0) if span / (unit * factor) <= 10)
    return [round(unit * n, 12) for n in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def _trace(trace: dict[str, Any], x: Scale, y: Scale) -> Iterator[str]:
    """A line for each stretch without gaps, then the dots, each with its text, which is shown on hover."""
    points = [None if b is None else (x(a), y(b)) for a, b in zip(trace["x"], trace["y"], strict=True)]
    if "lines" in trace["mode"]:
        for there, stretch in groupby(points, key=lambda point: point is not None):
            if there:
                yield _curve([point for point in stretch if point is not None], trace["line"])
    if "markers" in trace["mode"]:
        paint, size = _paint(trace), trace.get("marker", {}).get("size", DOT)
        texts = trace.get("text") or [""] * len(points)
        for point, text in zip(points, texts, strict=True):
            if point is not None:
                yield _dot(*point, paint, size, text, _open(trace))


def _labels(traces: Sequence[dict[str, Any]], x: Scale, y: Scale, edge: float) -> Iterator[str]:
    """The labels of dots in traces with the mode "text", placed beside them where they overlap no other label."""
    dots = [(x(a), y(b), str(text)) for trace in traces for a, b, text in zip(trace["x"], trace["y"], trace["text"])]
    taken = [(across - DOT / 2, down - DOT / 2, across + DOT / 2, down + DOT / 2) for across, down, _ in dots]
    for across, down, text in sorted(dots, key=lambda dot: (dot[1], dot[0])):
        long = 6.6 * len(text)
        sides = [across + 8, across - 8 - long]
        places = [
            (left, down + off)
            for off in (0, 12, -12, 24, -24, 36, -36)
            for left in sides
            if LEFT <= left <= edge - long
        ]
        boxes = [(left, middle - 6, left + long, middle + 6) for left, middle in places]
        box = next((b for b in boxes if not any(_overlap(b, other) for other in taken)), boxes[0])
        taken.append(box)
        yield _text(box[0], box[3] - 2, text, "soft", size=11)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _curve(points: Sequence[tuple[float, float]], line: dict[str, Any]) -> str:
    if line.get("shape") == "hv":  # steps
        points = [points[0], *(p for a, b in pairwise(points) for p in ((b[0], a[1]), b))]
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{text}" fill="none" {_stroke(line)}/>'


def _sample(x: float, y: float, line: dict[str, Any]) -> str:
    """A sample of a curve in the legend."""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + 18:.1f}" y2="{y:.1f}" {_stroke(line)}/>'


def _stroke(line: dict[str, Any]) -> str:
    dash = ' stroke-dasharray="5 4"' if line.get("dash") else ""
    return f'stroke="{line["color"]}" stroke-width="{line.get("width", 2)}"{dash}'


def _dot(x: float, y: float, paint: str, size: float, text: str = "", ring: str = "") -> str:
    title = f"<title>{_written(text)}</title>" if text else ""
    how = ring or f'fill="{paint}" class="dot" stroke-width="1"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size / 2:g}" {how}>{title}</circle>'


def _open(trace: dict[str, Any]) -> str:
    """The attributes of a marker that is a ring; empty for a dot."""
    ring = trace.get("marker", {}).get("symbol") == "circle-open"
    return f'fill="none" stroke="{_paint(trace)}" stroke-width="2"' if ring else ""


def _paint(trace: dict[str, Any]) -> str:
    return str(trace["line"]["color"] if "line" in trace else trace["marker"]["color"])


def _legend(traces: Sequence[dict[str, Any]], width: int) -> list[list[tuple[float, dict[str, Any]]]]:
    """Rows of (x, trace)."""
    rows: list[list[tuple[float, dict[str, Any]]]] = [[]]
    at = float(LEFT)
    for trace in traces:
        needed = 36 + 6.9 * len(trace["name"])
        if rows[-1] and at + needed > width - RIGHT:
            rows.append([])
            at = float(LEFT)
        rows[-1].append((at, trace))
        at += needed
    return rows


def _legend_row(row: Sequence[tuple[float, dict[str, Any]]], y: float) -> list[str]:
    marks = []
    for at, trace in row:
        if "lines" in trace["mode"]:
            marks.append(_sample(at, y - 4, trace["line"]))
        if "markers" in trace["mode"]:
            marks.append(_dot(at + 9, y - 4, _paint(trace), DOT, ring=_open(trace)))
        marks.append(_text(at + 23, y, trace["name"]))
    return marks


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid" stroke-width="1"/>'


def _text(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" font-size="{size}">'
        f"{_written(text)}</text>"
    )


def _written(text: str) -> str:
    """Text for XML, which allows no control characters."""
    return escape(printable(text), quote=False)
