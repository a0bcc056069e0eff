"""Draws the timeline: what every replica computed, which rounds were in flight meanwhile, and where it waited.

Every replica has a row for its own time (inner steps, stalls, outer steps, pauses), and below it as many rows as it had
flights at once. Bars beyond a budget are joined with their neighbours, except in the window that is shown
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from thinwire.records.replica_record import Flight, ReplicaRecord
from thinwire.records.run_record import RunRecord
from thinwire.records.sessions import Span
from thinwire.records.units import text_of_nbytes, text_of_seconds
from thinwire.report.charts import Chart, ChartState, Json, colour, typical_window

BARS = 6000  # most bars of one timeline
ROWS = 8  # most replicas on one timeline
LANES = 4  # most rows for the flights of one replica

COMPUTE, STALL, OUTER, PAUSE, LOST, AWAY = "#8ba6bf", "#d0564a", "#7d5bb5", "#b9b4a8", "#8a8a8a55", "#d0564a66"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in `row`, in which `count` events are joined."""

    row: int
    begin: float
    end: float
    text: str
    label: str = ""
    paint: str = ""
    count: int = 1


def timeline_chart(record: RunRecord) -> Chart:
    """Rows of bars over time. The chart first shows `typical_window`."""
    window = typical_window(record)
    drawn = record.replicas[:ROWS]
    kinds: dict[str, list[Bar]] = {name: [] for name in _STYLES}
    labels: list[str] = []
    for replica in drawn:
        lanes = _lanes(replica.flights)
        for name, bars in _bars(replica, len(labels), lanes, window).items():
            kinds[name] += bars
        labels += [escape(replica.name)] + [
            "in the air" if lane == 0 else "" for lane in range(max(lanes, default=0) + 1)
        ]
    few = sum(len(bars) for bars in kinds.values()) <= BARS
    thinned = kinds if few else {name: joined(bars, window, BARS // len(kinds)) for name, bars in kinds.items()}
    remarks = []
    if any(bar.count > 1 for bars in thinned.values() for bar in bars):
        remarks.append("Thinned: outside the window shown first, neighbouring bars are joined; hover tells how many.")
    if len(record.replicas) > ROWS:
        remarks.append(f"The first {ROWS} of {len(record.replicas)} replicas are drawn.")
    data = [_bar_trace(name, bars) for name, bars in thinned.items() if bars]
    y: Json = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.4, -0.6]}
    x: Json = {"meta": "seconds", "range": list(window), "autorange": False}
    layout: Json = {"xaxis": x, "yaxis": y | {"fixedrange": True, "showgrid": False, "zeroline": False}}
    layout |= {"barmode": "overlay", "dragmode": "pan", "hovermode": "closest", "meta": "timeline"}
    layout["margin"] = {"l": 56, "r": 14, "t": 8, "b": 40}
    layout["uniformtext"] = {"minsize": 9, "mode": "hide"}
    legend = tuple(
        (name, _STYLES[name]["color"]) for name, bars in thinned.items() if bars and "color" in _STYLES[name]
    )
    return Chart([ChartState("", data, layout)], 64 + 27 * len(labels), tuple(remarks), legend)


_STYLES: dict[str, Json] = {
    "lost, done again": {"color": LOST, "width": 0.92},
    "not living": {"color": AWAY, "width": 0.3},
    "inner steps": {"color": COMPUTE, "width": 0.8},
    "evaluation, checkpoint": {"color": PAUSE, "width": 0.8},
    "stall": {"color": STALL, "width": 0.8},
    "outer step": {"color": OUTER, "width": 0.8},
    "in the air": {"opacity": 0.38, "width": 0.72},
    "on the link": {"opacity": 0.95, "width": 0.72},
}


def _bars(replica: ReplicaRecord, row: int, lanes: Sequence[int], window: tuple[float, float]) -> dict[str, list[Bar]]:
    flights = list(zip(replica.flights, lanes))
    return {
        "lost, done again": [
            _bar(row, lost.span, f"{lost.steps} steps after step {lost.span.step}, done again") for lost in replica.lost
        ],
        "not living": [
            Bar(row, before.end, after.begin, f"ended after step {before.step}, then started again")
            for before, after in zip(replica.incarnations, replica.incarnations[1:])
            if after.begin - before.end > 0.1
        ],
        "inner steps": _step_bars(replica, row, window),
        "evaluation, checkpoint": [_bar(row, span, f"pause after step {span.step}") for span in replica.pauses],
        "stall": [
            _bar(row, span, f"waits for fragment {span.fragment} at step {span.step}") for span in replica.stalls
        ],
        "outer step": [_bar(row, span, f"outer step of fragment {span.fragment}") for span in replica.merges],
        "in the air": [
            Bar(row + 1 + lane, f.begin, f.end, _flight_text(f), paint=colour(f.fragment)) for f, lane in flights
        ],
        "on the link": [
            Bar(row + 1 + lane, f.link_begin, f.link_end, _flight_text(f), str(f.fragment), colour(f.fragment))
            for f, lane in flights
        ],
    }


