"""From a delta on the GPU to a packet in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, nested
from thinwire.rng import Key


def runs_anywhere(codec: Codec) -> bool:
    """Whether `codec`, with all inside it, makes the same bytes on any device."""
    return all(part.any_device for part in nested(codec))


def encode_from(x: Tensor, codec: Codec, payload: Tensor, key: Key) -> int:
    """Encode an `x` that may be on another device than `payload`: where `x` is, if the codec can, so that only the
    packet's bytes cross. Returns how many bytes of `payload` count.
    """
    if x.device == payload.device or not runs_anywhere(codec):
        used = codec.encode(x.to(payload.device), payload, key)
    else:
        there = torch.empty(payload.shape, dtype=torch.uint8, device=x.device)
        used = codec.encode(x, there, key)
        payload.copy_(there)
    return payload.numel() if used is None else used
