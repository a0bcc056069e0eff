"""The study of compute utilization: the paper's table, the layer model, closed forms and their range, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate import formulas
from thinwire.lab.simulate.layers import Stack, compute_utilization, compute_utilization_of_run
from thinwire.lab.simulate.utilization import PAPER_BITS, PAPER_GRID, STUDIED, TARGETS, Study
from thinwire.pieces.schedule import Staggered

PAPER = {  # arXiv 2501.18512, Table 4: Gbit/s for 50, 80, 90, 95, 99 %, the rows of 1 B parameters
    "data-parallel": [86.8, 152.6, 184.2, 222.3, 569.0],
    "diloco": [1.4, 6.2, 13.3, 23.3, 86.8],
    "streaming": [1.4, 5.2, 9.1, 16.0, 28.1],
    "streaming-overlap": [1.4, 4.3, 6.2, 9.1, 11.0],
    "streaming-overlap-fp4": [0.4, 0.9, 1.7, 2.0, 3.0],
}
ONE, TEN, HUNDRED = Stack(1e9, 24, 0.1), Stack(1e10, 48, 0.8), Stack(1e11, 108, 4.9)


def grid_index(gbit_per_second: float) -> int:
    """The index of the point on the paper's grid from which a printed value was rounded."""
    return int(np.abs(np.log(PAPER_GRID / (gbit_per_second * 1e9))).argmin())


def grid_differences(
    study: Study, method: str, printed: list[float], targets: tuple[float, ...] = TARGETS
) -> list[int]:
    """The number of grid points by which each value differs from the printed one."""
    rates = study.paper_rates(method, targets)
    return [grid_index(rate / 1e9) - grid_index(value) for rate, value in zip(rates, printed) if rate is not None]


# ---- the paper's table


@pytest.mark.parametrize("bits", [13.4, 13.5])
def test_all_cells_of_the_papers_1b_rows_are_reproduced(bits):
    study = Study(ONE, bits_per_parameter=bits)
    assert {method: grid_differences(study, method, PAPER[method]) for method in PAPER} == {m: [0] * 5 for m in PAPER}


def test_with_16_bits_nearly_all_cells_move_up_one_point():
    differences = [d for method in PAPER for d in grid_differences(Study(ONE), method, PAPER[method])]
    assert set(differences) == {0, 1} and differences.count(1) == 23


def test_rates_of_a_long_run_differ_by_at_most_one_grid_point():
    """The paper's run begins with an idle link. For a long run two cells differ, by one grid point each."""
    study = Study(ONE, bits_per_parameter=PAPER_BITS)
    found = [
        grid_index(rate / 1e9) <= grid_index(value) for m in PAPER for rate, value in zip(study.rates(m), PAPER[m])
    ]
    assert all(found)
    points = [
        int(np.searchsorted(PAPER_GRID, rate)) - grid_index(v)
        for m in PAPER
        for rate, v in zip(study.rates(m), PAPER[m])
    ]
    assert sorted(points) == [-1, -1] + [0] * 23


@pytest.mark.parametrize(("stack", "printed"), [(TEN, [1.4, 1.7]), (HUNDRED, [1.1, 1.4])])
def test_published_rates_of_larger_models_are_reproduced(stack, printed):
    study = Study(stack, bits_per_parameter=PAPER_BITS)
    assert grid_differences(study, "streaming-overlap-fp4", printed, (0.95, 0.99)) == [0, 0]


def test_671_billion_parameters_need_about_4_gbit_per_second():
    """Published: ~100 % at about 4 Gbit/s against 1 Tbit/s for data-parallel. 61 layers make fragments of three and of two."""
    study = Study(Stack(671e9, 61, 20.1))
    assert study.rates("streaming-overlap-fp4")[-1] / 1e9 == pytest.approx(4.06, abs=0.01)
    assert study.paper_rates("data-parallel")[-1] == 1000e9
    sizes = [len(layers) for layers in study.stack.fragments(study.strategy("streaming"))]
    assert set(sizes) == {2, 3} and sum(sizes) == 61 and len(sizes) == 21


