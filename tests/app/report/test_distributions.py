"""The report's distributions: what is drawn for which values, and the page of a real run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.charts import Chart
from thinwire.app.report.distributions import QUANTITIES, distribution_charts, samples

Make = Callable[..., Path]


@pytest.fixture
def charts(make_run: Make, tmp_path: Path) -> Callable[..., dict[str, Chart]]:
    """The charts of a run whose replicas' steps took these seconds."""
    number = count()

    def made(*seconds: np.ndarray) -> dict[str, Chart]:
        record = RunRecord.load(make_run(tmp_path / f"run-{next(number)}", steps=20, replicas=len(seconds)))
        pairs = zip(record.replicas, seconds)
        return dict(
            distribution_charts(
                replace(record, replicas=tuple(replace(one, compute_seconds=given) for one, given in pairs))
            )
        )

    return made


def drawn(n: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(size=n)) / 100


def test_densities_of_replicas_side_by_side(charts: Callable[..., dict[str, Chart]]) -> None:
    """Seconds that differ by more than a factor of five are on a logarithmic axis, where each density has the area one."""
    chart = charts(drawn(200, 1), 2 * drawn(300, 2))["step-times"]
    (view,) = chart.views
    assert [trace["name"] for trace in view.data] == ["replica 0", "replica 1"]
    assert view.layout["xaxis"]["type"] == "log" and view.layout["yaxis"]["title"]["text"] == "density"
    for trace in view.data:
        assert np.trapezoid(trace["y"], np.log(trace["x"])) == pytest.approx(1.0, abs=0.01)
    assert [told.split(",")[0] for told in chart.remarks] == ["replica 0: 200 values", "replica 1: 300 values"]


def test_one_doubt_gives_every_value_of_all(charts: Callable[..., dict[str, Chart]]) -> None:
    few = np.array([0.3, 0.1, 0.2, 0.2])
    chart = charts(drawn(200, 1), few)["step-times"]
    (view,) = chart.views
    assert chart.remarks[0] == (
        "No density is drawn, because in replica 1 there are 4 values, and at least 30 are needed. Each value is a step of the curve."
    )
    assert view.data[1]["x"] == [0.1, 0.2, 0.2, 0.3] and view.data[1]["y"] == [0.25, 0.5, 0.75, 1.0]
    assert [trace["mode"] for trace in view.data] == ["lines", "lines+markers"]
    assert view.layout["yaxis"]["title"]["text"] == "share of values"
    assert "half of them up to 200 ms, nine tenths up to 270 ms, all up to 300 ms" in chart.remarks[2]


def test_seconds_of_zero_are_on_a_linear_axis(charts: Callable[..., dict[str, Chart]]) -> None:
    (view,) = charts(np.append(drawn(99), 0.0))["step-times"].views
    assert "type" not in view.layout["xaxis"]


def test_long_runs_have_bounded_charts(charts: Callable[..., dict[str, Chart]]) -> None:
    """Of ten thousand tied values, and of as many that spread over twelve decades."""
    for values in (np.round(drawn(10_000), 3), drawn(10_000) ** 3):
        (view,) = charts(values)["step-times"].views
        assert len(view.data[0]["x"]) <= 1500


def test_losses_are_those_of_the_second_half(make_run: Make, tmp_path: Path) -> None:
    replica = RunRecord.load(make_run(tmp_path / "run", steps=20)).replicas[0]
    assert samples(replica, "losses").tolist() == replica.loss[10:].tolist()
    broken = replace(replica, loss=np.append(replica.loss[:-1], np.nan))
    assert len(samples(broken, "losses")) == 9


def drawn_on(page: str) -> dict[str, dict]:
    found = re.findall(r'<script type="application/json" id="([a-z-]+)-0-data">(.*?)</script>', page, flags=re.DOTALL)
    return {name: json.loads(data) for name, data in found}


@pytest.mark.parametrize("steps", [6, 64])
def test_the_page_of_a_real_run(steps: int, tmp_path: Path) -> None:
    """Each quantity has a chart; what is no density is a share of values, and the page says why."""
    job, out = ROOT / "examples/workloads/graph.py", tmp_path / "run"
    command = [
        "train",
        "--job",
        str(job),
        "--steps",
        str(steps),
        "--every",
        "3",
        "--delay",
        "1",
        "--carrier",
        "threads",
    ]
    assert main([*command, "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert re.search(r'id="section-distributions"><h2>Distributions <span class="word">measured</span>', page)
    charts, record = drawn_on(page), RunRecord.load(out)
    for what, title in QUANTITIES.items():
        (view,) = charts[what]["views"]
        assert view["layout"]["xaxis"]["title"]["text"] == title
        assert [trace["name"] for trace in view["data"]] == ["replica 0", "replica 1"]
        place = page[page.index(f'id="{what}-0"') :]
        told = re.findall(r'<p class="remark">(.*?)</p>', place[: place.index("half of them")])
        refused = view["layout"]["yaxis"]["title"]["text"] == "share of values"
        assert refused == told[0].startswith("No density is drawn, because") if told else not refused
        assert refused or all(len(samples(replica, what)) >= 30 for replica in record.replicas)
    if steps == 6:
        assert "because in replica 0 there are 6 values, and at least 30 are needed" in page
