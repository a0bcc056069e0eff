"""`Levels`, the codec of evenly spaced levels, against values by hand."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigurationError
from thinwire.testing.values import roundtrip


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_below_1_and_above_8_are_refused(bits):
    with pytest.raises(ConfigurationError, match=rf"Levels\(bits={bits}\): 1 to 8 are needed"):
        tw.lab.codecs.Levels(bits=bits)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("unit", [0.5, 1.0, 2.0])
def test_values_on_a_level_are_exact(bits, unit):
    x = torch.arange(256.0).remainder(2**bits).mul_(unit) - 3.0
    torch.testing.assert_close(roundtrip(tw.lab.codecs.Levels(bits, 256), x), x, rtol=0, atol=1e-12)


def test_blocks_of_eight_are_accepted():
    x = torch.arange(20.0)
    assert roundtrip(tw.lab.codecs.Levels(8, 8), x).sub(x).abs().max() < 7 / 255


@pytest.mark.parametrize("block", [0, 4, 12])
def test_blocks_that_are_no_multiple_of_8_are_refused(block):
    with pytest.raises(ConfigurationError, match=rf"Levels\(block={block}\): a multiple of 8 is needed"):
        tw.lab.codecs.Levels(block=block)
