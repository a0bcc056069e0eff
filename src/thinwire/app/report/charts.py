"""The report's charts as plain Plotly dicts, thinned so that a run of weeks still fits on a page.

A chart is a list of views, between which the page switches. Text from files is HTML-escaped, because Plotly reads
some markup in labels. Colours here are readable on light and dark alike; ink, grid and background are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.app.records.history import Floats, Integers
from thinwire.app.records.replica_record import ReplicaRecord
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.sessions import whole
from thinwire.app.records.units import text_of_nbytes, text_of_rate, text_of_seconds

PALETTE = ("#3b82c4", "#e08a2e", "#3a9e74", "#c4567f", "#8467c4", "#a3873a", "#2fa3b5", "#b5653a", "#6b8e23", "#9a6fb0")
POINTS = 1500  # most points of a curve
MARKED = 60  # most evaluations that are marked by dots
BINS = 240  # bins of link use
LINES = 8  # most replicas in a chart

Json = dict[str, Any]


@dataclass(frozen=True)
class ChartState:
    """One state of a chart: its button's label, and Plotly's data and layout."""

    label: str
    data: list[Json]
    layout: Json


@dataclass(frozen=True)
class Chart:
    """Views of one chart, its height in CSS pixels, remarks for its caption, and (name, colour) of a legend above it."""

    views: list[ChartState]
    height: int
    remarks: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()


def colour(index: int) -> str:
    """The colour of the index-th run, replica or fragment."""
    return PALETTE[index % len(PALETTE)]


def drawn_replica(records: Sequence[RunRecord]) -> str:
    """The replica of each run whose training loss and bytes are drawn: the first one with a log here."""
    names = {record.replicas[0].name for record in records}
    return names.pop() if len(names) == 1 else "each run's first replica"


def loss_chart(records: Sequence[RunRecord]) -> Chart:
    """Evaluation loss (thick) and a replica's smoothed training loss (thin) against three measures of cost."""
    axes = (
        ("steps", {"title": {"text": "inner steps"}}),
        ("seconds", {"title": {"text": "time"}, "meta": "seconds"}),
        (
            "bytes sent",
            {
                "title": {"text": f"bytes sent by {escape(drawn_replica(records))}"},
                "type": "log",
                **_byte_ticks(records),
            },
        ),
    )
    views = []
    low, high, clipped = _loss_range(records)
    for label, axis in axes:
        data = []
        for index, record in enumerate(records):
            data += _curves(record, label, colour(index), several=len(records) > 1)
        y: Json = {"title": {"text": "loss"}} | ({"range": [low, high]} if clipped else {})
        views.append(ChartState(label, data, {"xaxis": axis, "yaxis": y, "hovermode": "closest"}))
    undrawn = [(record.name, told) for record in records if (told := _undrawn(record, _by_its_end))]
    remarks = [f"{name}: {told}" if len(records) > 1 else told for name, told in undrawn]
    return Chart(views, 420, (*([_CLIPPED] if clipped else []), *remarks))


_CLIPPED = "The first 5 % of the steps reach above this chart."


def _by_its_end(replica: ReplicaRecord) -> int:
    """The bytes at the right end of its curves."""
    return int(max([0, *replica.nbytes[-1:], *replica.evaluations.nbytes[-1:]]))


def _undrawn(record: RunRecord, drawn: Callable[[ReplicaRecord], int]) -> str:
    """A remark on bytes of which the log does not tell, if they are more than a twentieth of all; empty otherwise."""
    told = [replica for replica in record.replicas if replica.ledger and replica.sessions == 1]
    counted = sum(whole(sent.get("nbytes")) for replica in told for _, _, sent, _ in replica.ledger)
    undrawn = counted - sum(map(drawn, told))
    if undrawn <= counted / 20:
        return ""
    return (
        f"Without {text_of_nbytes(undrawn)} of the {text_of_nbytes(counted)} that all replicas sent: the log has departures alone, and not what "
        "a server answers, or what starts and ends a run."
    )


def _loss_range(records: Sequence[RunRecord]) -> tuple[float, float, bool]:
    """Lowest and highest loss to show, and whether the start is cut off, which it is only if it would flatten the rest."""
    early, late = [], []
    for record in records:
        replica, evaluations = record.replicas[0], record.evaluations
        for step, loss in ((replica.step, replica.smooth), (evaluations.step, evaluations.loss)):
            after = step > 0.05 * record.summary.steps
            early.append(loss[~after & np.isfinite(loss)])
            late.append(loss[after & np.isfinite(loss)])
    shown = np.concatenate(late)
    if not len(shown):
        return 0.0, 1.0, False
    low, high = float(shown.min()), float(shown.max())
    peak = max([high, *(float(loss.max()) for loss in early if len(loss))])
    margin = 0.06 * (high - low)
    return low - margin, high + margin, 0.0 < high - low < 0.4 * (peak - low)


