"""What codecs declare, the parts of their payloads, their defaults and other forms, by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import E2M1, E3M0, E4M3, E5M2, Cast, Codebook, Identity, Int, Sign, TopK
from thinwire.codecs.cast import Dense, in_full
from thinwire.codecs.layout import Symbols
from thinwire.errors import ConfigurationError
from thinwire.lab.codecs.over_senders import OverSenders
from thinwire.lab.codecs.uniform import Levels
from thinwire.testing.values import encoded, roundtrip


def test_codecs_have_the_documented_defaults():
    assert [str(codec) for codec in (E3M0(), E2M1(), E4M3(), E5M2())] == [
        f"{name}(block=128, scale='exponent', rounding='nearest')" for name in ("E3M0", "E2M1", "E4M3", "E5M2")
    ]
    assert [str(codec) for codec in (Int(), Sign(), Levels(), Cast(), Identity(), Dense(), Codebook())] == [
        "Int(bits=8, block=128, scale='exponent', rounding='nearest')",
        *("Sign(scale='mean', block=None)", "Levels(bits=4, block=512)", "Cast(dtype='bf16')"),
        *("Identity()", "Dense(grain=1)", "Codebook()"),
    ]


@pytest.mark.parametrize(
    ("codec", "grain", "parts"),
    [
        (Identity(), 1, [(68, 4)]),
        (Dense(32), 32, [(68, 4)]),
        (Cast(), 1, [(34, 2)]),
        (Sign(), None, [(3, 1), (4, 4)]),
        (Sign(block=12), 24, [(3, 1), (8, 4)]),
        (Sign("l2", 33), 264, [(3, 1), (4, 4)]),
        (Levels(3, 8), 8, [(7, 1), (24, 4)]),
        (Levels(4, 16), 16, [(9, 1), (16, 4)]),
        (Codebook(), None, [(21, 1)]),
        (E3M0(2), 2, [(9, 1), (9, 1)]),
        (E3M0(2, rounding="stochastic"), None, [(9, 1), (9, 1)]),
        (Int(8, 5, "bf16"), 5, [(17, 1), (8, 2)]),
        (Int(2, 16, "fp32"), 16, [(5, 1), (8, 4)]),
        (OverSenders(Int(2, 16, "fp32")), 16, [(5, 1), (8, 4)]),
    ],
    ids=str,
)
def test_17_values_have_the_parts_of_the_documented_layout(codec, grain, parts):
    assert codec.layout(17) == tuple(Symbols(*part) for part in parts) and codec.grain == grain
    assert codec.nbytes(17) == sum(nbytes for nbytes, _ in parts) and codec.nbytes(0) == 0
    assert not any(part.nbytes for part in codec.layout(0))


VALUES = {"odd", "contractive", "idempotent", "local"}


@pytest.mark.parametrize(
    ("codec", "claims", "declared"),
    [
        (Identity(), {"exact", *VALUES}, "any_device all_reduced"),
        (Dense(2), {"exact", *VALUES}, "any_device"),
        (Cast("fp16"), VALUES, "any_device all_reduced"),
        (E3M0(), {"odd", "contractive", "local"}, "any_device biased"),
        (Int(4, rounding="stochastic"), {"odd", "unbiased", "local"}, "any_device"),
        (Sign(), {"contractive"}, "any_device biased"),
        (Sign("l2"), set(), "any_device biased"),
        (Sign("l2", 2), {"local"}, "any_device biased"),
        (Levels(), {"idempotent", "local"}, "biased"),
        (Codebook(), {"contractive"}, "biased"),
        (OverSenders(Int(4)), {"odd", "contractive"}, "joint"),
        (OverSenders(TopK()), TopK().claims, "joint"),
    ],
    ids=lambda one: "" if isinstance(one, set | frozenset) else str(one),  # a set has no order
)
def test_codecs_declare_what_they_can(codec, claims, declared):
    names = ("any_device", "biased", "all_reduced", "joint", "varies", "needs_shapes", "linear", "samples")
    assert codec.claims == claims and " ".join(name for name in names if getattr(codec, name)) == declared
    assert codec.needs_fixed_group.startswith("divides by those who sent a value") == codec.joint


def test_in_full_keeps_the_grain_of_the_codec():
    assert [in_full(E3M0(block)) for block in (2, 32)] == [Dense(2), Dense(32)]
    assert in_full(TopK()) == in_full(Identity()) == Identity()


@pytest.mark.parametrize(
    ("codec", "forms"),
    [
        (Int(8, 128), [(8, 32), (8, 512), *((bits, block) for bits in (4, 2) for block in (32, 128, 512))]),
        (Int(2, 4), [(bits, block) for bits in (8, 4, 2) for block in (4, 16) if (bits, block) != (2, 4)]),
        (Int(4, 16), [(bits, block) for bits in (8, 4, 2) for block in (4, 16, 64) if (bits, block) != (4, 16)]),
        (Int(8, 1), [(8, 4), (4, 4), (2, 4)]),
        (Int(8, 6), [(8, 24), (4, 6), (4, 24), (2, 24)]),
    ],
    ids=str,
)
def test_other_forms_of_int_have_other_bits_and_a_quarter_or_four_times_the_block(codec, forms):
    """A block has whole bytes of codes."""
    assert [(form.bits, form.block) for form in codec.forms()] == forms


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((E3M0, {"block": block}) for block in (3, 0, -2)),
        (E4M3, {"block": 0}),
        (Int, {"bits": 2, "block": 6}),
        *((E2M1, {"scale": scale, "rounding": rounding}) for scale, rounding in (("fp16", "nearest"), ("fp32", "up"))),
        *((Sign, {"block": block}) for block in (0, -1)),
        *((Levels, wrong) for wrong in ({"block": 9}, {"block": 0}, {"bits": 9}, {"bits": 0})),
        (Cast, {"dtype": "fp32"}),
    ],
)
def test_invalid_settings_are_refused_with_what_was_given_and_what_is_needed(kind, wrong):
    with pytest.raises(ConfigurationError, match=rf"^{kind.__name__}\(.*needed") as caught:
        kind(**wrong)
    assert any(f"{name}={value!r}" in str(caught.value) for name, value in wrong.items())


def test_the_least_settings_are_accepted():
    x = torch.tensor([3.0, -1.0, 0.5])
    assert roundtrip(Sign(block=1), x).equal(x) and roundtrip(E4M3(1, "fp32"), x).equal(x)
    assert roundtrip(Levels(1, 8), x).tolist() == [3.0, -1.0, -1.0]


def test_codes_of_a_codebook_by_hand():
    """Two values are 0.47 steps from their mean; equal values are in the third bin, and no other bin has a value."""
    assert roundtrip(Codebook(), torch.tensor([1.0, -1.0])).tolist() == [0.0, 0.0]
    many = torch.tensor([1.0, -1.0]).repeat(50)
    assert roundtrip(Codebook(), many).equal(many), "0.66 steps"
    packet = encoded(Codebook(), torch.full((4,), 0.5))
    assert packet == bytes([0xAA]) + torch.tensor([0, 0, 0.5, 0]).numpy().tobytes()
