"""Draws the timeline: what every replica computed, which rounds were in flight meanwhile, and where it waited.

Every replica has a row for its own time (inner steps, stalls, outer steps, pauses), and below it as many rows as it had
flights at once. Bars beyond a budget are joined with their neighbours, except in the window that is shown
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from thinwire.app.records.history import Floats, Integers
from thinwire.app.records.replica_record import RecordedFlights, ReplicaRecord
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_nbytes, text_of_seconds
from thinwire.app.report.charts import Chart, ChartState, Json, colour, typical_window

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
    label: str
    paint: str
    count: int


@dataclass(frozen=True, eq=False)
class Bars:
    """All bars of one kind, arrays [B]; there may be millions, so a bar's text is made when it is drawn."""

    row: Integers
    begin: Floats
    end: Floats
    text: Callable[[int], str]
    fragment: Integers | None = None  # whose colours they have, and whose numbers if `labelled`
    labelled: bool = False

    def __len__(self) -> int:
        return len(self.begin)


def timeline_chart(record: RunRecord) -> Chart:
    """Rows of bars over time. The chart first shows `typical_window`."""
    window = typical_window(record)
    drawn = record.replicas[:ROWS]
    found: list[dict[str, Bars]] = []
    labels: list[str] = []
    for replica in drawn:
        lanes = _lanes(replica.flights)
        found.append(_bars(replica, len(labels), lanes))
        labels += [escape(replica.name)] + [
            "in the air" if lane == 0 else "" for lane in range(lanes.max(initial=0) + 1)
        ]
    few = sum(len(bars) for kinds in found for bars in kinds.values()) <= BARS
    most = BARS if few else BARS // (len(_STYLES) * len(drawn))
    thinned = {name: [bar for kinds in found for bar in joined(kinds[name], window, most)] for name in _STYLES}
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


def _bars(replica: ReplicaRecord, row: int, lanes: Integers) -> dict[str, Bars]:
    stalls, merges, flights = replica.stalls, replica.merges, replica.flights
    lost, pauses = replica.lost, replica.pauses
    away = [pair for pair in zip(replica.incarnations, replica.incarnations[1:]) if pair[1].begin - pair[0].end > 0.1]

    def bars(begin: Sequence[float] | Floats, end: Sequence[float] | Floats, text: Callable[[int], str]) -> Bars:
        return Bars(np.full(len(begin), row), np.array(begin, dtype=float), np.array(end, dtype=float), text)

    def in_the_air(index: int) -> str:
        return _flight_text(flights, index)

    air = row + 1 + lanes
    return {
        "lost, done again": bars(
            [one.span.begin for one in lost],
            [one.span.end for one in lost],
            lambda i: f"{lost[i].steps} steps after step {lost[i].span.step}, done again",
        ),
        "not living": bars(
            [before.end for before, _ in away],
            [after.begin for _, after in away],
            lambda i: f"ended after step {away[i][0].step}, then started again",
        ),
        "inner steps": bars(replica.begin, replica.seconds, lambda i: f"step {replica.step[i]}"),
        "evaluation, checkpoint": bars(
            [one.begin for one in pauses], [one.end for one in pauses], lambda i: f"pause after step {pauses[i].step}"
        ),
        "stall": bars(
            stalls.begin, stalls.end, lambda i: f"waits for fragment {stalls.fragment[i]} at step {stalls.step[i]}"
        ),
        "outer step": bars(merges.begin, merges.end, lambda i: f"outer step of fragment {merges.fragment[i]}"),
        "in the air": Bars(air, flights.begin, flights.end, in_the_air, flights.fragment),
        "on the link": Bars(air, flights.link_begin, flights.link_end, in_the_air, flights.fragment, labelled=True),
    }


def _flight_text(flights: RecordedFlights, index: int) -> str:
    air = float(flights.end[index] - flights.begin[index])
    link = float(flights.link_end[index] - flights.link_begin[index])
    return (
        f"fragment {flights.fragment[index]}, round {flights.round[index]}, left after step {flights.step[index]}<br>"
        f"{text_of_nbytes(int(flights.nbytes[index]))}, {text_of_seconds(air)} in the air, {text_of_seconds(link)} on the link"
    )


def _lanes(flights: RecordedFlights) -> Integers:
    """A row for every flight, such that simultaneous flights are in different rows; the last row takes the remaining ones."""
    free: list[float] = []
    rows = []
    for begin, end in zip(flights.begin.tolist(), flights.end.tolist()):
        row = next((index for index, time in enumerate(free) if time <= begin), len(free))
        row = min(row, LANES - 1)
        if row == len(free):
            free.append(0.0)
        free[row] = max(free[row], end)
        rows.append(row)
    return np.array(rows, dtype=np.int64)


def joined(bars: Bars, window: tuple[float, float], most: int) -> list[Bar]:
    """At most about `most` bars. Those outside `window` are joined over wider and wider gaps until they are few enough."""
    if len(bars) <= most:
        return [_bar(bars, np.array([index]), end) for index, end in enumerate(bars.end.tolist())]
    order = np.lexsort((bars.begin, bars.row))
    inside = (bars.end[order] >= window[0]) & (bars.begin[order] <= window[1])
    shown, outside = order[inside], order[~inside]
    row, begin, reach = bars.row[outside], bars.begin[outside], _reach(bars.row[outside], bars.end[outside])
    split = (reach[:-1] < window[0]) & (window[0] <= begin[1:])  # the window lies between them
    apart = (row[1:] != row[:-1]) | split
    first, gap, room = np.arange(len(outside)), 1e-3, max(most - len(shown), most // 4)
    while len(first) > room:
        first = np.flatnonzero(np.concatenate([[True], apart | (begin[1:] - reach[:-1] > gap)]))
        gap *= 2
    ends = np.append(first[1:], len(outside)).tolist()
    out = [_bar(bars, outside[a:b], float(reach[b - 1])) for a, b in zip(first.tolist(), ends)]
    return out + [_bar(bars, shown[a : a + 1], float(bars.end[shown[a]])) for a in range(len(shown))]


def _reach(row: Integers, end: Floats) -> Floats:
    """The latest end so far in the row of each bar."""
    reach = end.copy()
    for one in np.unique(row):
        reach[row == one] = np.maximum.accumulate(end[row == one])
    return reach


def _bar(bars: Bars, of: Integers, end: float) -> Bar:
    """One bar in the place of those with the indices `of`."""
    index, count = int(of[0]), len(of)
    paint = label = ""
    if bars.fragment is not None:
        alike = count == 1 or bool((bars.fragment[of] == bars.fragment[index]).all())
        paint = colour(int(bars.fragment[index])) if alike else "#8a8a8a"
        label = str(bars.fragment[index]) if bars.labelled and count == 1 else ""
    return Bar(int(bars.row[index]), float(bars.begin[index]), end, bars.text(index), label, paint, count)


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
