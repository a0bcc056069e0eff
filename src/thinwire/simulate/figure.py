"""Figures of the studies: compute utilisation against the link's rate, a curve a method (the paper's figure), and others like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from thinwire.report.charts import Chart, ChartState, Json, colour, rounded
from thinwire.simulate import fabric
from thinwire.simulate.fabric import POLICIES, Fabric, Pattern
from thinwire.simulate.layers import Floats
from thinwire.simulate.overlap import ORDERS, RingReduction, overlapped_seconds, reduce_scatter, serial_seconds
from thinwire.simulate.pipeline import (
    Pipeline,
    amp_seconds,
    one_forward_one_backward,
    pipeline_seconds,
    pipette_seconds,
)
from thinwire.simulate.utilization import STUDIED, Study

POINTS = 240  # of a curve
DRAWS = 8  # of what depends on chance
MOST_FLOWS = 64  # on the fabric's axis


def utilization_chart(study: Study, methods: tuple[str, ...] = STUDIED) -> Chart:
    """From a third of the lowest rate at which some method computes half of the time, to thrice the highest for 99 %."""
    needed = [rate for method in methods for rate in study.rates(method)]
    rates = np.geomspace(min(needed) / 3, max(needed) * 3, POINTS)
    data = [
        curve(
            rates / 1e9, study.utilization(method, rates), method, STUDIED.index(method), "%{y:.1%} at %{x:.3~g} Gbit/s"
        )
        for method in methods
    ]
    x = {"title": {"text": "link, Gbit/s"}, "type": "log"}
    return chart(data, x, share_axis("compute utilisation (simulated)"), study.convention())


def pipeline_chart(stages: int, micro_batches: int, forward: float, backward: float) -> Chart:
    """Utilisation of equal stages against the time of a hop, from none to three times that of a stage's work."""
    computing = forward + backward
    hops = np.linspace(0, 3 * computing, 61)
    times: Mapping[str, list[float]] = {
        "simulated": [
            one_forward_one_backward(Pipeline.of(stages, micro_batches, forward, backward, [h])) for h in hops
        ],
        "exact form": [pipeline_seconds(stages, micro_batches, computing, hop) for hop in hops],
        "Pipette": [pipette_seconds(stages, micro_batches, computing, hop) for hop in hops],
        "AMP": [amp_seconds(stages, micro_batches, computing, hop) for hop in hops],
    }
    data = [
        curve(
            hops / computing,
            micro_batches * computing / np.array(took),
            name,
            number,
            "%{y:.1%} at %{x:.2f}",
            dashed=number > 0,
        )
        for number, (name, took) in enumerate(times.items())
    ]
    data[0]["line"]["width"] = 4  # the exact form lies on it
    x = {"title": {"text": "a hop, in forward and backward passes of a stage"}}
    return chart(data, x, share_axis("share of the time computing"), "dashed: closed forms (predicted)")


def overlap_chart(ring: RingReduction) -> Chart:
    """How many times faster than serial, against sending over computing, from a tenth to ten."""
    ratios = np.geomspace(0.1, 10, 81)
    rings = [RingReduction(ring.ranks, 1.0, float(ratio), ring.contention) for ratio in ratios]
    serial = np.array([serial_seconds(each) for each in rings])
    data = [
        curve(
            ratios,
            serial / np.array([reduce_scatter(each, order) for each in rings]),
            order,
            number,
            "%{y:.2f} × at %{x:.2f}",
        )
        for number, order in enumerate(ORDERS[1:], 1)
    ]
    predicted = serial / np.array([overlapped_seconds(each) for each in rings])
    data.append(curve(ratios, predicted, "staggered, predicted", 3, "%{y:.2f} ×", dashed=True))
    x = {"title": {"text": "sending a chunk, in times of computing it"}, "type": "log"}
    said = f"computing takes {1 + ring.contention:g} times as long beside sending" if ring.contention else ""
    return chart(data, x, {"title": {"text": "times as fast as serial"}, "range": [0.95, 2.05]}, *filter(None, [said]))


def fabric_chart(given: Fabric, pattern: Pattern, seed: int) -> Chart:
    """The busiest link over an even load, against the flows from a host to a leaf; means of some draws."""
    pairs = fabric.flow_count(given, pattern, 1)
    flows = [n for n in range(1, MOST_FLOWS + 1) if pairs * max(n, given.usable) <= fabric.PARTS]
    random = Random(seed)
    data = []
    for number, policy in enumerate(POLICIES):
        busiest = [_busiest(given, policy, pattern, n, random) for n in flows]
        data.append(
            curve(np.array(flows, dtype=float), np.array(busiest), policy, number, "%{y:.3f} × with %{x} flows")
        )
        data[-1]["line"] |= {"dash": "dash"} if policy in ("wrap", "spray") else {}  # they lie on `split`
    x = {"title": {"text": "flows from a host to a leaf"}}
    y = {
        "title": {"text": "busiest link, × an even load"},
        "range": [0.95, max(max(line["y"]) for line in data) + 0.05],
    }
    return chart(data, x, y, "split, wrap and spray lie on one another")


def stragglers_chart(runs: Mapping[str, tuple[Sequence[float], int]]) -> Chart:
    """Steps completed against time; `runs`: when each round ended, and how many steps there were, by name."""
    data = [
        curve(
            np.array([0.0, *ends]),
            np.minimum(np.maximum(np.arange(len(ends) + 1) - (len(ends) - jobs), 0), jobs).astype(np.float64),
            name,
            number,
            "%{y} steps after %{x:.0f} s",
        )
        for number, (name, (ends, jobs)) in enumerate(runs.items())
    ]
    return chart(data, {"title": {"text": "seconds (simulated)"}}, {"title": {"text": "steps"}})


def _busiest(given: Fabric, policy: fabric.Policy, pattern: Pattern, flows: int, random: Random) -> float:
    draws = DRAWS if policy in fabric.BY_CHANCE else 1
    best = fabric.even_load(given, pattern, flows)
    found = [
        fabric.most_loaded(given, fabric.route(given, policy, pattern, flows, random.randrange(2**32)))
        for _ in range(draws)
    ]
    return float(sum(found) / draws / best)


def curve(x: Floats, y: Floats, name: str, number: int, hover: str, dashed: bool = False) -> Json:
    """One line of a chart, in the colour of its number."""
    line: Json = {"color": colour(number), "width": 2} | ({"dash": "dash"} if dashed else {})
    return {
        "type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded(y), "name": name, "line": line,
        "hovertemplate": hover + "<extra>" + name + "</extra>",
    }  # fmt: skip


def share_axis(title: str) -> Json:
    """From 0 to 100 %."""
    return {"title": {"text": title}, "range": [0, 1.02], "tickformat": ".0%"}


def chart(data: Sequence[Json], x: Json, y: Json, *remarks: str) -> Chart:
    """One view, with a legend; on a logarithmic axis Plotly names 1, 2 and 5, or where that is many the powers of ten."""
    if x.get("type") == "log" and "tickvals" not in x:
        values = [value for line in data for value in line["x"]]
        x |= {"dtick": 1 if max(values) > 1e3 * min(values) else "D2"}
    layout = {"xaxis": x, "yaxis": y, "hovermode": "closest", "showlegend": True}
    return Chart([ChartState("", list(data), layout)], 420, remarks)
