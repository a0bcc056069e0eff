"""Robust rules under attacks against a table that was computed with other code.

15 replicas of which 3 lie, 200 values. The honest replicas have a common vector of norm 1 and noise of norm 1.5. An entry is
‖estimate − honest mean‖ / ‖honest mean‖.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aggregating import aggregated
from torch import Tensor

from thinwire.catalogue.parsing import parse
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacks import Scene
from thinwire.rng import Key

RULES = (
    "Mean()",
    "Median()",
    "TrimmedMean(3)",
    "Krum(3)",
    "MultiKrum(3)",
    "GeometricMedian()",
    "CenteredClipping(2.0, 3)",
    "Bulyan(3)",
)
TABLE = {
    "IPM(1.0)": (0.40, 0.46, 0.40, 1.2, 0, 0.33, 0.40, 0.61),
    "IPM(0.1)": (0.22, 0.40, 0.30, 1.1, 0.33, 0.33, 0.22, 0.65),
    "IPM(2.0)": (0.60, 0.48, 0.45, 1.2, 0, 0.33, 0.45, 0.54),
    "ALIE()": (0.056, 0.26, 0.14, 0.28, 0.16, 0.28, 0.056, 0.29),
    "Gaussian(10.0)": (15, 0.45, 0.32, 1.2, 0, 0.19, 0.25, 0.47),
    "Mimic()": (0.25, 0.49, 0.36, 1.2, 0.37, 0.39, 0.25, 0.91),
    "1e6": (2.5e6, 0.51, 0.54, 1.2, 0, 0.33, 0.44, 0.57),
}


def vectors(attack: str) -> tuple[Tensor, Tensor]:
    chance = np.random.default_rng(1)
    common = chance.normal(size=200)
    honest = torch.tensor(
        common / np.linalg.norm(common) + 1.5 / np.sqrt(200) * chance.normal(size=(12, 200)), dtype=torch.float32
    )
    if attack.startswith("Gaussian"):
        lies = torch.tensor(10 * chance.normal(size=(3, 200)), dtype=torch.float32)
    elif attack == "1e6":
        lies = torch.full((3, 200), 1e6)
    else:
        lies = attack_of(attack).says(Scene(honest[0], honest, honest[0], Key(), 15, 3)).repeat(3, 1)
    return honest, torch.cat([honest, lies])


@pytest.mark.parametrize("attack", TABLE)
def test_errors_match_the_table(attack):
    honest, x = vectors(attack)
    mean = honest.mean(0)
    for rule, due in zip(RULES, TABLE[attack]):
        found = float((aggregated(parse(rule), x) - mean).norm() / mean.norm())
        if attack.startswith("Gaussian"):  # the table was made with other draws of the noise
            assert found == pytest.approx(due, rel=0.25, abs=0.06), rule
        else:
            assert float(f"{found:.2g}") == pytest.approx(due, abs=1e-6), rule


def test_krum_may_choose_the_attacker():
    """Where honest replicas differ much, a small lie is nearest to all of them."""
    honest, x = vectors("IPM(0.1)")
    assert float(torch.cosine_similarity(aggregated(parse("Krum(3)"), x), honest.mean(0), 0)) == pytest.approx(
        -1.0, abs=1e-5
    )