def test_no_overlap_needs_less_than_the_floor():
    """The published rates for an overlap of a whole outer step (0.2 Gbit/s) lie below the floor and cannot be reached."""
    study = Study(ONE, delay=95, bits_per_parameter=PAPER_BITS)
    floor = study.floor("streaming-overlap-fp4")
    assert floor / 1e9 == pytest.approx(3.35 / 9.6)
    assert study.rates("streaming-overlap-fp4", (0.99, 0.5)) == pytest.approx([0.99 * floor, 0.5 * floor], rel=1e-6)


def test_the_periods_match_the_paper():
    """P·⌊H/P⌋ and at least P, for the three sizes of the paper's figures and H = 100 and 30."""
    periods = [Study(s, every=h).strategy("streaming").schedule.every for h in (100, 30) for s in (ONE, TEN, HUNDRED)]
    assert periods == [96, 96, 72, 24, 16, 36]


# ---- the model


def test_the_model_calls_the_strategys_schedule(monkeypatch):
    asked = []
    departs = Staggered.departs
    monkeypatch.setattr(Staggered, "departs", lambda *given: asked.append(given[1]) or departs(*given))
    compute_utilization_of_run(ONE, Study(ONE).strategy("streaming"), 16, np.array([1e9]), steps=40)
    assert [step for step in asked if step] == [*dict.fromkeys(asked)] and asked[-1] == 40


@pytest.mark.parametrize("method", STUDIED)
def test_utilization_rises_with_the_rate_to_one(method):
    used = Study(ONE, delay=5).utilization(method, np.geomspace(1e7, 1e18, 100))
    assert (np.diff(used) >= -1e-12).all() and used[0] < 0.1 and used[-1] == pytest.approx(1, abs=1e-8)
    assert (used <= 1).all()


@pytest.mark.parametrize("method", STUDIED)
def test_the_least_rate_reaches_its_target_exactly(method):
    study = Study(TEN, every=30)
    for target, rate in zip(TARGETS, study.rates(method)):
        below, at = study.utilization(method, np.array([rate * (1 - 1e-6), rate]))
        assert below < target <= at


def test_a_layer_is_sent_when_its_own_backward_pass_ends():
    """By hand: 2 layers, a step of 3 s (½ s forward and 1 s backward per layer), and 1 s on the link per layer and step.

    Layer 1 is ready at 2 s and arrives at 3 s; layer 0 is ready at 3 s and arrives at 4 s. So a step takes 4 s.
    """
    strategy = Study(Stack(10, 2, 3.0)).strategy("data-parallel")
    used = compute_utilization(Stack(10, 2, 3.0), strategy, 1.0, np.array([5.0]))
    assert used == pytest.approx(3 / 4)
    run = compute_utilization_of_run(Stack(10, 2, 3.0), strategy, 1.0, np.array([5.0]), steps=10)
    assert run == pytest.approx(3 / 4)  # the last transfer counts


# ---- closed forms


RATES = np.geomspace(5e7, 3e12, 120)


@pytest.mark.parametrize("layers", [1, 2, 6, 24, 61])
def test_simulator_and_closed_forms_agree(layers):
    study = Study(Stack(1e9, layers, 0.1), fragment_layers=min(3, layers))
    loads = [formulas.load(1e9, 16, rate, 0.1) for rate in RATES]
    simulated = study.utilization("data-parallel", RATES)
    assert simulated == pytest.approx([formulas.data_parallel_utilization(c, layers) for c in loads], abs=1e-12)
    simulated = study.utilization("diloco", RATES)
    assert simulated == pytest.approx([formulas.diloco_utilization(c, layers, 100) for c in loads], abs=1e-12)
    for method in ("streaming", "streaming-overlap"):
        every, delay = (strategy := study.strategy(method)).schedule.every, strategy.schedule.delay
        fragments = study.stack.fragments(strategy)
        predicted = [formulas.streaming_utilization(c, layers, fragments, every, delay) for c in loads]
        assert study.utilization(method, RATES) == pytest.approx(predicted, abs=1e-12)


