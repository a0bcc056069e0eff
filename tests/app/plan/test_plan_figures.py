"""Figures of a plan and of runs: frontier and rates, the files they are written to, and refused file names."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from thinwire.app.cli import figures, main
from thinwire.app.plan.figure import frontier_chart, rates_chart, rates_of_runs
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import Machine
from thinwire.app.plan.search import Setting, Task, settings
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.charts import Chart, ChartState
from thinwire.app.report.svg import drawing
from thinwire.app.trainer.run import Run
from thinwire.comm import Link
from thinwire.errors import ConfigurationError

GPU = Machine("gpu", memory_nbytes=80 * 10**9, flops_per_second=1.5e14, device="cuda")
TASK = Task(
    base=Run.of(model="1b", tokenizer="bpe:32000", sequence=2048),
    links=Links.uniform(Link.parse("100mbit,50ms"), 3),
    machines=(GPU,),
    tokens=25e9,
)


@pytest.fixture(scope="module")
def found() -> list[Setting]:
    return settings(TASK)


def trace(chart: Chart, name: str) -> dict[str, Any]:
    return next(line for line in chart.views[0].data if line["name"] == name)


def test_no_setting_lies_below_the_frontier(found: list[Setting]) -> None:
    chart = frontier_chart(found, found[0])
    front = trace(chart, "frontier")
    assert front["x"] == sorted(front["x"]) and front["y"] == sorted(front["y"], reverse=True)
    dots = [dots for dots in chart.views[0].data if dots["mode"] == "markers"]
    everything = [point for each in dots for point in zip(each["x"], each["y"], strict=True)]
    for nbytes, loss in everything:
        reached = [y for x, y in zip(front["x"], front["y"], strict=True) if x <= nbytes * (1 + 1e-5)]
        assert reached and min(reached) <= loss + 1e-5
    assert trace(chart, "the plan's best")["text"][0] in trace(chart, found[0].method)["text"]
    assert "predicted" in chart.views[0].layout["yaxis"]["title"]["text"]
    assert "one replica alone sends nothing" in chart.remarks[0] and "sparse_loco-unfitted" in chart.remarks[0]


def test_a_frontier_of_settings_that_send_nothing_is_drawn(found: list[Setting]) -> None:
    alone = [setting for setting in found if setting.run.placement.replicas == 1]
    assert drawing(frontier_chart(alone, alone[0]).views[0], "alone").startswith("<svg")


def test_rate_curves_pass_through_the_planned_settings(found: list[Setting]) -> None:
    rows = found[:3]
    data = rates_chart(rows, TASK).views[0].data
    lines, dots = data[::2], data[1::2]
    assert len(lines) == len(dots) == 3
    for line, dot, setting in zip(lines, dots, rows, strict=True):
        assert dot["x"] == [100.0] and dot["y"] == [pytest.approx(setting.pace.utilization, abs=1e-6)]
        assert np.interp(2.0, np.log10(line["x"]), line["y"]) == pytest.approx(setting.pace.utilization, abs=0.03)
        assert (
            line["y"] == sorted(line["y"]) and line["x"][0] == pytest.approx(1) and line["x"][-1] == pytest.approx(1e4)
        )


def simulated(tmp_path: Path, arguments: str) -> RunRecord:
    asked = f"simulate run --model nano --steps 60 --every 12 --step-seconds 0.2 --out {tmp_path}/virtual {arguments}"
    assert main(asked.split()) == 0
    return RunRecord.load(tmp_path / "virtual")


@pytest.mark.parametrize("method", ["streaming_diloco --delay 3", "diloco", "eager_diloco"])
@pytest.mark.parametrize("rate", [0.3, 2.0])
def test_a_run_lies_on_its_predicted_curve(tmp_path: Path, method: str, rate: float) -> None:
    """Simulation and prediction use the same model here, except for the first period of a run."""
    record = simulated(tmp_path, f"--strategy {method} --link {rate}mbit,30ms --replicas 3")
    chart = rates_of_runs([record])
    assert chart is not None
    line, dot = chart.views[0].data
    assert dot["x"] == [rate]
    assert np.interp(np.log(rate), np.log(line["x"]), line["y"]) == pytest.approx(dot["y"][0], abs=0.06)
    assert 'id="section-rates"' in (tmp_path / "virtual/report.html").read_text()


def test_runs_without_the_needed_records_are_left_out(tmp_path: Path) -> None:
    record = simulated(tmp_path, "--link 2mbit")
    alone = dataclasses.replace(record, summary=dataclasses.replace(record.summary, replicas=1))
    odd = dataclasses.replace(record, settings={"strategy": "of another version"})
    # Bytes depend on shapes: the recorded bytes are taken.
    shaped = record.settings | {"codec": "LowRank(4)", "exchange": "AllReduce()"}
    low_rank = dataclasses.replace(record, settings=shaped)
    silent = dataclasses.replace(record.replicas[0], departed={})
    assert rates_of_runs([low_rank]) is not None
    assert rates_of_runs([dataclasses.replace(low_rank, replicas=(silent,))]) is None
    assert rates_of_runs([alone]) is None and rates_of_runs([odd]) is None and rates_of_runs([]) is None
    both = rates_of_runs([odd, record])
    assert both is not None and len(both.views[0].data) == 2


# ---- files


def test_the_plan_writes_the_requested_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    GPU.save(Path("gpu.toml"))
    asked = (
        "plan 100mbit,50ms gpu.toml --model 1b --tokenizer bpe:32000 --sequence 2048 --frontier f.svg --rates r.html"
    )
    assert main(asked.split()) == 0
    said = capsys.readouterr().out
    assert "figure: f.svg" in said and "figure: r.html" in said
    picture = ElementTree.parse("f.svg").getroot()
    marks = [mark for mark in picture.iter() if mark.tag.endswith("circle")]
    assert len(marks) > 50 and any(mark.get("fill") == "none" for mark in marks)
    assert all(0 <= float(mark.get("cx", -1)) <= 820 and 0 <= float(mark.get("cy", -1)) <= 480 for mark in marks)
    assert "prefers-color-scheme:dark" in Path("f.svg").read_text()
    assert "predicted" in Path("r.html").read_text()


CURVE = {
    "type": "scatter",
    "mode": "lines",
    "name": "a",
    "x": [1, 2, 3],
    "y": [0.1, None, 0.3],
    "line": {"color": "red"},
}
VIEW = ChartState("", [CURVE], {"xaxis": {"title": {"text": "x"}}, "yaxis": {"title": {"text": "y"}}})


def test_a_missing_value_is_a_gap_in_the_line() -> None:
    assert drawing(VIEW, "gap").count("<polyline") == 2


def test_markup_in_text_is_escaped() -> None:
    odd = dataclasses.replace(VIEW, data=[CURVE | {"name": "<script>&"}])
    said = drawing(odd, "<b>", "<i>")
    assert "&lt;script&gt;&amp;" in said and "<b>" not in said and "<i>" not in said
    ElementTree.fromstring(said)


def test_labels_are_beside_their_dots_and_do_not_overlap() -> None:
    y = [1.0, 1.01, 1.02, 9.0]
    trace = {"mode": "markers+text", "x": [1, 1, 1, 9], "y": y, "text": ["one", "two", "three", "four"], "name": "all"}
    layout = {f"{axis}axis": {"title": {"text": axis}} for axis in "xy"}
    tree = ElementTree.fromstring(drawing(ChartState("", [trace | {"marker": {"color": "red"}}], layout), "title"))
    said = {e.text: (float(e.get("x", 0)), float(e.get("y", 0))) for e in tree.iter() if e.text in trace["text"]}
    assert len(said) == 4
    for index, (ax, ay) in enumerate(places := list(said.values())):
        assert all(abs(ay - by) >= 12 or abs(ax - bx) >= 6.6 * 5 for bx, by in places[index + 1 :])
    dots = [(float(e.get("cx", 0)), float(e.get("cy", 0))) for e in tree.iter() if e.tag.endswith("circle")]
    assert all(any(abs(x - a) < 50 and abs(y - b) < 42 for a, b in dots) for x, y in said.values())


def test_a_png_is_rendered_from_the_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, said = list[bytes](), list[str]()
    module = SimpleNamespace(svg2png=lambda picture, scale: seen.append(picture) or b"pixels")
    monkeypatch.setitem(sys.modules, "cairosvg", module)
    figures.draw(Chart([VIEW], 420), "gap", tmp_path / "f.png", "predicted", said.append)
    assert (tmp_path / "f.png").read_bytes() == b"pixels" and seen == [drawing(VIEW, "gap").encode()]
    assert said == [f"figure: {tmp_path / 'f.png'}"]


def test_a_png_without_the_extra_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[png\]'.*or write f.svg"):
        figures.check(Path("f.png"))


def test_a_png_file_is_written(tmp_path: Path) -> None:
    pytest.importorskip("cairosvg", reason="the extra png is not installed", exc_type=ImportError)
    figures.draw(Chart([VIEW], 420), "gap", tmp_path / "f.png", "predicted", print)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
