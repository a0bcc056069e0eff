"""Kernels that add: values at their places, and to parameters at a landing."""

from __future__ import annotations

import pytest
import torch

from thinwire.kernels import cpu_block as cpu
from thinwire.kernels import reference
from thinwire.testing.toy import same_bits
from thinwire.testing.values import EXTREME, NORMAL, SIZES, draw, gaussian


@pytest.mark.parametrize("data", [*NORMAL, *EXTREME])
def test_a_landing_matches_the_formula(data):
    for n in SIZES:
        x, before, change, after = gaussian(n), gaussian(n), draw(data, n) / 4, gaussian(n)
        for module in (cpu, reference):
            own = x.clone()
            module.carry(own, before, change, after)
            assert same_bits(own, x + (after - (before - change)))


@pytest.mark.parametrize("first", [0, 70])
def test_values_are_added_at_their_places(first):
    index, values, x = torch.tensor([70, 71, 90]), torch.tensor([1.0, -2.0, 0.5]), gaussian(100)
    due = x.clone()
    due[index - first] += values
    for module in (cpu, reference):
        out = x.clone()
        module.add_at(index, values, out, first)
        assert same_bits(out, due)
