"""Encodes a delta on the GPU into a packet in host memory, and says which packets are decoded there."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, nested
from thinwire.rng import Key


def runs_anywhere(codec: Codec) -> bool:
    """Whether `codec`, with all codecs inside it, makes the same bytes on every device."""
    return all(part.any_device for part in nested(codec))


def whole_anywhere(codec: Codec) -> bool:
    """Whether packets of `codec` are better decoded on the device of the values: a packet holds a whole fragment, so this takes few calls."""
    return codec.grain is None and not codec.joint and runs_anywhere(codec)


def encode_from(x: Tensor, codec: Codec, payload: Tensor, key: Key) -> int:
    """Encode values that may be on another device than the payload.

    A codec that makes the same bytes on every device encodes on the device of the values, so that only the packet's bytes are copied.

    Args:
        x: flat fp32, on any device.
        codec: the codec of the packet.
        payload: flat uint8 of `codec.nbytes(x.numel())` bytes.
        key: the packet's key.

    Returns:
        The number of used bytes of `payload`.

    >>> from thinwire.codecs import Identity
    >>> encode_from(torch.ones(3), Identity(), torch.empty(12, dtype=torch.uint8), Key())
    12
    """
    if x.device == payload.device or not runs_anywhere(codec):
        used = codec.encode(x.to(payload.device), payload, key)
    else:
        there = torch.empty(payload.shape, dtype=torch.uint8, device=x.device)
        used = codec.encode(x, there, key)
        payload.copy_(there)
    return payload.numel() if used is None else used