def test_the_closed_form_is_too_high_once_flights_share_the_link():
    """It is exact up to τ = 11 of 12 steps between departures."""
    errors = {}
    for delay in (11, 12, 20):
        study = Study(ONE, delay=delay)
        every, fragments = 96, ONE.fragments(study.strategy("streaming-overlap"))
        loads = [formulas.load(1e9, 16, rate, 0.1) for rate in RATES]
        predicted = np.array([formulas.streaming_utilization(c, 24, fragments, every, delay) for c in loads])
        simulated = study.utilization("streaming-overlap", RATES)
        errors[delay] = (predicted - simulated).max()
        bound = np.array([formulas.most_utilization(c, every) for c in loads])
        assert np.minimum(predicted, bound) == pytest.approx(simulated, abs=1e-9)
    assert errors[11] < 1e-12 < 0.03 < errors[12] < errors[20]


def test_no_schedule_beats_the_sustained_rate():
    for delay in (1, 5, 30, 90):
        study = Study(ONE, delay=delay)
        bound = [formulas.most_utilization(formulas.load(1e9, 16, rate, 0.1), 96) for rate in RATES]
        assert (study.utilization("streaming-overlap", RATES) <= np.array(bound) + 1e-9).all()


def test_floors_match_the_specification():
    """Gbit/s, two replicas: 16 bits with H = 1, and 4 bits with H = 100, for 1 B, 10 B, 100 B and 671 B."""
    sizes = [(1e9, 0.1), (1e10, 0.8), (1e11, 4.9), (671e9, 20.0)]
    assert [round(formulas.floor_bits_per_second(n, 16, 1, t) / 1e9) for n, t in sizes] == [160, 200, 327, 537]
    assert [round(formulas.floor_bits_per_second(n, 4, 100, t) / 1e9, 2) for n, t in sizes] == [0.4, 0.5, 0.82, 1.34]
    assert round(formulas.floor_bits_per_second(1e11, 4, 72, 4.9) / 1e9, 2) == 1.13


# ---- the command


