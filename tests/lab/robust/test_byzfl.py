"""Robust rules and attacks against the outputs of byzfl 0.0.11, recorded by tests/support/record_byzfl.py.

byzfl differs in two rules: Krum counts one more neighbour (M − f − 1), and MDA takes the first of equally narrow subsets.
byzfl has no Bulyan, no FoolsGold and no Flag Aggregator.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from aggregating import aggregated

from thinwire.catalogue.parsing import parse
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacks import Scene
from thinwire.lab.robust.by_products import krum_scores
from thinwire.lab.robust.products import squared_distances
from thinwire.rng import Key

CASES = json.loads(Path(__file__).with_name("byzfl.json").read_text())["cases"]
DIFFERENT = ("Krum(2)", "MultiKrum(2)", "MDA(2)")
SAME = [text for text in CASES[0]["rules"] if text not in DIFFERENT]


@pytest.mark.parametrize("text", SAME)
def test_rules_match_byzfl(text):
    for case in CASES:
        x, due = torch.tensor(case["vectors"]), torch.tensor(case["rules"][text])
        found = aggregated(parse(text), x)
        torch.testing.assert_close(found, due, rtol=2e-6, atol=2e-6)


def test_krum_with_one_more_neighbour_matches_byzfl():
    """byzfl's score is a mean of M − f − 1 squared distances: our score for one liar fewer."""
    for case in CASES:
        x = torch.tensor(case["vectors"])
        scores = krum_scores(squared_distances(x.double() @ x.double().T), range(len(x)), 1)
        order = sorted(range(len(x)), key=scores.__getitem__)
        torch.testing.assert_close(x[order[0]], torch.tensor(case["rules"]["Krum(2)"]))
        torch.testing.assert_close(x[order[:9]].mean(0), torch.tensor(case["rules"]["MultiKrum(2)"]))


def test_mda_matches_byzfl_up_to_ties():
    for case in CASES:
        x = torch.tensor(case["vectors"])
        squared = squared_distances(x.double() @ x.double().T)
        widths = {s: max(squared[i][j] for i, j in combinations(s, 2)) for s in combinations(range(len(x)), 9)}
        least = min(widths.values())
        means = [x[list(s)].mean(0) for s, width in widths.items() if width <= least * (1 + 1e-9)]
        for found in (torch.tensor(case["rules"]["MDA(2)"]), aggregated(parse("MDA(2)"), x)):
            assert any(torch.allclose(found, mean, atol=1e-5) for mean in means)


@pytest.mark.parametrize("text", list(CASES[0]["attacks"]))
def test_attacks_match_byzfl(text):
    for case in CASES:
        honest = torch.tensor(case["vectors"])[:-2]
        said = attack_of(text).says(Scene(honest[0], honest, honest[0], Key(), 11, 2))
        torch.testing.assert_close(said, torch.tensor(case["attacks"][text]), rtol=1e-5, atol=1e-6)
