"""The paper's figure: compute utilisation against the link's rate, a curve a method."""

from __future__ import annotations

import numpy as np

from thinwire.observe.charts import Chart, View, colour, rounded
from thinwire.simulate.utilization import METHODS, Study

POINTS = 240  # of a curve


def utilization_chart(study: Study, methods: tuple[str, ...] = METHODS) -> Chart:
    """From a third of the lowest rate at which some method computes half of the time, to thrice the highest for 99 %."""
    needed = [rate for method in methods for rate in study.rates(method)]
    rates = np.geomspace(min(needed) / 3, max(needed) * 3, POINTS)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": rounded(rates / 1e9),
            "y": rounded(study.utilization(method, rates)),
            "name": method,
            "line": {"color": colour(METHODS.index(method)), "width": 2},
            "hovertemplate": "%{y:.1%} at %{x:.3~g} Gbit/s<extra>" + method + "</extra>",
        }
        for method in methods
    ]
    x = {"title": {"text": "link, Gbit/s"}, "type": "log"}
    y = {"title": {"text": "compute utilisation (simulated)"}, "range": [0, 1.02], "tickformat": ".0%"}
    layout = {"xaxis": x, "yaxis": y, "hovermode": "closest", "showlegend": True}
    return Chart([View("", data, layout)], 420, (study.convention(),))
