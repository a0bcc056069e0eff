"""Compiles what a codec needs before the first round."""

from __future__ import annotations

from functools import lru_cache

import torch

from thinwire.codecs.base import Codec
from thinwire.rng import Key


def warm_up(codec: Codec) -> None:
    """Encode and decode once, so that compiled code is ready before the first round: seconds the first time on a machine, then milliseconds.
    A process does so once for each codec.

    Args:
        codec: the codec of the coming rounds.

    >>> from thinwire.codecs import Identity
    >>> warm_up(Identity())
    """
    _warm(codec)  # type: ignore[arg-type]  # a frozen dataclass is hashable


@lru_cache(maxsize=4096)
def _warm(codec: Codec) -> None:
    codec = codec.fitted(((1 << 8, 1 << 8),))
    x = torch.ones(1 << 16)  # enough elements to compile all branches
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    for eighths in range(9):
        form = codec.within(eighths / 8, x.numel())
        if eighths == 8 or form is not codec:
            form.encode(x, payload, Key())
            form.decode_add(payload, x, Key())
