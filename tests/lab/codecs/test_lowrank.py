"""The defaults of LowRank, and its claims: those of its inner codec where no matrix gets smaller, otherwise fewer."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigurationError
from thinwire.rng import Key, draw

LARGE, SMALL = ((32, 32), (8,)), ((4, 4), (8,))


def test_the_default_is_rank_4_with_two_iterations() -> None:
    low_rank = tw.lab.codecs.LowRank()
    assert low_rank == tw.lab.codecs.LowRank(4, 2, tw.codecs.Identity())
    assert low_rank.linear and low_rank.needs_shapes and low_rank.biased
    assert low_rank.fitted(LARGE).nbytes(32 * 32 + 8) == 4 * (4 * 32 + 4 * 32 + 8)
    assert low_rank.fitted(SMALL).nbytes(4 * 4 + 8) == 4 * (4 * 4 + 8)
    for numbers in ((0,), (4, 0)):
        with pytest.raises(ConfigurationError, match="at least 1 is needed of both"):
            tw.lab.codecs.LowRank(*numbers)


def test_claims_depend_on_whether_a_matrix_gets_smaller() -> None:
    signs = tw.lab.codecs.LowRank(values=tw.codecs.Sign())
    assert signs.fitted(SMALL).claims == signs.claims == {"contractive"}
    assert signs.fitted(LARGE).claims == {"contractive", "drawn", "shared"}
    assert tw.lab.codecs.LowRank().fitted(SMALL).claims == {"exact", "odd", "contractive", "idempotent"}
    drawn = tw.lab.codecs.LowRank(values=tw.codecs.Int(8, 8, "fp32", "stochastic"))
    assert drawn.fitted(LARGE).claims == {"odd", "drawn"}, "the product of unbiased factors is not unbiased"


def test_other_forms_have_half_to_twice_the_rank() -> None:
    assert [[form.rank for form in tw.lab.codecs.LowRank(rank).forms()] for rank in (1, 2, 5)] == [
        [2],
        [1, 3, 4],
        [2, 3, 4, 6, 7, 8, 9, 10],
    ]


def test_a_warm_start_keeps_directions_alone_and_replaces_zero_columns() -> None:
    """The kept values are Q of all matrices. A power of two in them changes no bit, and the codec stays equal to one without them."""
    cold, key = tw.lab.codecs.LowRank(2, shapes=((6, 8), (5,), (9, 7))), Key(round=3)
    x = torch.linspace(-1, 2, 6 * 8 + 5 + 9 * 7).sin()
    first, last = cold.project(x, (), key), torch.linspace(1, 3, 2 * (8 + 7)).cos()
    assert cold.remembered(len(x)) == len(last) and cold.sizes(len(x)) == (2 * (6 + 9), len(last) + 5)
    assert cold.warmed(torch.zeros(30)).project(x, (), key).equal(first)
    assert cold.warmed(last) == cold and str(cold.warmed(last)) == str(cold)
    warm = cold.warmed(last).project(x, (), key)
    assert cold.warmed(last * 2.0**-70).project(x, (), key).equal(warm) and not warm.equal(first)
    eyes, signs = (
        torch.cat([torch.eye(8).view(-1), torch.eye(9).view(-1)]),
        draw(key.shared("factors"), 0, 2 * 17).sign(),
    )
    assert cold.fitted(((8, 8), (9, 9))).project(eyes, (), key).equal(signs.float()), "with the identity, Q itself"
    last[::2] = 0  # the first column of each Q
    half = cold.warmed(last).project(x, (), key)
    assert half[::2].equal(first[::2]) and half[1::2].equal(warm[1::2])
