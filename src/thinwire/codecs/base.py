"""What a codec is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import NonFiniteError
from thinwire.packet import HEADER_NBYTES
from thinwire.seeds import Key


@runtime_checkable
class Codec(Protocol):
    """Turns a flat fp32 CPU tensor into a predictable number of bytes and back.

    A codec is a frozen dataclass; its text is its identity on the wire. What it draws by chance is a pure function of
    the packet's `key`, which both sides know. Laws (tests/core/test_codecs.py): the payload has exactly
    `nbytes(numel)` bytes, all of them written; decoding depends on bytes and key only. What a codec may claim beyond
    (odd, idempotent, contractive, unbiased) stands in the table of tests/core/pieces.py.
    """

    @property
    def grain(self) -> int | None:
        """A delta may be cut at multiples of this many elements and its parts coded one by one, with the same values
        and in as many bytes. None: only as a whole.
        """

    def nbytes(self, numel: int) -> int:
        """Bytes of the payload for `numel` elements (`packet_nbytes` adds the header)."""

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        """Write flat fp32 `x` into `payload` (uint8, `nbytes(x.numel())`). Raises `NonFiniteError` if `x` holds NaN or infinity."""

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the decoded values to flat fp32 `out`. The bytes are a peer's: `PacketError` where they
        cannot be decoded.
        """


def packet_nbytes(codec: Codec, numel: int) -> int:
    """What travels for `numel` elements: 48 bytes of header and the payload."""
    return HEADER_NBYTES + codec.nbytes(numel)


def check_finite(x: Tensor) -> None:
    """Raise `NonFiniteError` if `x` holds NaN or infinity.

    One pass: a sum of squares in fp32 can overflow for finite input, so only a suspicious sum is looked at element
    by element.
    """
    if not torch.isfinite(torch.dot(x, x)) and not bool(torch.isfinite(x).all()):
        count = int((~torch.isfinite(x)).sum())
        raise NonFiniteError(f"the delta has {count} of {x.numel()} values that are NaN or infinite; it was not sent.")
