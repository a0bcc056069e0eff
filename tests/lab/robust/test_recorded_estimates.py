"""Weights of replicas and estimates, bit by bit as recorded: replicas of other versions and machines must get the same."""

from __future__ import annotations

import hashlib

import pytest
import torch

from thinwire.catalogue.parsing import parse
from thinwire.exchange.products import inner_products
from thinwire.rng import Key, normals

SIZE, NUMEL = 7, 70_001
DUE = {
    "Krum(1)": "29294b7b",
    "MultiKrum(1)": "6db55c2f",
    "Bulyan(1)": "3aa43427",
    "MDA(1)": "6db55c2f",
    "GeometricMedian()": "05fe94d9",
    "CenteredClipping()": "cecdacc4",
    "CenteredClipping(200.0, 2)": "f6d11d5e",
    "FlagAggregator()": "1327ef2b",
    "FoolsGold()": "ed2a7455",
    "NearestNeighbourMixing(Median(), 2)": "51d35e16",
    "Bucketing(GeometricMedian(), 2)": "4d7e3c31",
    "StaticClipping(MeaMed(2), 200.0)": "8274b247",
    "ARC(TrimmedMean(2), 2)": "c5c82a78",
}


def vectors() -> torch.Tensor:
    """Values of different sizes that have more and more in common."""
    common = normals(1, 0, NUMEL)
    return torch.stack([(1 + rank / 4) * (rank / 6 * common + normals(2 + rank, 0, NUMEL)) for rank in range(SIZE)])


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:8]


@pytest.fixture(scope="module")
def products() -> torch.Tensor:
    return inner_products(vectors())


def test_inner_products_are_as_recorded(products):
    assert digest(products) == "6cb5585c"


@pytest.mark.parametrize("text", DUE)
def test_the_weights_of_replicas_are_as_recorded(text, products):
    rule = parse(text)
    assert rule.needs_products and digest(rule.mixing(products, Key(seed=1))) == DUE[text]


def test_the_flag_of_four_replicas_stops_early(products):
    assert digest(parse("FlagAggregator()").mixing(products[:4, :4], Key())) == "d016a104"
