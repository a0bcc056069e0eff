"""The published scaling laws against the published tables, and their warnings outside the fitted range."""

from __future__ import annotations

import math

import pytest
from published_losses import MEASURED

from thinwire.app.plan import expected, scaling
from thinwire.app.plan.scaling import FITTED, JOINT, LAWS, REPLICAS, outer_lr, predict
from thinwire.errors import ConfigurationError


@pytest.mark.parametrize("parameters", [n for n in MEASURED if n <= FITTED[1]])
def test_predicted_losses_are_within_one_percent_of_the_fitted_ones(parameters: float) -> None:
    for replicas, measured in zip((None, *REPLICAS), MEASURED[parameters]):
        assert measured is not None
        assert predict("loss", parameters, replicas).value == pytest.approx(measured, rel=0.009)
        assert not predict("loss", parameters, replicas).warnings


def test_losses_at_2_4_and_10_billion_have_the_recorded_digits() -> None:
    """By the coefficients of the table. M = 2 and M = 4 cross data-parallel between the two sizes."""
    at = {n: [round(predict("loss", n, m).value, 3) for m in (None, 1, 2, 4, 8)] for n in (2.4e9, 10e9)}
    assert at == {2.4e9: [2.314, 2.304, 2.315, 2.319, 2.335], 10e9: [2.020, 2.009, 2.016, 2.013, 2.020]}


def test_ten_billion_parameters_give_a_warning() -> None:
    pairs = [(predict("loss", 10e9, m).value, loss) for m, loss in zip(REPLICAS, MEASURED[10e9][1:])]
    assert 0.03 < max(abs(value / loss - 1) for value, loss in pairs if loss is not None) < 0.05
    assert [w.name for w in predict("loss", 10e9, 2).warnings] == ["parameters-outside-fit"]


def test_the_batch_law_agrees_with_both_versions_of_the_paper() -> None:
    """Version 1 counts sequences of 2,048 tokens, version 2 tokens. 0.47 M tokens at 2.4 B and M = 2."""
    assert JOINT["batch_tokens"].coefficient / 2048 == pytest.approx(0.00709, rel=1e-3)
    in_sequences = (0.22592, 0.01361, 0.00769, 0.00535, 0.01859)
    assert [law.coefficient / 2048 for law in LAWS["batch_tokens"].values()] == pytest.approx(in_sequences, rel=2e-3)
    assert predict("batch_tokens", 2.4e9, 2, "joint").value == pytest.approx(0.466e6, rel=2e-3)


def test_the_independent_learning_rate_of_eight_replicas_is_far_from_the_joint_law() -> None:
    """The published coefficients say so. A plan therefore takes the joint law."""
    independent, joint = (predict("learning_rate", 2.4e9, 8, fit).value for fit in ("independent", "joint"))
    assert joint / independent > 7 and joint == pytest.approx(2.15e-4, rel=0.01)


@pytest.mark.parametrize("quantity", ["loss", "learning_rate", "batch_tokens"])
def test_predictions_between_the_fitted_replica_counts_are_monotone(quantity: scaling.Quantity) -> None:
    values = [predict(quantity, 1e9, m).value for m in (2, 3, 4)]
    assert min(values[0], values[2]) <= values[1] <= max(values[0], values[2])
    assert predict(quantity, 1e9, 16).warnings[0].name == "replicas-outside-fit"
    assert predict("loss", 1e9, 16).value > predict("loss", 1e9, 8).value


def test_outer_learning_rates_are_those_of_the_paper() -> None:
    assert [outer_lr(m).value for m in (1, 2, 3, 4, 8)] == [0.4, 0.6, 0.6, 0.6, 0.8]
    assert outer_lr(8).warnings == () and outer_lr(20).warnings


@pytest.mark.parametrize("given", [(0, 2), (-1e9, 2), (math.nan, 2), (math.inf, 2), (1e9, 0)])
def test_invalid_sizes_and_replica_counts_are_refused(given: tuple[float, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be more than 0"):
        predict("loss", *given)


@pytest.mark.parametrize(
    ("parameters", "replicas", "every", "published"),
    [(1e9, 2, 30, 2.48), (1e9, 2, 100, 2.50), (1e9, 4, 30, 2.50), (1e9, 4, 100, 2.53), (500e6, 4, 100, 2.73)],
)
def test_ratios_to_data_parallel_match_another_paper(
    parameters: float, replicas: int, every: int, published: float
) -> None:
    """Streaming DiLoCo on C4, tables 5 and 6, against the data-parallel loss of that paper (2.49, 2.67): within 1 %."""
    control = {1e9: 2.49, 500e6: 2.67}[parameters]
    tokens = 20 * parameters
    ours = expected.loss("streaming_diloco", parameters, replicas, every, 1, tokens).value
    ours /= expected.loss("data_parallel", parameters, replicas, 1, 0, tokens).value
    assert ours == pytest.approx(published / control, rel=0.01)


def test_density_is_one_for_data_parallel_and_falls_with_the_period() -> None:
    assert expected.density("data_parallel", 1e9, 4, 1, 0) == pytest.approx(1.0)
    falling = [expected.density("streaming_diloco", 1e9, 4, every, 1) for every in (30, 60, 100, 300)]
    assert falling == sorted(falling, reverse=True) and falling[0] < 1
    assert expected.density("eager_diloco", 1e9, 4, 100, 100) < expected.density("streaming_diloco", 1e9, 4, 100, 1)


@pytest.mark.parametrize(
    ("parameters", "short", "long", "one_step"),
    [(35e6, 3.62, 3.62, 3.53), (500e6, 2.71, 2.71, 2.67), (1e9, 2.50, 2.52, 2.48)],
)
def test_the_loss_of_eager_updates_matches_their_table_at_both_periods(
    parameters: float, short: float, long: float, one_step: float
) -> None:
    """Losses on C4 at H = 30 and 100, against a delay of one step at H = 30. They are printed to 0.01, which is 0.4 %."""
    tokens = 20 * parameters
    base = expected.loss("streaming_diloco", parameters, 2, 30, 1, tokens).value
    for every, printed in ((30, short), (100, long)):
        ours = expected.loss("eager_diloco", parameters, 2, every, every, tokens).value / base
        assert ours == pytest.approx(printed / one_step, abs=0.0025)


def test_settings_that_were_never_measured_have_warnings() -> None:
    names = [w.name for w in expected.loss("sparse_loco", 5e5, 2, 500, 0, 1e6).warnings]
    assert names == [
        "parameters-outside-fit",
        "every-outside-fit",
        "sparse_loco-unfitted",
        "tokens-per-parameter-outside-fit",
    ]
    assert "delay-outside-fit" in [w.name for w in expected.loss("streaming_diloco", 1e9, 2, 100, 30, 2e10).warnings]
