"""Figures of the studies, such as compute utilization against the link's rate with a curve for each method (the paper's figure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from thinwire.app.report.charts import Chart, chart, curve, share_axis
from thinwire.lab.simulate import fabric
from thinwire.lab.simulate.fabric import POLICIES, Fabric, Pattern
from thinwire.lab.simulate.overlap import ORDERS, RingReduction, overlapped_seconds, reduce_scatter, serial_seconds
from thinwire.lab.simulate.pipeline import (
    Pipeline,
    amp_seconds,
    one_forward_one_backward,
    pipeline_seconds,
    pipette_seconds,
)
from thinwire.lab.simulate.utilization import STUDIED, Study

POINTS = 240  # points of a curve
DRAWS = 8  # random draws per point
MOST_FLOWS = 64  # end of the fabric's axis


def utilization_chart(study: Study, methods: tuple[str, ...]) -> Chart:
    """Compute utilization against the rate of the link, a curve for each method; simulated.

    The rates reach from a third of the lowest at which a method computes half of the time to three times the highest at
    which one computes 99 % of it.

    Args:
        study: the model and how the methods are set.
        methods: names from `thinwire.lab.simulate.utilization.STUDIED`.

    >>> from thinwire.lab.simulate.layers import Stack
    >>> len(utilization_chart(Study(Stack(1e9, 24, 0.1)), ("diloco",)).views[0].data)
    1
    """
    needed = [rate for method in methods for rate in study.rates(method)]
    rates = np.geomspace(min(needed) / 3, max(needed) * 3, POINTS)
    data = [
        curve(
            rates / 1e9, study.utilization(method, rates), method, STUDIED.index(method), "%{y:.1%} at %{x:.3~g} Gbit/s"
        )
        for method in methods
    ]
    x = {"title": {"text": "link, Gbit/s"}, "type": "log"}
    return chart(data, x, share_axis("compute utilization (simulated)"), study.convention())


def pipeline_chart(stages: int, micro_batches: int, forward: float, backward: float) -> Chart:
    """Utilization of equal pipeline stages against the time of a hop, simulated and by three closed forms.

    A hop takes from 0 to three times a stage's forward and backward pass.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches in a step.
        forward, backward: seconds of a stage's pass over one micro-batch.

    >>> [line["name"] for line in pipeline_chart(4, 8, 1.0, 2.0).views[0].data]
    ['simulated', 'exact form', 'Pipette', 'AMP']
    """
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
    """The speed-up of an overlapped ring reduction over a serial one, while sending takes a tenth to ten times the computing.

    Args:
        ring: its ranks and its contention; its times are replaced by those of the axis.

    >>> [line["name"] for line in overlap_chart(RingReduction(4, 1.0, 1.0)).views[0].data]
    ['same', 'staggered', 'staggered, predicted']
    """
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
    """The load of the busiest link over an even load, against the flows from a host to a leaf; what is drawn is the mean of 8 draws.

    Args:
        given: the leaves and spines.
        pattern: `all-to-all` or `ring`.
        seed: of the drawn paths; an integer number.

    >>> [line["name"] for line in fabric_chart(Fabric(leaves=2, spines=2), "ring", seed=0).views[0].data]
    ['ecmp', 'round-robin', 'split', 'wrap', 'spray']
    """
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
    """Completed steps against time.

    Args:
        runs: by name, the second at which each round ended and the number of steps; the first rounds of a run whose steps
            are completed later complete none.

    >>> stragglers_chart({"plain": ([1.0, 2.0], 2)}).views[0].data[0]["y"]
    [0.0, 1.0, 2.0]
    """
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


def disrupted_chart(rows: Sequence[Mapping[str, float]]) -> Chart:
    """The accuracy of the survivors, and the share in the largest component, against the share of failed replicas.

    Args:
        rows: of each share `hit`: accuracies `after`, `low`, `in_giant`, `alone`, `undisturbed`, and the share `giant`. NaN: none.

    >>> row = dict(hit=0.1, after=0.8, low=0.7, in_giant=0.8, alone=float("nan"), undisturbed=0.9, giant=1.0)
    >>> [line["name"] for line in disrupted_chart([row]).views[0].data][:2]
    ['if nobody had failed', 'survivors']
    """
    ordered = sorted(rows, key=lambda row: row["hit"])
    names = {
        "undisturbed": "if nobody had failed", "after": "survivors", "in_giant": "in the largest part", "low": "worst tenth",
        "alone": "without a neighbour", "giant": "share in the largest part",
    }  # fmt: skip
    data = []
    for number, (key, name) in enumerate(names.items()):
        there = [row for row in ordered if not np.isnan(row[key])]
        hit, values = (np.array([row[one] for row in there]) for one in ("hit", key))
        if there:
            data.append(
                curve(hit, values, name, number, "%{y:.1%} at %{x:.0%}", dashed=key in ("undisturbed", "giant"))
            )
            data[-1]["mode"] = "lines+markers"
    x = {"title": {"text": "share of the replicas that are hit"}, "tickformat": ".0%"}
    return chart(data, x, share_axis("accuracy (simulated)"), "dashed: nobody failed; what is left of the graph")


def _busiest(given: Fabric, policy: fabric.Policy, pattern: Pattern, flows: int, random: Random) -> float:
    draws = DRAWS if policy in fabric.BY_CHANCE else 1
    best = fabric.even_load(given, pattern, flows)
    found = [
        fabric.most_loaded(given, fabric.route(given, policy, pattern, flows, random.randrange(2**32)))
        for _ in range(draws)
    ]
    return float(sum(found) / draws / best)