def _step_bars(replica: ReplicaRecord, row: int, window: tuple[float, float]) -> list[Bar]:
    """The bars of inner steps. If there are more than `BARS`, those outside `window` are joined here, because there may be millions."""
    if not len(replica.step):
        return []
    begin, end = replica.begin, replica.seconds
    inside = (end >= window[0]) & (begin <= window[1])
    first, gap = np.arange(len(begin)), 1e-3
    while len(first) > BARS:
        apart = (begin[1:] - end[:-1] > gap) | inside[1:] | inside[:-1]
        first, gap = np.flatnonzero(np.concatenate([[True], apart])), 2 * gap
    counts = np.diff(np.append(first, len(begin)))
    columns = (begin[first], np.maximum.reduceat(end, first), replica.step[first], counts)
    return [
        Bar(row, b, e, f"step {step}", count=count)
        for b, e, step, count in zip(*(column.tolist() for column in columns))
    ]


def _bar(row: int, span: Span, text: str) -> Bar:
    return Bar(row, span.begin, span.end, text)


def _flight_text(flight: Flight) -> str:
    return (
        f"fragment {flight.fragment}, round {flight.round}, left after step {flight.step}<br>{text_of_nbytes(flight.nbytes)}, "
        f"{text_of_seconds(flight.end - flight.begin)} in the air, "
        f"{text_of_seconds(flight.link_end - flight.link_begin)} on the link"
    )


def _lanes(flights: Sequence[Flight]) -> list[int]:
    """A row for every flight, such that simultaneous flights are in different rows; the last row takes the remaining ones."""
    free: list[float] = []
    rows = []
    for flight in flights:
        row = next((index for index, time in enumerate(free) if time <= flight.begin), len(free))
        row = min(row, LANES - 1)
        if row == len(free):
            free.append(0.0)
        free[row] = max(free[row], flight.end)
        rows.append(row)
    return rows


def joined(bars: Sequence[Bar], window: tuple[float, float], most: int) -> list[Bar]:
    """At most about `most` bars. Those outside `window` are joined over wider and wider gaps until they are few enough."""
    if len(bars) <= most:
        return list(bars)
    inside: list[Bar] = []
    outside: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.row, bar.begin)):
        (inside if bar.end >= window[0] and bar.begin <= window[1] else outside).append(bar)
    gap, room = 1e-3, max(most - len(inside), most // 4)
    while len(outside) > room:
        outside = _across(outside, gap, window)
        gap *= 2
    return outside + inside


def _across(bars: Sequence[Bar], gap: float, window: tuple[float, float]) -> list[Bar]:
    out = [bars[0]]
    for bar in bars[1:]:
        last = out[-1]
        split = last.end < window[0] <= bar.begin  # the window lies between them
        if bar.row != last.row or bar.begin - last.end > gap or split:
            out.append(bar)
            continue
        count = last.count + bar.count
        paint = last.paint if last.paint == bar.paint else "#8a8a8a" if last.paint else ""
        out[-1] = Bar(last.row, last.begin, max(last.end, bar.end), last.text, "", paint, count)
    return out


def _bar_trace(name: str, bars: Sequence[Bar]) -> Json:
    style = _STYLES[name]
    marker: Json = {"color": [bar.paint for bar in bars] if bars[0].paint else style["color"], "line": {"width": 0}}
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [bar.row for bar in bars],
        "base": [round(bar.begin, 5) for bar in bars],
        "x": [round(max(bar.end - bar.begin, 1e-5), 5) for bar in bars],
        "width": style["width"],
        "marker": marker,
        "opacity": style.get("opacity", 1.0),
        "customdata": [_hover(bar) for bar in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }
    if name == "on the link":
        trace |= {"text": [bar.label for bar in bars], "textposition": "inside", "insidetextanchor": "middle"}
        trace |= {"textangle": 0, "insidetextfont": {"color": "#ffffff", "size": 11}}
    return trace


def _hover(bar: Bar) -> str:
    length = text_of_seconds(bar.end - bar.begin)
    return f"{bar.text}, {length}" if bar.count == 1 else f"{bar.count} joined for drawing, from {bar.text}; {length}"
