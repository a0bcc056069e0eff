"""The report's charts as plain Plotly dicts: what is drawn, thinned so that a run of weeks still fits on a page.

A chart is a list of views, between which the page switches. Text from files is HTML-escaped, because Plotly reads some
markup in labels. Colours here are readable on light and dark alike; ink, grid and background are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from thinwire.observe.replicas import Floats, ReplicaRecord
from thinwire.observe.runs import RunRecord
from thinwire.observe.units import text_of_nbytes, text_of_rate, text_of_seconds

PALETTE = ("#3b82c4", "#e08a2e", "#3a9e74", "#c4567f", "#8467c4", "#a3873a", "#2fa3b5", "#b5653a", "#6b8e23", "#9a6fb0")
POINTS = 1500  # of a curve
BINS = 240  # of link use
LINES = 8  # replicas drawn one by one

Json = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One state of a chart: its button's label, and Plotly's data and layout."""

    label: str
    data: list[Json]
    layout: Json


@dataclass(frozen=True)
class Chart:
    """Views of one chart, its height in CSS pixels, and remarks for its caption."""

    views: list[View]
    height: int
    remarks: tuple[str, ...] = ()


def colour(index: int) -> str:
    """The colour of the index-th run, replica or fragment."""
    return PALETTE[index % len(PALETTE)]


def loss_chart(records: Sequence[RunRecord]) -> Chart:
    """Evaluation loss (dots) and training loss (thin, smoothed, mean of the replicas' first) against three measures of cost."""
    axes = (
        ("steps", {"title": {"text": "inner steps"}}),
        ("seconds", {"title": {"text": "time"}, "meta": "seconds"}),
        ("bytes sent", {"title": {"text": "bytes sent per replica"}, "type": "log", "tickformat": "~s", "ticksuffix": "B"}),
    )
    views = []
    for label, axis in axes:
        data = []
        for index, record in enumerate(records):
            data += _curves(record, label, colour(index), several=len(records) > 1)
        layout = {"xaxis": axis, "yaxis": {"title": {"text": "loss"}}, "hovermode": "closest"}
        views.append(View(label, data, layout))
    return Chart(views, 420)


def _curves(record: RunRecord, against: str, paint: str, several: bool) -> list[Json]:
    replica, evaluations = record.replicas[0], record.evaluations
    pick = _every(len(replica.step), POINTS)
    xs = {"steps": replica.step, "seconds": replica.seconds, "bytes sent": replica.nbytes}[against]
    es = {"steps": evaluations.step, "seconds": evaluations.seconds, "bytes sent": evaluations.nbytes}[against]
    name = escape(record.name)
    training = f"{name}, training" if several else "training (replica 0, smoothed)"
    evaluation = f"{name}, evaluation" if several else "evaluation"
    line = {"color": paint, "width": 1.2}
    return [
        _trace(xs[pick], replica.smooth[pick], training, line, mode="lines", opacity=0.5, log=against == "bytes sent"),
        _trace(
            *(es, evaluations.loss, evaluation, {"color": paint, "width": 2.2}),
            **{"mode": "lines+markers", "marker": {"size": 6, "color": paint}, "log": against == "bytes sent"},
        ),
    ]


def _trace(x: Any, y: Floats, name: str, line: Json, *, log: bool, **more: Any) -> Json:
    keep = np.isfinite(y) & (np.asarray(x) > 0 if log else True)  # no bytes yet: not on a logarithmic axis
    return {
        "type": "scatter",
        "x": rounded(np.asarray(x, dtype=np.float64)[keep]),
        "y": rounded(y[keep]),
        "name": name,
        "line": line,
        "hovertemplate": "%{y:.4f}<extra>" + name + "</extra>",
        **more,
    }


def link_chart(record: RunRecord, window: tuple[float, float]) -> Chart:
    """Bits on each replica's link over time, as a share of its capacity where that is known."""
    whole = (0.0, max((float(replica.seconds[-1]) for replica in record.replicas if len(replica.step)), default=1.0))
    capacity = record.bits_per_second
    views = [_link_view(record, "whole run", whole, capacity), _link_view(record, "a few cycles", window, capacity)]
    remarks = [f"Link capacity {text_of_rate(capacity)}." if capacity else "The link's capacity is not known."]
    if len(record.replicas) > LINES:
        remarks.append(f"The first {LINES} of {len(record.replicas)} replicas are drawn.")
    return Chart(views, 260, tuple(remarks))


def _link_view(record: RunRecord, label: str, between: tuple[float, float], capacity: float | None) -> View:
    edges = np.linspace(*between, BINS + 1)
    width = (between[1] - between[0]) / BINS
    data = []
    for index, replica in enumerate(record.replicas[:LINES]):
        rate = 8 * replica.sent_between(edges) / width
        texts = [text_of_rate(float(value)) for value in rate]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": rounded(edges[:-1]),
                "y": rounded(rate / capacity if capacity else rate),
                "line": {"shape": "hv", "width": 1.4, "color": colour(index)},
                "name": f"replica {replica.replica}",
                "text": texts,
                "hovertemplate": ("%{y:.1%} of the link, " if capacity else "") + "%{text}<extra>%{fullData.name}</extra>",
                **({"fill": "tozeroy", "fillcolor": colour(index) + "22"} if len(record.replicas) <= 2 else {}),
            }
        )
    top = max([1.0 if capacity else 0.0, *(max(trace["y"], default=0.0) for trace in data)])
    y: Json = {"title": {"text": "share of the link" if capacity else "on the link"}, "range": [0, top * 1.08]}
    y |= {"tickformat": ".0%"} if capacity else {"tickformat": "~s", "ticksuffix": "bit/s"}
    layout: Json = {"xaxis": {"meta": "seconds", "range": list(between)}, "yaxis": y, "hovermode": "x unified"}
    if capacity:
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
            | {"line": {"dash": "dash", "width": 1.3, "color": "#d0564a"}}
        ]
    note = f" (bins of {text_of_seconds(width)})"
    layout["xaxis"]["title"] = {"text": "time" + note}
    return View(label, data, layout)


def rounded(values: Floats) -> list[float | None]:
    """Six digits are enough to draw with; what is not finite is a gap."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _every(count: int, most: int) -> Any:
    """Indices of at most `most` of `count` points, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)) if count else np.arange(0)


def typical_window(record: RunRecord) -> tuple[float, float]:
    """Seconds of a few cycles in the middle of the run: two and a half rounds of a fragment, 20 to 150 inner steps."""
    replica = record.replicas[0]
    if not len(replica.step):
        return 0.0, 1.0
    step = float(np.median(replica.compute_seconds)) or 1e-3
    begins = np.array([flight.begin for flight in replica.flights if flight.fragment == replica.flights[0].fragment])
    cycle = float(np.median(np.diff(begins))) if len(begins) > 1 else 40 * step
    length = min(max(2.5 * cycle, 20 * step), 150 * step)
    whole = float(replica.seconds[-1])
    first = float(replica.begin[0])
    middle = first + (whole - first) * 0.5
    starts = [begin for begin in begins.tolist() if begin <= middle] or [middle - length / 2]
    begin = max(first, min(starts[-1] - 2 * step, whole - length))
    return begin, min(begin + length, max(whole, begin + step))


def describe(replica: ReplicaRecord) -> str:
    """Whose row it is."""
    return f"replica {replica.replica}"


__all__ = ["PALETTE", "Chart", "View", "colour", "link_chart", "loss_chart", "rounded", "text_of_nbytes", "typical_window"]
