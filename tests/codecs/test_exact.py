"""Sums in a fixed order and products of rounded numbers, against values by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs.exact import energy, product, summed, total

E = 2.0**-53  # 1 + E is 1, but 1 + 2·E is not


@pytest.mark.parametrize(
    ("rows", "due"),
    [
        ([], 0.0),
        ([3.0], 3.0),
        ([1.0, E, E], 1.0),
        ([1.0, E, 0, E], 1 + 2 * E),
        ([1.0, 0, E, E], 1.0),
        ([E, 1.0, 1.0, E], 2.0),
        ([1.0, E, 0, 0, E], 1 + 2 * E),
        ([1.0, 0, E, 0, E], 1.0),
    ],
)
def test_the_second_half_is_added_to_the_first(rows, due):
    assert total(torch.tensor(rows, dtype=torch.float64)).item() == due


def test_runs_of_2_to_the_20_elements_are_added_from_first_to_last():
    run = 1 << 20
    x = torch.zeros(2 * run)
    x[0] = 1
    assert summed(x) == energy(x) == 1 and summed(x[:0]) == energy(x[:0]) == 0
    assert summed(torch.tensor([1.0, -3.0])) == -2 and energy(torch.tensor([1.0, -3.0])) == 10
    x[[run - 1, 2 * run - 1]] = E
    assert summed(x) == 1, "they are of two runs"
    x[[run // 2 - 1, run - 1]], x[2 * run - 1] = E, 0
    assert summed(x) == 1 + 2 * E, "they are of one run, and are added to each other first"


@pytest.mark.parametrize(
    ("k", "bits"), [(1, 26), (2, 25), (3, 25), (4, 25), (5, 24), (16, 24), (17, 23), (64, 23), (65, 22)]
)
def test_factors_of_a_product_are_rounded_to_the_documented_bits(k, bits):
    a, b = torch.zeros(1, k).double(), torch.zeros(k, 1).double()
    for x, y in ((a, b), (b, a)):
        y.view(-1)[0] = 1
        for value, due in ((1 + 2.0 ** (1 - bits), 1 + 2.0 ** (1 - bits)), (1 + 2.0**-bits, 1.0)):
            x.view(-1)[0] = value
            assert product(a, b).item() == due
        a.zero_(), b.zero_()
