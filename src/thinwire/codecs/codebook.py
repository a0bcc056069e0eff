"""Two bits per value, with a table of four values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, check_finite, check_fit
from thinwire.codecs.exact import saturated
from thinwire.codecs.layout import pack, packed_nbytes, unpack
from thinwire.rng import Key


@dataclass(frozen=True)
class Codebook(Codec):
    """Four bins of 1½ standard deviations, each decoded as the mean of its values: SparseLoCo's 2-bit values.

        bin(v) = clip(round((v − mean) / (6·std / 4)) + 2, 0, 3)

    Contractive for any values: v is replaced by a mean, so ‖q(x)‖² + ‖q(x) − x‖² = ‖x‖². Not odd: the bins are
    centred at −2, −1, 0 and 1 steps.

    *Source*: SparseLoCo (Sarfi et al., arXiv 2508.15706; released code). It encodes the values of a sparse codec, `ChunkedTopK(4096, 64,
    Codebook())`. The kept values have two modes, so two of the bins hold nearly all of them, and `Sign()` is about as good
    with one bit (docs/formats.md). *Differs*: the mean is sent inside the table.

    *Wire*: ⌈n/4⌉ bytes of codes, lowest bits first, then four fp32: 2 bits per value and 16 bytes per packet.

    >>> Codebook().nbytes(64)
    32
    """

    claims: ClassVar[frozenset[str]] = frozenset({"contractive"})

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 2) + (16 if numel else 0)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        if not x.numel():
            return
        centred = x.double()
        mean = centred.mean()
        centred = centred - mean
        step = 1.5 * centred.norm() / max(1, x.numel() - 1) ** 0.5
        codes = (centred / step).round_().add_(2).clamp_(0, 3).long() if step else torch.full(x.shape, 2)
        sums = torch.zeros(4, dtype=torch.float64).index_add_(0, codes, x.double())
        table = saturated(sums / codes.bincount(minlength=4).clamp_min(1))
        payload[:-16] = pack(codes, 2)
        payload[-16:] = table.view(torch.uint8)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        if out.numel():
            table = payload[-16:].clone().view(torch.float32).mul_(weight)
            out.add_(table[unpack(payload[:-16], out.numel(), 2)])
