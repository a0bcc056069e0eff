"""The compiled loops of `Levels` have the bits of the reference."""

from __future__ import annotations

import torch
from pieces import over

from thinwire.codecs.layout import packed_nbytes
from thinwire.lab.codecs import cpu_levels
from thinwire.lab.codecs import reference_levels as reference
from thinwire.lab.codecs.uniform import Levels
from thinwire.testing.toy import same_bits


@over("bits", range(1, 9))
def test_levels_next_to_a_half_match_the_reference(bits):
    """At and next to halves the sum of a quotient in fp32 could round to another level than the quotient in fp64."""
    top = (1 << bits) - 1
    halves = torch.arange(1000) % top + 0.5
    near = torch.cat([torch.nextafter(halves, halves * 0), halves, torch.nextafter(halves, halves + 1)]) - 0.25
    x = torch.cat([torch.tensor([-0.25, top - 0.25]), near]) * 0.3
    made = [torch.empty(packed_nbytes(len(x), bits) + 8, dtype=torch.uint8) for _ in range(2)]
    for kernels, payload in zip((cpu_levels, reference), made):
        assert kernels.encode_levels(x, payload, bits, 4096)
    assert torch.equal(*made)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[5] = value
        assert not cpu_levels.encode_levels(x, made[0], bits, 4096)
        assert not reference.encode_levels(x, made[1], bits, 4096)


@over("block", [8, 24, 512, 5000, 1 << 40])
def test_levels_of_blocks_of_any_size_match_the_reference(block):
    """Blocks end inside of stripes of 4096 and with them; the last one has fp32's whole range."""
    draw = torch.Generator().manual_seed(5)
    x = torch.ldexp(torch.randn(12_301, generator=draw), (torch.arange(12_301) * 7 % 250 - 140).int())
    x[-2:] = torch.tensor([-3.4028234663852886e38, 3.4028234663852886e38])
    for bits in range(1, 9):
        codec, found = Levels(bits, block), list[tuple[torch.Tensor, torch.Tensor]]()
        for kernels in (cpu_levels, reference):
            payload, out = torch.full((codec.nbytes(len(x)),), 0xA5, dtype=torch.uint8), torch.ones(len(x))
            assert kernels.encode_levels(x, payload, bits, block)
            kernels.add_levels(payload, out, bits, block, 0.37)
            found.append((payload, out))
        assert all(same_bits(got, due) for got, due in zip(*found))
