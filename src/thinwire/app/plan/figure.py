"""Figures of a plan: expected loss over bytes, and the share of time in training over the rate of the links. *Predicted*.

`rates_of_runs` draws the second for finished runs: a curve over other rates, and a dot for the run itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import Any

import numpy as np

from thinwire.app.plan import cost
from thinwire.app.plan.setting import SEARCHED, Setting, Task
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_count, text_of_nbytes
from thinwire.app.report.charts import Chart, Json, chart, colour, curve, rounded, share_axis
from thinwire.app.trainer.run import PART_OF, Run
from thinwire.codecs import nested
from thinwire.errors import ThinwireError
from thinwire.pieces.own_files import shorten

POINTS = 60  # of a curve of rates
DECADES = 2.0  # of rates, on both sides of the present rate
DRAWN = 10  # runs


def frontier_chart(found: Sequence[Setting], best: Setting) -> Chart:
    """A dot for every setting, by method. The dashed line joins those of which no setting with fewer bytes has a lower loss."""
    sending = [setting for setting in found if setting.bits_per_second > 0]
    data = [
        _dots([setting for setting in sending if setting.method == method], method, SEARCHED.index(method))
        for method in SEARCHED
        if any(setting.method == method for setting in sending)
    ]
    if best in sending:
        ring = _dots([best], "the plan's best", 0)
        data.append(ring | {"marker": {"color": "#d0564a", "size": 17, "symbol": "circle-open"}})
    front: list[Setting] = []
    for setting in sorted(sending, key=lambda s: (_sent(s), s.loss.value)):
        if not front or setting.loss.value < front[-1].loss.value - 1e-9:
            front.append(setting)
    if front:
        line = curve(
            np.array([_sent(s) for s in front]), np.array([s.loss.value for s in front]), "frontier", 0, "%{y:.3f}"
        )
        data.insert(0, line | {"line": {"color": "#8a94a0", "width": 1.5, "dash": "dash"}})
    alone = [setting for setting in found if setting.bits_per_second == 0]
    remarks = [f"all settings that fit, {text_of_count(best.tokens)} tokens; losses are of C4, by the scaling laws"]
    if alone:
        loss = min(setting.loss.value for setting in alone)
        remarks.append(f"one replica alone sends nothing and is not drawn: {loss:.3f}")
    outside = dict.fromkeys(warning.name for setting in sending for warning in setting.loss.warnings)
    if outside:
        remarks.append(f"not all within what the laws were fitted to ({', '.join(outside)})")
    x: Json = {"title": {"text": "sent by one replica in all"}, "type": "log", **_nbytes_ticks(sending)}
    return chart(data, x, {"title": {"text": "expected loss, nats per token (predicted)"}}, "; ".join(remarks))


def _dots(settings: Sequence[Setting], name: str, number: int) -> Json:
    """Dots of some settings. DiLoCo's are rings, so that both show where streaming with the same H and codec has the same values."""
    texts = [f"{s.label}, M = {s.replicas}: {s.loss.value:.3f}, {text_of_nbytes(_sent(s))}" for s in settings]
    ring = {"symbol": "circle-open", "size": 13} if name == "diloco" else {"size": 8}
    return {
        "type": "scatter", "mode": "markers", "name": name, "text": texts, "hoverinfo": "text",
        "x": rounded(np.array([_sent(s) for s in settings])), "y": rounded(np.array([s.loss.value for s in settings])),
        "marker": {"color": colour(number)} | ring,
    }  # fmt: skip


def _sent(setting: Setting) -> float:
    """Bytes that one replica sends during the whole training."""
    return setting.bits_per_second / 8 * setting.seconds


def _nbytes_ticks(settings: Sequence[Setting]) -> Json:
    sent = [_sent(setting) for setting in settings] or [1.0]
    powers = range(int(np.floor(np.log10(min(sent)))) - 1, int(np.ceil(np.log10(max(sent)))) + 2)
    values = [10.0**power for power in powers]
    texts = [text_of_nbytes(value).replace(".00", "").replace(".0", "") for value in values]
    return {"tickvals": values, "ticktext": texts}


