"""docs/formats.md says what benchmarks/formats.py finds: what is drawn is computed again."""

from __future__ import annotations

import json

import formats
import pytest
from pages import ROOT

from thinwire.catalogue.parsing import parse

RESULT = json.loads((ROOT / "benchmarks/results/formats.json").read_text())


@pytest.fixture(scope="module")
def drawn():
    return formats.drawn()


def test_every_format_is_in_the_result():
    assert [row["codec"] for row in RESULT["rows"]] == [
        repr(codec) for some in formats.FORMATS.values() for codec in some
    ]
    assert RESULT["setting"]["numel"] == formats.NUMEL


@pytest.mark.parametrize("place", range(len(RESULT["rows"])), ids=lambda place: RESULT["rows"][place]["codec"])
def test_the_result_is_what_codecs_do(place, drawn):
    """Each on one of the distributions, in turn."""
    row = RESULT["rows"][place]
    name = list(drawn)[place % len(drawn)]
    found = formats.measure(parse(row["codec"]), drawn[name])
    assert (found is None) == (row["data"][name] is None)
    if found:
        assert found == pytest.approx(row["data"][name], rel=1e-5, abs=1e-9)
