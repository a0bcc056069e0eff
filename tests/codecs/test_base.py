"""The base of all codecs: declared claims, the check of buffers, and the sizes of payloads."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
import torch
from pieces import CODECS

import thinwire as tw
from thinwire.codecs import warm_up
from thinwire.codecs.base import Codec, chance, check_fit, check_inner, nested, rebuilt
from thinwire.codecs.layout import Places, Symbols
from thinwire.errors import ConfigurationError

UNBIASED = tw.codecs.E3M0(rounding="stochastic")
SHARED = tw.codecs.RandomK(0.5, tw.codecs.Identity())


def test_codecs_are_biased_unless_their_row_claims_unbiased():
    assert tw.lab.codecs.Levels().biased and tw.codecs.Sign().biased and tw.codecs.TopK(0.1).biased
    assert not any(codec.biased for row in CODECS if "unbiased" in row.claims for codec in nested(row.piece))


@pytest.mark.parametrize(
    ("parts", "own", "fair", "due"),
    [
        ([tw.codecs.Identity()], "", True, ""),
        ([tw.lab.codecs.Levels()], "", True, ""),
        ([UNBIASED], "", True, "unbiased"),
        ([UNBIASED], "", False, "drawn"),
        ([UNBIASED, tw.codecs.Identity()], "", True, "unbiased"),
        ([UNBIASED, tw.lab.codecs.Levels()], "", True, "drawn"),
        ([UNBIASED, SHARED], "", True, "unbiased"),
        ([SHARED], "", True, "shared unbiased"),
        ([tw.codecs.Identity()], "unbiased", True, "shared unbiased"),
        ([tw.lab.codecs.Levels()], "unbiased", True, "drawn shared"),
        ([tw.codecs.Identity()], "drawn", True, "drawn shared"),
        ([UNBIASED], "drawn", True, "unbiased"),
        ([UNBIASED], "unbiased", True, "unbiased"),
        ([tw.codecs.Identity()], "unbiased", False, "drawn shared"),
    ],
    ids=str,
)
def test_the_random_claims_of_a_codec_around_others(parts, own, fair, due):
    assert chance(parts, own, fair) == set(due.split())


GOOD = torch.zeros(16), torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("values", "payload"),
    [
        (GOOD[0].double(), GOOD[1]),
        (GOOD[0].view(4, 4), GOOD[1]),
        (GOOD[0], GOOD[1].view(torch.int8)),
        (GOOD[0], GOOD[1][1:]),
        (GOOD[0], GOOD[1].view(4, 4)),
        (GOOD[0], GOOD[1].to("meta")),
    ],
    ids=["fp64", "values of two dimensions", "signed", "too short", "a payload of two dimensions", "another device"],
)
def test_buffers_that_do_not_fit_are_refused(values, payload):
    codec = tw.lab.codecs.Levels(bits=4, block=16)
    assert codec.nbytes(16) == 16
    check_fit(codec, *GOOD)
    check_fit(codec, GOOD[0], GOOD[1][1:], shorter=True)
    with pytest.raises(ConfigurationError, match=r"^Levels\(bits=4, block=16\): "):
        check_fit(codec, values, payload)


@pytest.mark.parametrize("payload", [torch.zeros(17), torch.zeros(3, 5), torch.zeros(1, 16)], ids=str)
def test_only_a_flat_and_shorter_payload_is_accepted_as_shorter(payload):
    with pytest.raises(ConfigurationError, match="flat fp32 and flat uint8 of 16 bytes are needed"):
        check_fit(tw.lab.codecs.Levels(bits=4, block=16), GOOD[0], payload.byte(), shorter=True)


def test_the_parts_of_a_layout_add_up_to_the_payload():
    for row in CODECS:
        for codec in nested(row.piece):
            for numel in (1, 7, 64, 1000) if not codec.varies else ():
                assert sum(part.nbytes for part in codec.layout(numel)) == codec.nbytes(numel), (codec, numel)


def test_an_index_has_the_bits_that_the_largest_one_needs():
    assert [Places(64, chunk, 1).width for chunk in (1, 2, 3, 4, 5, 8, 9)] == [1, 1, 2, 2, 3, 3, 4]
    assert [Places(numel, 4, 3).kept for numel in (4, 8, 9, 10, 11)] == [3, 6, 7, 8, 9]


def test_payload_sizes_match_values_by_hand():
    sign, codebook = tw.codecs.Sign(block=16), tw.codecs.Codebook()
    assert [sign.nbytes(numel) for numel in (1, 16, 17)] == [1 + 4, 2 + 4, 3 + 8]
    assert [codebook.nbytes(numel) for numel in (0, 1, 64)] == [0, 1 + 16, 16 + 16]


class Noted:
    """A codec whose form within half of its bytes, and within all of them, is itself. It notes what it codes."""

    def __init__(self, share=None, heard=None):
        self.share, self.heard = share, [] if heard is None else heard

    def fitted(self, shapes):
        self.heard.append(shapes)
        return self

    def within(self, share, numel):
        assert numel == 1 << 16
        return self if share in (0.5, 1.0) else Noted(share, self.heard)

    def nbytes(self, numel):
        return numel

    def encode(self, values, payload, key):
        assert values.numel() == payload.numel() == 1 << 16
        self.heard.append(self.share)

    def decode_add(self, payload, into, key):
        self.heard.append((self.share, into.numel()))


def test_each_form_of_a_codec_is_warmed_up_once():
    """All branches need 65,536 values to be compiled, of a fragment with a matrix of 256 by 256; forms within an eighth of its bytes, and so on."""
    codec = Noted()
    warm_up(codec)
    forms = [share for share in (*(eighth / 8 for eighth in range(8) if eighth != 4), None)]
    assert codec.heard == [((256, 256),), *(one for share in forms for one in (share, (share, 1 << 16)))]
    heard = len(codec.heard)
    warm_up(codec)
    assert len(codec.heard) == heard


class Least(Codec):
    """A codec that defines only what it must."""

    def nbytes(self, numel):
        return numel

    def encode(self, x, payload, key):
        raise NotImplementedError

    def decode_add(self, payload, out, key, weight=1.0):
        raise NotImplementedError


def test_undeclared_properties_of_a_codec_have_defaults():
    least, last = Least(), torch.zeros(1)
    assert (least.claims, least.grain, least.biased, least.needs_fixed_group) == (frozenset(), None, True, "")
    declared = (least.any_device, least.samples, least.varies, least.needs_shapes, least.sparse, least.joint)
    assert (*declared, least.linear, least.all_reduced) == (False,) * 8
    assert least.fitted(()) is least.denser(0.5) is least.within(0.0, 8) is least.warmed(last) is least
    assert least.layout(8) == (Symbols(8, 1),)
    assert (least.spans_of_rest(8), least.forms(), least.remembered(8)) == ((), (), None)


def test_a_change_reaches_all_codecs_inside_one():
    levels, changed = (
        tw.lab.codecs.Levelled((tw.codecs.Cast(), tw.codecs.DCT(tw.codecs.TopK(density)))) for density in (0.01, 0.1)
    )
    assert rebuilt(levels, lambda one: one.denser(0.1)) == changed
    inner = tw.codecs.TopK(0.1)
    assert [*nested(changed)] == [changed, tw.codecs.Cast(), tw.codecs.DCT(inner), inner, tw.codecs.Cast()]


@pytest.mark.parametrize("inner", ["Sign()", tw.codecs.Sign, None])
def test_what_is_no_codec_is_refused_inside_one(inner):
    with pytest.raises(ConfigurationError) as caught:
        check_inner(SHARED, "values", inner)
    assert str(caught.value) == f"RandomK(values={inner!r}): a Codec is needed, such as Cast('bf16') or Sign()."


def test_a_joint_codec_is_found_inside_another_and_refused_there():
    joint = tw.lab.codecs.OverSenders(tw.codecs.TopK(0.1))
    assert [*nested(joint)] == [joint, tw.codecs.TopK(0.1), tw.codecs.TopK(0.1).values]
    check_inner(joint, "codec", joint, joint=True)
    with pytest.raises(ConfigurationError, match="`joint` would never be called inside this codec"):
        check_inner(joint, "codec", joint)


@pytest.mark.parametrize(
    "codec", {type(row.piece): row.piece for row in CODECS}.values(), ids=lambda codec: type(codec).__name__
)
def test_every_whole_number_of_a_codec_is_checked_when_it_is_made(codec):
    for field in fields(codec):
        if field.type in ("int", "int | None", "Literal[8, 4, 2]"):
            for value in (64.0, 4.0, "4", True):
                with pytest.raises(
                    ConfigurationError, match=re.escape(f"{type(codec).__name__}({field.name}={value!r}")
                ):
                    replace(codec, **{field.name: value})
