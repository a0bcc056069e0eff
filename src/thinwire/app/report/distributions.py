"""How step times, exchanges and losses are distributed, by replica: a kernel density where it can be trusted, otherwise every value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from thinwire.app.records.history import Floats
from thinwire.app.records.replica_record import ReplicaRecord
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_loss, text_of_seconds
from thinwire.app.report.charts import LINES, POINTS, Chart, ChartState, Json, colour, every_point, rounded
from thinwire.app.report.kernel_density import LEAST_VALUES, Bandwidth, bandwidth, kernel_density

QUANTITIES = {
    "step-times": "Seconds of an inner step",
    "exchanges": "Seconds of an exchange",
    "losses": "Losses of the steps in the second half of the run",
}
WIDE = 5.0  # largest over smallest above which seconds have a logarithmic axis
REACH = 3.0  # how far a density is drawn beyond the values, in bandwidths
FINE = 0.25  # most between two points of a density, in bandwidths

Samples = Sequence[tuple[str, Floats]]  # (replica, its values)


def samples(replica: ReplicaRecord, what: str) -> Floats:
    """The finite values of `what`, one of `QUANTITIES`, in their order. An exchange begins when its fragment departs, and ends when all
    packets are there.
    """
    if what == "exchanges":
        values = replica.flights.end - replica.flights.begin
    elif what == "losses":
        values = replica.loss[replica.step > replica.step[-1] / 2] if len(replica.step) else replica.loss
    else:
        values = replica.compute_seconds
    found: Floats = values[np.isfinite(values)]
    return found


def distribution_charts(record: RunRecord) -> Mapping[str, Chart]:
    """A chart for each of `QUANTITIES` that the run has recorded. If one replica's density cannot be trusted, none is drawn in its chart."""
    charts = {}
    for what in QUANTITIES:
        own = [(replica.name, samples(replica, what)) for replica in record.replicas[:LINES]]
        own = [(name, values) for name, values in own if len(values)]
        if own:
            left_out = len(record.replicas) - LINES
            more = [f"The first {LINES} of {len(record.replicas)} replicas are drawn."] if left_out > 0 else []
            charts[what] = _chart(what, own, more)
    return charts


def _chart(what: str, own: Samples, more: Sequence[str]) -> Chart:
    low, high = min(values.min() for _, values in own), max(values.max() for _, values in own)
    timed = what != "losses"
    logarithmic = bool(timed and low > 0 and high > WIDE * low)
    scaled = [(name, np.log(values) if logarithmic else values) for name, values in own]
    found = [bandwidth(values) for _, values in scaled]
    doubts = [f"in {name} {one.doubt}" for (name, _), one in zip(own, found) if one.doubt]
    if doubts:
        data = [_shares(index, *one) for index, one in enumerate(own)]
        y: Json = {"title": {"text": "share of values"}, "range": [0, 1.03], "tickformat": ".0%"}
    else:
        data = [_density(index, *one, width, logarithmic) for (index, one), width in zip(enumerate(scaled), found)]
        y = {"title": {"text": "density"}, "rangemode": "tozero", "showticklabels": False}
    x: Json = {"title": {"text": QUANTITIES[what]}} | (_seconds_axis(low, high, logarithmic) if timed else {})
    view = ChartState(what, data, {"xaxis": x, "yaxis": y, "hovermode": "closest", "showlegend": True})
    why = [f"No density is drawn, because {doubts[0]}. Each value is a step of the curve."] if doubts else []
    return Chart([view], 290, (*why, *(_told(name, values, timed) for name, values in own), *more))


def _shares(index: int, name: str, values: Floats) -> Json:
    """The share of values that are at most x. Each value has a dot if they are few."""
    ordered = np.sort(values)
    some = every_point(len(ordered), POINTS)
    return _trace(index, name, ordered[some], (some + 1) / len(ordered), "%{y:.1%} of the values are at most %{x}") | {
        "mode": "lines+markers" if len(values) < LEAST_VALUES else "lines",
        "marker": {"size": 5, "color": colour(index)},
        "line": {"shape": "hv", "width": 1.5, "color": colour(index)},
    }


def _density(index: int, name: str, values: Floats, found: Bandwidth, logarithmic: bool) -> Json:
    h = found.h
    low, high = values.min() - REACH * h, values.max() + REACH * h
    at = np.linspace(low, high, min(POINTS, math.ceil((high - low) / (FINE * h)) + 1))
    return _trace(index, name, np.exp(at) if logarithmic else at, kernel_density(values, h, at), "%{x}") | {
        "fill": "tozeroy",
        "fillcolor": colour(index) + "22",
    }


def _trace(index: int, name: str, x: Floats, y: Floats, told: str) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(x),
        "y": rounded(y),
        "line": {"width": 1.5, "color": colour(index)},
        "name": escape(name),
        "hovertemplate": told,
    }


def _seconds_axis(low: float, high: float, logarithmic: bool) -> Json:
    """Ticks at 1, 2 and 5 of each decade on a logarithmic axis."""
    if not logarithmic:
        return {"ticksuffix": " s"}
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(decades) > 5 else (1, 2, 5)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [text_of_seconds(tick) for tick in ticks]}


def _told(name: str, values: Floats, timed: bool) -> str:
    text = text_of_seconds if timed else text_of_loss
    middle, most = np.quantile(values, [0.5, 0.9])
    return f"{name}: {len(values):,} values, half of them up to {text(middle)}, nine tenths up to {text(most)}, all up to {text(values.max())}."
