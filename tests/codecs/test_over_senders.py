"""The mean over the senders of each value, by hand. In training: tests/pieces/test_aggregates.py."""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire.rng import Key
from thinwire.testing.values import encoded


def test_each_value_is_the_weighted_mean_of_its_senders() -> None:
    codec = tw.codecs.OverSenders(tw.codecs.Identity())
    assert codec.joint and not codec.biased
    said = [([1.0, 0.0, 0.0, -2.0], 3.0), ([5.0, 4.0, 0.0, 0.0], 1.0)]
    packets = [
        (encoded(codec, torch.tensor(values)), Key(sender=rank), weight) for rank, (values, weight) in enumerate(said)
    ]
    payloads = [
        (torch.frombuffer(bytearray(packet), dtype=torch.uint8), key, weight) for packet, key, weight in packets
    ]
    assert codec.decode_joint(payloads, 4).tolist() == [2.0, 4.0, 0.0, -2.0]