def _byte_ticks(records: Sequence[RunRecord]) -> Json:
    """Ticks at 1, 2 and 5 of every power of ten, or only at the powers if there are many."""
    sent = [nbytes[nbytes > 0] for nbytes in (record.replicas[0].nbytes for record in records)]
    ends = [int(end) for nbytes in sent if len(nbytes) for end in (nbytes[0], nbytes[-1])] or [1]
    powers = range(math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends))) + 1)
    values = [digit * 10**power for power in powers for digit in ((1, 2, 5) if len(powers) <= 4 else (1,))]
    texts = [text_of_nbytes(value).replace(".00", "").replace(".0", "") for value in values]
    return {"tickvals": values, "ticktext": texts}


def _curves(record: RunRecord, against: str, paint: str, several: bool) -> list[Json]:
    replica, evaluations = record.replicas[0], record.evaluations
    pick = every_point(len(replica.step), POINTS)
    steps = {"steps": replica.step, "seconds": replica.seconds, "bytes sent": replica.nbytes}[against]
    points = {"steps": evaluations.step, "seconds": evaluations.seconds, "bytes sent": evaluations.nbytes}[against]
    chosen = every_point(len(points), POINTS)
    name = escape(record.name) + ", " if several else ""
    return [
        {
            **_curve(steps[pick], replica.smooth[pick], name + "training", against == "bytes sent"),
            **{"mode": "lines", "opacity": 0.7, "line": {"color": paint, "width": 1}, "showlegend": not several},
        },
        {
            **_curve(points[chosen], evaluations.loss[chosen], name + "evaluation", against == "bytes sent"),
            **{
                "mode": "lines+markers" if len(points) <= MARKED else "lines",
                "marker": {"size": 6},
                "line": {"color": paint, "width": 2.2},
            },
        },
    ]


def _curve(x: NDArray[Any], y: Floats, name: str, log: bool) -> Json:
    keep = np.isfinite(y) & ((x > 0) if log else True)  # no bytes yet: not on a logarithmic axis
    return {
        "type": "scatter",
        "x": rounded(x[keep]),
        "y": rounded(y[keep]),
        "name": name,
        "hovertemplate": "%{y:.5~g}<extra>" + name + "</extra>",
    }


def link_chart(record: RunRecord, window: tuple[float, float]) -> Chart:
    """Bits on each replica's link over time, as a share of that link's capacity if all are known.

    Over the whole run a bin is at least a cycle long, so that the mean load shows; over the window, the single
    packets do.
    """
    ends = [float(replica.seconds[-1]) for replica in record.replicas if len(replica.step)]
    # the last ones follow the last step
    ends += [float(r.flights.link_end.max()) for r in record.replicas if len(r.flights)]
    whole_run = max(filter(math.isfinite, ends), default=1.0)
    cycle = _cycle(record.replicas[0])
    bins = max(1, min(BINS, int(whole_run / cycle))) if cycle else BINS
    rates = record.rates
    views = [
        _link_view(record, "whole run", np.linspace(0.0, whole_run, bins + 1), rates),
        _link_view(record, "a few cycles", np.linspace(*window, BINS + 1), rates),
    ]
    remarks = [f"Link capacity {text_of_rates(rates)}." if rates else "The link's capacity is not known."]
    remarks += [told] if (told := _undrawn(record, lambda replica: replica.nbytes_sent)) else []
    if len(record.replicas) > LINES:
        remarks.append(f"The first {LINES} of {len(record.replicas)} replicas are drawn.")
    return Chart(views, 270, tuple(remarks))


def text_of_rates(rates: Sequence[float]) -> str:
    """One rate, or the least and the greatest of several."""
    least, most = text_of_rate(min(rates)), text_of_rate(max(rates))
    return least if least == most else f"{least} to {most}"


