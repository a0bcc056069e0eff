"""Attacks by themselves: what each asks for, its edges, and refused settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacks import Attack, Scene, hidden
from thinwire.rng import Key

HONEST = torch.tensor([[1.0, 2.0], [3.0, 2.0], [2.0, 5.0]])
SCENE = Scene(torch.tensor([1.0, -1.0]), HONEST, torch.tensor([7.0, 7.0]), Key(), 5, 2)


def needs(attack: Attack) -> str:
    return " ".join(
        name for name in ("spies", "flips_labels", "remembers", "sybils") if getattr(attack, name) is not False
    )


def test_each_attack_asks_for_what_it_needs():
    due = {
        **dict.fromkeys(["SignFlip()", "Gaussian()", "NotFinite()", "Switch()"], ""),
        **dict.fromkeys(["IPM()", "ALIE()", "Mimic()", "Dissensus()", "Switch(IPM())"], "spies"),
        **dict.fromkeys(["Replay()", "Switch(Replay())"], "remembers"),
        "LabelFlip()": "flips_labels",
        "Sybils()": "flips_labels sybils",
        "Sybils(IPM())": "spies sybils",
        "Sybils(Switch(Replay()))": "remembers sybils",
    }
    assert {text: needs(attack_of(text)) for text in due} == due
    assert needs(Attack()) == "" and Attack().says(SCENE) is SCENE.own


def test_attacks_match_values_by_hand():
    due = {
        "sign_flip": [-1.0, 1.0],
        "IPM(0.5)": [-1.0, -1.5],
        "ALIE(-1.5)": [3.5, 3 + 1.5 * 3**0.5],
        "mimic": [1.0, 2.0],
        "dissensus": [1.0 - 1.5 * 3 / 2, 2.0 - 1.5 * 3 / 2],
        "replay": [7.0, 7.0],
        "label_flip": [1.0, -1.0],
        "Switch(SignFlip(), 1)": [1.0, -1.0],
    }
    for text, said in due.items():
        assert attack_of(text).says(SCENE).tolist() == pytest.approx(said), text
    assert torch.isinf(attack_of("NotFinite('inf')").says(SCENE)).all()
    assert attack_of("Switch(SignFlip(), 1)").says(replace(SCENE, key=Key(round=1))).tolist() == [-1.0, 1.0]
    noise = attack_of("Gaussian(2.0)").says(replace(SCENE, own=torch.zeros(10_000)))
    assert float(noise.std()) == pytest.approx(2.0, rel=0.05)
    assert hidden(8, 2) == pytest.approx(0.0)
    with pytest.raises(ConfigurationError, match=r"lies"):
        attack_of("lies")


def test_hidden_lies_match_values_by_hand():
    """Φ⁻¹ of 7/12, 12/20, 24/38, 5/6, and of shares of 0 and 1, which have none."""
    sizes = ((15, 3), (25, 5), (50, 12), (11, 5), (10, 2), (2, 1), (4, 3), (5, 4))
    assert [round(hidden(*of), 3) for of in sizes] == [0.21, 0.253, 0.336, 0.967, 0.0, 0.0, 0.0, 0.0]
    said = attack_of("ALIE()").says(replace(SCENE, size=11, liars=5))
    assert said.tolist() == pytest.approx((HONEST.mean(0) - 0.9674 * HONEST.std(0)).tolist(), abs=1e-4)
    assert attack_of("ALIE()").says(replace(SCENE, honest=HONEST[:1])).tolist() == [1.0, 2.0]
    assert attack_of("ALIE()").says(replace(SCENE, honest=HONEST[:2], size=11, liars=5))[0] < 2.0


def test_attacks_follow_rounds_and_senders():
    # Of three honest replicas the fourth is the first, and the fifth the second.
    switch = attack_of("Switch(Mimic(4), 2)")
    said = [switch.says(replace(SCENE, key=Key(round=number))).tolist() for number in range(7)]
    assert said == [[1.0, -1.0]] * 2 + [[3.0, 2.0]] * 2 + [[1.0, -1.0]] * 2 + [[3.0, 2.0]]
    assert attack_of("Sybils(Replay())").says(SCENE).tolist() == [7.0, 7.0]
    keys = (Key(), Key(round=1), Key(sender=1), Key(seed=1))
    noise = {tuple(attack_of("Gaussian(2.0)").says(replace(SCENE, key=key)).tolist()) for key in keys}
    assert len(noise) == len(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Switch(LabelFlip())", "labels are flipped"),
        ("Switch(Sybils(SignFlip()))", r"Sybils\(Switch\(...\)\) is possible"),
        ("Switch(2)", r"such as SignFlip\(\)"),
        ("Switch(SignFlip(), 0)", "every is a number of rounds, 1 or more"),
        ("Switch(SignFlip(), 1.5)", "every is a number of rounds, 1 or more"),
    ],
)
def test_a_switch_that_could_not_lie_is_refused(text, said):
    with pytest.raises(ConfigurationError, match=said):
        attack_of(text)