def json_output(capsys, *arguments: str) -> dict:
    assert main(["simulate", "utilization", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_prints_the_five_rates(capsys):
    asked = "--parameters 1e9 --layers 24 --step-seconds 0.1 --method streaming-overlap-fp4 --every 100 --grid paper --bits-per-parameter 13.4"
    row = json_output(capsys, *asked.split())
    assert [grid_index(rate) for rate in row["bandwidth_gbit_per_second"]] == [
        grid_index(v) for v in PAPER["streaming-overlap-fp4"]
    ]
    assert row["provenance"] == "simulated" and "13.4 bits" in row["volume"] and row["every"] == 96


def test_eager_updates_need_exactly_the_floor(capsys):
    """The delay is a whole period. Below the floor the link is always busy, so U = rate / floor."""
    asked = "--method streaming-eager-fp4 --every 30 --parameters 1e9 --layers 24 --step-seconds 0.08"
    row = json_output(capsys, *asked.split())
    assert row["delay"] == row["every"] == 24 and row["bits_per_parameter"] == 4
    needed = [target * row["floor_gbit_per_second"] for target in TARGETS]
    assert row["bandwidth_gbit_per_second"] == pytest.approx(needed, rel=1e-6)
    overlap = json_output(capsys, *asked.replace("eager", "overlap").split())
    assert overlap["bandwidth_gbit_per_second"][-1] > 1.5 * needed[-1]


def test_the_command_without_a_method_shows_all(capsys):
    assert main(["simulate", "utilization"]) == 0
    said = capsys.readouterr().out
    assert (
        all(method in said for method in STUDIED) and "simulated" in said and "16 bits" in said and "predicted" in said
    )
    rows = json_output(capsys)["methods"]
    assert [row["method"] for row in rows] == list(STUDIED)
    assert all(sorted(row["bandwidth_gbit_per_second"]) == row["bandwidth_gbit_per_second"] for row in rows)


def test_targets_beyond_the_papers_grid_are_null(capsys):
    row = json_output(capsys, "--parameters", "1e13", "--method", "data-parallel", "--grid", "paper")
    assert row["bandwidth_gbit_per_second"] == [None] * 5


def test_the_figure_is_written_as_svg_and_as_page(capsys, tmp_path: Path):
    for name in ("figure.svg", "figure.html"):
        assert main(["simulate", "utilization", "--method", "diloco", "--plot", str(tmp_path / name)]) == 0
    picture = ElementTree.parse(tmp_path / "figure.svg").getroot()
    lines = [mark.get("points", "") for mark in picture.iter() if mark.tag.endswith("polyline")]
    text = " ".join(mark.text or "" for mark in picture.iter())
    assert len(lines) == 1 and "simulated" in text and "diloco" in text and "16 bits" in text
    points = np.array([[float(v) for v in point.split(",")] for point in lines[0].split()])
    assert (np.diff(points[:, 0]) > 0).all() and (np.diff(points[:, 1]) <= 0).all()  # y counts down
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    assert (points >= 0).all() and (points[:, 0] <= width).all() and (points[:, 1] <= height).all()
    page = (tmp_path / "figure.html").read_text()
    assert "simulated" in page and '"name":"diloco"' in page


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["utilisation"], "'utilisation' is no study (did you mean utilization?); there are"),
        (["utilization", "--parameters", "0"], "parameters=0.0: a number from 1 to"),
        (["utilization", "--parameters", "nan"], "parameters=nan: a number from 1 to"),
        (["utilization", "--parameters", "5"], "parameters=5 for 24 layers"),
        (["utilization", "--step-seconds", "1e-300"], "step_seconds=1e-300: a number from 1e-12 to 1e+09 is needed"),
        (["utilization", "--bits-per-parameter", "1e-320"], "a number from 1e-09 to 1,000,000 is needed"),
        (["utilization", "--step-seconds", "-1"], "step_seconds=-1.0: a number from 1e-12 to"),
        (["utilization", "--layers", "0"], "layers=0: between 1 and 2,000 are needed"),
        (["utilization", "--layers", "1000000000"], "layers=1000000000: between 1 and 2,000 are needed"),
        (["utilization", "--every", "0"], "every=0: between 1 and 10,000"),
        (["utilization", "--every", "1000000"], "every=1000000: between 1 and 10,000"),
        (["utilization", "--parameters", "1e300"], "parameters=1e+300: a number from 1 to 1e+18 is needed"),
        (["utilization", "--delay", "-1"], "delay=-1 with every=96"),
        (["utilization", "--delay", "96"], "at most 95"),
        (["utilization", "--fragment-layers", "25"], "fragment_layers=25 for 24 layers: between 1 and 24"),
        (["utilization", "--bits-per-parameter", "inf"], "bits_per_parameter=inf"),
        (["utilization", "--bits-per-parameter", "1e300"], "a number from 1e-09 to 1,000,000 is needed"),
        (["utilization", "--plot", "figure.pdf"], "figure.pdf: a name that ends with .svg, .html or .png"),
        (["utilization", "--plot", "/dev/null/figure.svg"], "/dev/null"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert re.search(re.escape(says), said) and said.count("\n") == 1


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigurationError, match="method='gossip' is not known; choose from data-parallel"):
        Study(ONE).strategy("gossip")


def test_the_table_in_the_docs_matches_the_study():
    text = (Path(__file__).parents[3] / "docs/simulate.md").read_text()
    rows = text.split("<!-- needed -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    assert [row.strip("| ").split(" | ")[0] for row in rows] == list(STUDIED)
    for row in rows:
        method, *cells = row.strip("| ").split(" | ")
        rates = [*Study(ONE).rates(method), Study(ONE).floor(method)]
        assert cells == [f"{rate / 1e9:.3g}" for rate in rates]
