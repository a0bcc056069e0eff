"""One bit a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import check_finite
from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.errors import ConfigurationError
from thinwire.seeds import Key


@dataclass(frozen=True)
class Sign:
    """The signs, and one fp32 scale for each `block` (None: for the whole tensor): ±s, with + for zero.

    `scale` "mean" is s = mean|x|, the best there is: ‖q(x) − x‖² = (1 − ‖x‖₁² / (n·‖x‖₂²))·‖x‖². "l2" is s = ‖x‖₂/√n,
    as 1-bit Adam has it (arXiv 2102.02888); it keeps the norm but is *not contractive*: where few values are large the
    error is up to twice the energy, and error feedback over it can grow.

    On the wire: ⌈n/8⌉ bytes of signs (lowest bit first, 1 is negative), then the scales: 1 + 32/block bits per
    parameter. Zero cannot be said, so it is best inside a sparse codec, or with feedback.

    >>> Sign(block=1024).nbytes(4096)
    528
    """

    scale: Literal["mean", "l2"] = "mean"
    block: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("mean", "l2"):
            raise ConfigurationError(f"Sign(scale={self.scale!r}): 'mean' or 'l2' is needed.")
        if self.block is not None and self.block < 1:
            raise ConfigurationError(f"Sign(block={self.block}): at least 1 is needed, or None for the whole tensor.")

    @property
    def grain(self) -> int | None:
        return self.block and math.lcm(self.block, 8)

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 1) + 4 * -(-numel // (self.block or max(1, numel)))

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_finite(x)
        count = packed_nbytes(x.numel(), 1)
        payload[:count] = pack(x < 0, 1)
        order = 1 if self.scale == "mean" else 2
        norms = [
            torch.linalg.vector_norm(part, order, dtype=torch.float64)
            for part in x.split_with_sizes(self._sizes(x.numel()))
        ]
        scales = [float(norm) / part ** (1 / order) for norm, part in zip(norms, self._sizes(x.numel()))]
        payload[count:] = torch.tensor(scales, dtype=torch.float32).view(torch.uint8)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        count = packed_nbytes(out.numel(), 1)
        signs = unpack(payload[:count], out.numel(), 1).float().mul_(-2).add_(1)
        scales = payload[count:].clone().view(torch.float32).mul_(weight)
        for part, sign, scale in zip(*(t.split_with_sizes(self._sizes(out.numel())) for t in (out, signs)), scales):
            part.add_(sign * scale)

    def _sizes(self, numel: int) -> list[int]:
        """Of the blocks."""
        block = self.block or max(1, numel)
        return [min(block, numel - begin) for begin in range(0, numel, block)]
