"""The mean over the senders of each value, by hand. In training: tests/pieces/test_aggregates.py."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.rng import Key
from thinwire.testing.values import encoded, roundtrip


@pytest.mark.parametrize("inner", [tw.codecs.Identity(), tw.codecs.TopK(0.5, tw.codecs.Identity())], ids=str)
def test_each_value_is_the_weighted_mean_of_its_senders(inner: tw.codecs.Codec) -> None:
    codec = tw.lab.codecs.OverSenders(inner)
    assert codec.joint and not codec.biased and codec.nbytes(4) == inner.nbytes(4)
    said = [([1.0, 0.0, 0.0, -2.0], 3.0), ([5.0, 4.0, 0.0, 0.0], 1.0)]
    packets = [
        (encoded(codec, torch.tensor(values)), Key(sender=rank), weight) for rank, (values, weight) in enumerate(said)
    ]
    payloads = [
        (torch.frombuffer(bytearray(packet), dtype=torch.uint8), key, weight) for packet, key, weight in packets
    ]
    assert codec.decode_joint(payloads, 4).tolist() == [2.0, 4.0, 0.0, -2.0]
    assert codec.decode_joint([], 4).tolist() == [0.0] * 4
    assert roundtrip(codec, torch.tensor(said[0][0])).tolist() == said[0][0]
    out = torch.ones(4)
    codec.decode_add(payloads[1][0], out, Key(), 0.5)
    assert out.tolist() == [3.5, 3.0, 1.0, 1.0]


def test_packets_of_another_size_are_refused() -> None:
    codec, short = tw.lab.codecs.OverSenders(tw.codecs.TopK(0.5)), torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(tw.ConfigurationError, match="flat uint8 of 6 bytes are needed"):
        codec.decode_joint([(short, Key(), 1.0)], 4)