def _link_view(record: RunRecord, label: str, edges: Floats, rates: Sequence[float]) -> ChartState:
    width = float(edges[1] - edges[0])
    data: list[Json] = []
    top = 1.0 if rates else 0.0
    for index, replica in enumerate(record.replicas[:LINES]):
        rate = 8 * replica.sent_between(edges) / width
        height = np.append(rate, rate[-1]) / (rates[index] if rates else 1.0)  # the last bin has a right end too
        top = max(top, float(height.max()))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": rounded(edges),
                "y": rounded(height),
                "line": {"shape": "hv", "width": 1.5, "color": colour(index)},
                "name": escape(replica.name),
                "text": [text_of_rate(float(value)) for value in rate],
                "hovertemplate": ("%{y:.1%} of the link, " if rates else "") + "%{text}",
                **({"fill": "tozeroy", "fillcolor": colour(index) + "22"} if len(record.replicas) <= 2 else {}),
            }
        )
    y: Json = {
        "title": {"text": "share of the link" if rates else "on the link"},
        "range": [0, max(top * 1.08, 0.0 if rates else 100.0)],
    }
    y |= {"tickformat": ".0%"} if rates else {"tickformat": "~s", "ticksuffix": "bit/s"}
    title = f"time (bins of {text_of_seconds(width)})"
    x: Json = {"meta": "seconds", "range": [float(edges[0]), float(edges[-1])], "title": {"text": title}}
    layout: Json = {"xaxis": x, "yaxis": y, "hovermode": "x unified", "showlegend": True}
    if rates:
        full = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
        layout["shapes"] = [full | {"line": {"dash": "dash", "width": 1.3, "color": "#d0564a"}}]
    return ChartState(label, data, layout)


def rounded(values: NDArray[Any]) -> list[float | None]:
    """The values with six digits, which are enough for drawing; values that are not finite become gaps."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def typical_window(record: RunRecord) -> tuple[float, float]:
    """Seconds of a few cycles in the middle of the longest session: two and a half cycles, within 20 to 150 inner steps."""
    replica = record.replicas[0]
    if not len(replica.step):
        return 0.0, 1.0
    step = max(float(np.nanmedian(replica.compute_seconds)), 1e-3)
    length = min(max(2.5 * (_cycle(replica) or 0.0), 20 * step), 150 * step)
    session = max(replica.windows, key=lambda window: window.end - window.begin)
    middle = (session.begin + session.end) / 2
    departures = replica.flights.begin
    departures = departures[(departures >= session.begin) & (departures <= middle)]
    begin = (float(departures[-1]) if len(departures) else middle) - 2 * step
    begin = max(session.begin, min(begin, session.end - length))
    return begin, begin + length


def _cycle(replica: ReplicaRecord) -> float | None:
    """Median seconds between departures of one fragment."""
    fragments = replica.flights.fragment
    begins = replica.flights.begin[fragments == fragments[:1]]
    return max(float(np.median(np.diff(begins))), 1e-3) if len(begins) > 1 else None


def every_point(count: int, most: int) -> Integers:
    """Indices of at most `most` of `count` points, first and last among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(np.int64))


def curve(x: Floats, y: Floats, name: str, number: int, hover: str, dashed: bool = False) -> Json:
    """One line of a chart.

    Args:
        x, y: the points, float64 [n] each.
        name: shown in the legend.
        number: number of the colour.
        hover: Plotly's template for the text at a point.
        dashed: whether the line is dashed.

    >>> curve(np.array([0.0, 1.0]), np.array([2.0, 3.0]), "loss", 0, "%{y}")["name"]
    'loss'
    """
    line: Json = {"color": colour(number), "width": 2} | ({"dash": "dash"} if dashed else {})
    return {
        "type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded(y), "name": name, "line": line,
        "hovertemplate": hover + "<extra>" + name + "</extra>",
    }  # fmt: skip


def share_axis(title: str) -> Json:
    """An axis from 0 to 100 %.

    Args:
        title: of the axis.

    >>> share_axis("utilization")["tickformat"]
    '.0%'
    """
    return {"title": {"text": title}, "range": [0, 1.02], "tickformat": ".0%"}


def chart(data: Sequence[Json], x: Json, y: Json, *remarks: str) -> Chart:
    """A chart with one view and a legend.

    On a logarithmic axis Plotly names 1, 2 and 5, or the powers of ten alone where the axis spans more than three of them.

    Args:
        data: the lines, as `curve` makes them.
        x, y: the axes, as Plotly's layout has them.
        remarks: sentences below the chart.

    >>> line = curve(np.array([0.0, 1.0]), np.array([2.0, 3.0]), "loss", 0, "%{y}")
    >>> chart([line], {}, share_axis("utilization"), "simulated").remarks
    ('simulated',)
    """
    if x.get("type") == "log" and "tickvals" not in x:
        values = [value for line in data for value in line["x"]]
        x |= {"dtick": 1 if values and max(values) > 1e3 * min(values) else "D2"}
    layout = {"xaxis": x, "yaxis": y, "hovermode": "closest", "showlegend": True}
    return Chart([ChartState("", list(data), layout)], 420, remarks)
