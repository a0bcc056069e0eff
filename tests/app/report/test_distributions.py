"""The report's distributions: shares of values, the axis, bounded charts, and the page of a real run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.charts import Chart
from thinwire.app.report.distributions import QUANTITIES, distribution_charts, samples

Charts = Callable[..., Chart]


@pytest.fixture
def charts(make_run: Callable[..., Path], tmp_path: Path) -> Charts:
    """The chart of step times of a run whose replicas' steps took these seconds."""

    def made(*seconds: np.ndarray) -> Chart:
        record = RunRecord.load(make_run(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", replicas=len(seconds)))
        pairs = zip(record.replicas, seconds)
        replicas = tuple(replace(replica, compute_seconds=given) for replica, given in pairs)
        return distribution_charts(replace(record, replicas=replicas))["step-times"]

    return made


def drawn(n: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(size=n)) / 100


def test_each_replica_has_the_shares_of_its_values(charts: Charts) -> None:
    chart = charts(drawn(200), np.array([0.3, 0.1, 0.2, 0.2]))
    (view,) = chart.views
    assert [trace["name"] for trace in view.data] == ["replica 0", "replica 1"]
    assert view.data[1]["x"] == [0.1, 0.2, 0.2, 0.3] and view.data[1]["y"] == [0.25, 0.5, 0.75, 1.0]
    assert [len(trace["x"]) for trace in view.data] == [200, 4] and "lines" in view.data[0]["mode"]
    assert "half of them up to 200 ms, nine tenths up to 270 ms, all up to 300 ms" in chart.remarks[1]


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [(drawn(99), True), (np.append(drawn(99), 0.0), False), (np.linspace(1, 2, 9), False), (drawn(10_000) ** 3, True)],
    ids=["wide", "with zero", "narrow", "twelve decades of a long run"],
)
def test_the_axis_follows_the_values_and_the_points_are_bounded(
    values: np.ndarray, logarithmic: bool, charts: Charts
) -> None:
    (view,) = charts(values).views
    assert (view.layout["xaxis"].get("type") == "log") == logarithmic and len(view.data[0]["x"]) <= 1500


def test_losses_are_those_of_the_second_half(make_run: Callable[..., Path], tmp_path: Path) -> None:
    replica = RunRecord.load(make_run(tmp_path / "run", steps=20)).replicas[0]
    assert samples(replica, "losses").tolist() == replica.loss[10:].tolist()
    broken = replace(replica, loss=np.append(replica.loss[:-1], np.nan))
    assert len(samples(broken, "losses")) == 9


def test_the_page_of_a_real_run_draws_each_quantity(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = ["--job", str(ROOT / "examples/workloads/graph.py"), "--steps", "6", "--every", "3", "--delay", "1"]
    assert main(["train", *job, "--carrier", "threads", "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    for what, title in QUANTITIES.items():
        data = re.search(rf'<script type="application/json" id="{what}-0-data">(.*?)</script>', page, flags=re.DOTALL)
        assert data and f'id="{what}-0"' in page
        (view,) = json.loads(data[1])["views"]
        assert view["layout"]["xaxis"]["title"]["text"] == title
        assert [trace["name"] for trace in view["data"]] == ["replica 0", "replica 1"]
