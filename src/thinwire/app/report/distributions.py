"""How step times, exchanges and losses are distributed, by replica: for each value, the share of the values that are at most as large.

A curve of shares needs no bandwidth: it shows two modes as two steep stretches, and one value far away as its last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from thinwire.app.records.history import Floats
from thinwire.app.records.replica_record import ReplicaRecord
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_loss, text_of_seconds
from thinwire.app.report.charts import LINES, POINTS, Chart, Json, chart, curve, every_point, share_axis

QUANTITIES = {
    "step-times": "Seconds of an inner step",
    "exchanges": "Seconds of an exchange",
    "losses": "Losses of the steps in the second half of the run",
}
WIDE = 5.0  # largest over smallest above which seconds have a logarithmic axis
FEW = 30  # values, below which each has a dot

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
    finite: Floats = values[np.isfinite(values)]
    return finite


def distribution_charts(record: RunRecord) -> Mapping[str, Chart]:
    """A chart for each of `QUANTITIES` that the run has recorded."""
    charts = {}
    for what in QUANTITIES:
        of_each = [(replica.name, samples(replica, what)) for replica in record.replicas[:LINES]]
        of_each = [(name, values) for name, values in of_each if len(values)]
        if of_each:
            left_out = len(record.replicas) - LINES
            more = [f"The first {LINES} of {len(record.replicas)} replicas are drawn."] if left_out > 0 else []
            charts[what] = _chart(what, of_each, more)
    return charts


def _chart(what: str, of_each: Samples, more: Sequence[str]) -> Chart:
    low, high = min(values.min() for _, values in of_each), max(values.max() for _, values in of_each)
    timed = what != "losses"
    logarithmic = bool(timed and low > 0 and high > WIDE * low)
    x: Json = {"title": {"text": QUANTITIES[what]}, "ticksuffix": " s" if timed else ""}
    x |= {"type": "log", "dtick": 1 if high > 1e3 * low else "D2"} if logarithmic else {}
    data: list[Json] = []
    for index, (name, values) in enumerate(of_each):
        some = every_point(len(values), POINTS)
        line = curve(np.sort(values)[some], (some + 1) / len(values), escape(name), index, "%{y:.1%} up to %{x}")
        data.append(line | {"mode": "lines+markers" if len(values) < FEW else "lines", "marker": {"size": 5}})
        data[-1]["line"] |= {"shape": "hv", "width": 1.5}
    drawn = chart(data, x, share_axis("share of values"), *(_told(*each, timed) for each in of_each), *more)
    return Chart(drawn.views, 290, drawn.remarks)


def _told(name: str, values: Floats, timed: bool) -> str:
    text = text_of_seconds if timed else text_of_loss
    middle, most = np.quantile(values, [0.5, 0.9])
    return f"{name}: {len(values):,} values, half of them up to {text(middle)}, nine tenths up to {text(most)}, all up to {text(values.max())}."
