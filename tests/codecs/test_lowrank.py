"""The defaults of LowRank, and its claims: those of its inner codec where no matrix gets smaller, otherwise fewer."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.errors import ConfigurationError

LARGE, SMALL = ((32, 32), (8,)), ((4, 4), (8,))


def test_the_default_is_rank_4_with_two_iterations() -> None:
    low_rank = tw.codecs.LowRank()
    assert low_rank == tw.codecs.LowRank(4, 2, tw.codecs.Identity())
    assert low_rank.fitted(LARGE).nbytes(32 * 32 + 8) == 4 * (4 * 32 + 4 * 32 + 8)
    assert low_rank.fitted(SMALL).nbytes(4 * 4 + 8) == 4 * (4 * 4 + 8)
    for numbers in ((0,), (4, 0)):
        with pytest.raises(ConfigurationError, match="at least 1 is needed of both"):
            tw.codecs.LowRank(*numbers)


def test_claims_depend_on_whether_a_matrix_gets_smaller() -> None:
    signs = tw.codecs.LowRank(values=tw.codecs.Sign())
    assert signs.fitted(SMALL).claims == signs.claims == {"contractive"}
    assert signs.fitted(LARGE).claims == {"contractive", "drawn", "shared"}
    assert tw.codecs.LowRank().fitted(SMALL).claims == {"exact", "odd", "contractive", "idempotent"}
