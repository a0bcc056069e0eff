"""The codec. All names in `__all__` may stand in a composition: `--codec "Ternary(block=64)"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, check_finite
from thinwire.errors import ConfigurationError
from thinwire.rng import Key

__all__ = ["Ternary"]


@dataclass(frozen=True)
class Ternary(Codec):
    """Each value as −s, 0 or s in two bits: s is the largest magnitude of its block, and what is below s/2 becomes 0.

    *Wire*: 2 + 32/block bits a value.

    Args:
        block: number of neighbors that share s; a multiple of 4.
    """

    block: int = 64

    claims: ClassVar[frozenset[str]] = frozenset({"odd", "idempotent", "local"})

    def __post_init__(self) -> None:
        if self.block < 4 or self.block % 4:
            raise ConfigurationError(f"{self}: a block of 4, 8, 12, … values is needed; 64 is usual.")

    @property
    def grain(self) -> int:
        return self.block

    def nbytes(self, numel: int) -> int:
        return -(-numel // 4) + 4 * -(-numel // self.block)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_finite(x)
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        scale = blocks.abs().amax(1)
        code = (blocks.abs() * 2 >= scale[:, None]).logical_and_(blocks != 0).to(torch.uint8)
        code += (code > 0) & (blocks < 0)  # 0: zero, 1: s, 2: −s
        quarters = code.view(-1, 4)
        packed = quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6
        split = -(-x.numel() // 4)
        payload[:split] = packed[:split]
        payload[split:] = scale.view(torch.uint8)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        split = -(-out.numel() // 4)
        code = torch.stack([payload[:split] >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(-1)[: out.numel()]
        scale = payload[split:].clone().view(torch.float32).repeat_interleave(self.block)[: out.numel()]
        sign = (code == 1).float() - (code == 2).float()
        out.add_(sign.mul_(scale).mul_(weight))
