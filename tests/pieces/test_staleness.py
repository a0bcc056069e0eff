"""The weight and the correction of late deltas, against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.pieces.staleness import Alike, ByTokens, HeLoCo

DELTA, BACK = torch.tensor([-3.0, 1.0]), torch.tensor([2.0, 0.0])


def test_weights_depend_on_tokens_and_age() -> None:
    assert [ByTokens(1.0).weight(*of) for of in ((40, 4, 0), (40, 4, 1), (40, 4, 3), (40, 0, 0))] == [
        400,
        200,
        100,
        1600,
    ]
    assert ByTokens(0.0).weight(40, 4, 9) == 400 and Alike().weight(40, 4, 9) == 1
    for power in (-0.1, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="power >= 0 is needed"):
            ByTokens(power)


def test_values_against_the_momentum_shrink_by_age_and_strength() -> None:
    for strength, stale, left in ((1.0, 1, -1.5), (1.0, 3, -0.75), (0.5, 1, -2.25)):
        for momentum in (BACK, BACK / 4):
            assert HeLoCo(strength).corrected(DELTA, momentum, stale).tolist() == [left, 1.0]
    assert DELTA.tolist() == [-3.0, 1.0]


def test_a_delta_that_needs_no_correction_is_returned_unchanged() -> None:
    endless = torch.tensor([math.inf, 0.0])
    for momentum, stale, strength in (
        (BACK, 0, 1.0), (None, 1, 1.0), (BACK, 1, 0.0), (-BACK, 1, 1.0), (-BACK / 32, 1, 1.0), (torch.tensor([1.0, 3.0]), 1, 1.0),
        (torch.tensor([0.0, 0.0]), 1, 1.0), (endless, 1, 1.0),
    ):  # fmt: skip
        assert HeLoCo(strength).corrected(DELTA, momentum, stale) is DELTA
    for strength in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigurationError, match="a strength from 0 to 1 is needed"):
            HeLoCo(strength)
