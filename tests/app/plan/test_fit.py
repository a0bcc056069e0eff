"""Fitted scaling laws: known laws from noisy and published losses, densities, refusals, and `thinwire plan fit`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from published_losses import MEASURED

from thinwire.app.cli import main
from thinwire.app.plan.scaling import FITTED, LAWS, REPLICAS
from thinwire.errors import DataError
from thinwire.lab.plan.fit import Ladder, density, fit, hold_out, intervals


def published_losses() -> Ladder:
    rows = [
        (n, m, loss)
        for n, row in MEASURED.items()
        if n <= FITTED[1]
        for m, loss in zip(REPLICAS, row[1:])
        if loss is not None
    ]
    return Ladder(
        {name: np.array(values, float) for name, values in zip(("parameters", "replicas", "loss"), zip(*rows))}
    )


def noisy_losses(noise: float, seed: int = 0, constant: float = 0.0) -> Ladder:
    random = np.random.default_rng(seed)
    n, m = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e6, 1e9, 8), [1.0, 2.0, 4.0, 8.0]))
    loss = 20 * n**-0.1 * m**0.012 * np.exp(noise * random.standard_normal(len(n))) + constant
    return Ladder({"parameters": n, "replicas": m, "loss": loss})


def test_exponents_are_fitted_from_noisy_losses_and_intervals_cover_them() -> None:
    covered = 0
    for seed in range(10):
        ladder = noisy_losses(noise=0.004, seed=seed)
        law = fit(ladder, ["parameters", "replicas"])
        assert law.exponents[0] == pytest.approx(-0.1, rel=0.01)
        low, high = intervals(ladder, ["parameters", "replicas"], draws=60, seed=seed)["parameters"]
        covered += low <= -0.1 <= high
    assert covered >= 6


def test_one_outlier_hardly_moves_the_exponents() -> None:
    ladder = noisy_losses(noise=0.001)
    ladder.columns["loss"][5] *= 1.3
    assert fit(ladder, ["parameters", "replicas"]).exponents[0] == pytest.approx(-0.1, rel=0.01)


def test_a_constant_term_is_fitted() -> None:
    law = fit(noisy_losses(noise=0, constant=1.5).take(range(8)), ["parameters"], "constant")
    assert law.constant == pytest.approx(1.5, rel=1e-3) and law.exponents[0] == pytest.approx(-0.1, rel=1e-3)
    assert law.residual < 1e-5


def test_published_losses_give_the_published_joint_laws() -> None:
    """arXiv 2503.09799: A·N^a·M^b with 19.226, −.0985, .0116 (mean residual .0044); A·N^(α+βM) + C (.0025)."""
    power = fit(published_losses(), ["parameters", "replicas"])
    assert power.exponents == pytest.approx((-0.0985, 0.0116), abs=1e-3)
    assert power.coefficient == pytest.approx(19.226, rel=0.03) and power.residual == pytest.approx(0.0044, abs=3e-4)
    mixed = fit(published_losses(), ["parameters", "replicas"], "mixed")
    assert mixed.residual == pytest.approx(0.0025, abs=2e-4) and mixed.constant > 0.5
    assert hold_out(published_losses(), ["parameters", "replicas"], "mixed") < hold_out(
        published_losses(), ["parameters", "replicas"]
    )  # type: ignore[operator]


@pytest.mark.parametrize("place", range(4))
def test_published_losses_give_the_published_independent_laws(place: int) -> None:
    ladder = published_losses()
    law = fit(ladder.take(np.flatnonzero(ladder.columns["replicas"] == REPLICAS[place])), ["parameters"])
    assert law.exponents[0] == pytest.approx(LAWS["loss"][REPLICAS[place]].exponent, abs=1.1e-3)


# ---- density


def reference() -> Ladder:
    n = np.geomspace(1e6, 1e8, 5)
    return Ladder({"parameters": n, "tokens": 20 * n, "loss": 30 * (120 * n**2) ** -0.05})


def test_density_is_one_for_the_reference_and_two_for_half_the_tokens() -> None:
    assert density(reference(), reference()) == pytest.approx(1.0, rel=0.01)
    half = Ladder({name: values * (0.5 if name == "tokens" else 1.0) for name, values in reference().columns.items()})
    assert density(reference(), half) == pytest.approx(2.0, rel=0.01)


def test_published_data_parallel_losses_have_a_density_near_one() -> None:
    """Data-parallel losses of the paper, 35 M to 10 B. Their three digits are worth about 5 % of compute."""
    n = np.array(list(MEASURED))
    control = Ladder(
        {"parameters": n, "tokens": 20 * n, "loss": np.array([float(row[0] or 0) for row in MEASURED.values()])}
    )
    assert density(control, control) == pytest.approx(1.0, abs=0.2)


def test_density_is_not_extrapolated() -> None:
    beyond = Ladder({"parameters": np.array([1e9]), "tokens": np.array([2e10]), "loss": np.array([1.0])})
    assert np.isnan(density(reference(), beyond)).all()
    with pytest.raises(DataError, match="Add a column tokens"):
        density(reference(), Ladder({"parameters": np.array([1e9]), "loss": np.array([3.0])}))


# ---- refusals


def test_data_that_determine_no_law_are_refused() -> None:
    ladder = reference()
    with pytest.raises(DataError, match="vary only together"):
        fit(ladder, ["parameters", "tokens"])
    with pytest.raises(DataError, match="no column 'every'"):
        fit(ladder, ["every"])
    with pytest.raises(DataError, match="at least 3 are needed"):
        fit(ladder.take([0, 1]), ["parameters"], "constant")
    with pytest.raises(DataError, match="is the same in all runs"):
        fit(ladder.take([0, 0, 0]), ["parameters"])
    with pytest.raises(DataError, match="two variables are needed"):
        fit(ladder, ["parameters"], "mixed")
    with pytest.raises(DataError, match="finite numbers above 0"):
        Ladder({"loss": np.array([1.0, -2.0])})
    assert hold_out(ladder.take([0, 1]), ["parameters"]) is None


# ---- the command


def test_the_verb_prints_laws_intervals_and_densities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["method,parameters,tokens,replicas,loss"]
    for n in (1e6, 3e6, 1e7, 3e7, 1e8):
        for method, m, worse in (("data_parallel", 1, 1.0), ("diloco", 2, 1.01), ("diloco", 4, 1.02)):
            rows.append(f"{method},{n},{20 * n},{m},{worse * 30 * (120 * n**2) ** -0.05}")
    (tmp_path / "ladder.csv").write_text("\n".join(rows))
    assert (
        main(["plan", "fit", str(tmp_path / "ladder.csv"), "--draws", "16", "--reference", "data_parallel", "--json"])
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["variables"] == ["parameters", "replicas"]  # tokens are 20·N and so no variable of their own
    power = said["laws"][0]
    assert power["exponents"]["parameters"] == pytest.approx(-0.1, abs=1e-3) and power["hold_out"] < 0.01
    low, high = power["intervals"]["replicas"]
    assert low <= power["exponents"]["replicas"] <= high
    densities = [row["density"] for row in said["density"] if row["run"] == "diloco" and row["density"]]
    assert len(densities) >= 6 and max(densities) < 0.85


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "", "cannot be read as a ladder of runs (it has no rows)"),
        ("a.csv", "parameters,loss\n", "cannot be read as a ladder of runs (it has no rows)"),
        ("a.csv", "parameters,loss\n2,3,4\n1\n", "cannot be read as a ladder of runs (its rows have unlike columns)"),
        ("a.json", "[1]", "cannot be read as a ladder of runs (its rows have unlike columns)"),
        ("a.csv", f"parameters,loss\n{'1' * 140_000},2\n", "field larger than field limit"),
        ("a.csv", "parameters,loss\n1e6,2\n1e7,0\n", "finite numbers above 0"),
        ("a.csv", "parameters,loss\n1e6,2\n1e7,inf\n", "column 'loss' holds [inf]: finite numbers above 0"),
        (  # a fit, and no intervals
            "a.csv",
            "parameters,replicas,every,tokens,loss\n1,2,1,1,3\n2,1,1,1,4\n1,1,2,1,5\n1,1,1,2,6\n2,2,2,2,7\n",
            "5 runs are too few to draw from",
        ),
        ("a.csv", "parameters,loss\n1e6,2\n1e7,low\n", "no numbers in loss"),
        ("a.json", '[{"parameters": 1e6}]', "no numbers in loss"),
        ("a.json", "{", "cannot be read"),
        ("a.csv", "parameters,loss\n1e6,2\n1e6,2.1\n", "'parameters' is the same in all runs"),
        ("none.csv", None, "cannot be read"),
    ],
)
def test_invalid_ladder_files_are_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["plan", "fit", str(tmp_path / name)]) == (2 if text is None else 1)
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_more_draws_than_can_be_made_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("parameters,loss\n1e6,3\n1e7,2\n1e8,1.5\n")
    assert main(["plan", "fit", str(tmp_path / "a.csv"), "--draws", "1" + 20 * "0"]) == 1
    assert "10 to 100,000 draws" in capsys.readouterr().err