def rates_chart(rows: Sequence[Setting], task: Task) -> Chart:
    """A curve for each row of the table, with all links faster or slower by the same factor. The dots show the given links."""
    data: list[Json] = []
    factors = np.geomspace(10**-DECADES, 10**DECADES, POINTS)
    for number, setting in enumerate([row for row in rows if len(row.places) > 1]):
        slowest = float(task.links.rates[np.ix_(setting.places, setting.places)].min())
        shares = np.array([_share(setting, float(factor)) for factor in factors])
        name = f"{setting.label}, M = {setting.replicas}"
        line = curve(slowest * factors / 1e6, shares, name, number, _HOVER, dashed=number % 2 == 1)
        data += _with_dot(line, slowest / 1e6, setting.pace.utilization)
    x: Json = {"title": {"text": "slowest link, Mbit/s"}, "type": "log"}
    return chart(data, x, share_axis("time in training (predicted)"), "dots: the given links")


def _share(setting: Setting, factor: float) -> float:
    faster = [dataclasses.replace(t, wire_seconds=t.wire_seconds / factor) for t in setting.traffic]
    return cost.follow(setting.strategy, setting.step_seconds, faster).utilization


def rates_of_runs(records: Sequence[RunRecord]) -> Chart | None:
    """The share of time in training that finished runs would have had at other rates; None if no run's strategy, fragments and step
    time are known. A dot shows the run itself. The curves do not count encoding and decoding, so dots may be below them.
    """
    data: list[Json] = []
    for number, record in enumerate(records[:DRAWN]):
        # the record is of another version, or damaged
        with suppress(ThinwireError, ArithmeticError, LookupError, TypeError, ValueError):
            data += _of_run(record, number)
    if not data:
        return None
    x: Json = {"title": {"text": "uplink of a replica, Mbit/s"}, "type": "log"}
    remark = (
        "Lines: predicted, for the same number of steps and the exchange at the end, without encoding, decoding and jitter. "
        "Dots: the runs themselves, where the rate of their link is known."
    )
    return chart(data, x, share_axis("time in inner steps"), remark)


def _of_run(record: RunRecord, number: int) -> list[Json]:
    """The curve and the dot of a run: from a tenth of the least rate that it needs, or of its link's rate, to thirty times that."""
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in record.settings.items()
        if key in PART_OF
    }
    if any(isinstance(value, str) and shorten(value) != value for value in given.values()):
        return []  # a file that a record names is not imported
    strategy = Run.of(**given).make_strategy()
    size, numels = record.summary.replicas, [numel for _, numel in record.start.fragments]
    steps = [float(np.nanmedian(r.compute_seconds)) for r in record.replicas if np.isfinite(r.compute_seconds).any()]
    step = max(steps, default=0.0)
    if size < 2 or not sum(numels) or not step > 0 or record.summary.steps < 1:
        return []
    coded = [strategy.coded(((numel,),)) for numel in numels]
    sent = [strategy.exchange.nbytes_sent(codec, numel, size) for codec, numel in coded]
    if any(inner.needs_shapes for inner in nested(strategy.codec)):  # a log has no shapes: use the counted bytes
        first = record.replicas[0]
        if any(not first.departed.get(p) for p in range(len(numels))):
            return []
        sent = [first.sent[p] // first.departed[p] for p in range(len(numels))]
    way = float(record.start.link.get("delay_seconds") or 0.0)
    ways = [way * cost.delays(strategy.exchange, codec, numel, size) for codec, numel in coded]
    floor = 8 * sum(sent) / (strategy.schedule.every * step)
    there = record.bits_per_second
    rates = np.geomspace(min(floor, there or floor) / 10, max(floor, there or floor) * 30, POINTS)

    def share(rate: float) -> float:
        """The share of time in training, over all steps and the exchange of all fragments at the end."""
        traffic = [
            cost.FragmentSeconds(0.0, 8 * nbytes / rate, delay, 0.0) for nbytes, delay in zip(sent, ways, strict=True)
        ]
        seconds = record.summary.steps * step / cost.follow(strategy, step, traffic).utilization
        last = 0.0 if strategy.exchanges_gradients else 8 * sum(sent) / rate + max(ways)
        return record.summary.steps * step / (seconds + last)

    shares = np.array([share(float(rate)) for rate in rates])
    own = record.summary.compute_utilization
    return _with_dot(curve(rates / 1e6, shares, escape(record.name), number, _HOVER), there and there / 1e6, own)


_HOVER = "%{y:.1%} at %{x:.3~g} Mbit/s"


def _with_dot(line: Json, x: float | None, y: float) -> list[Json]:
    """The curve, and a dot for the present value."""
    if x is None or not np.isfinite(y):
        return [line]
    dot = {
        "type": "scatter", "mode": "markers", "x": [x], "y": [round(y, 6)], "name": line["name"], "showlegend": False,
        "marker": {"color": line["line"]["color"], "size": 10}, "hovertemplate": line["hovertemplate"],
    }  # fmt: skip
    return [line, dot]
