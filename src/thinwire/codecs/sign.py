"""One bit per value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from thinwire.codecs.base import Codec, check_whole, kernels_for, not_finite
from thinwire.codecs.layout import Part, Symbols, packed_nbytes
from thinwire.errors import ConfigurationError
from thinwire.rng import Key


@dataclass(frozen=True)
class Sign(Codec):
    """Send the signs, and one fp32 scale s for each `block` (None: for the whole tensor): ±s, with + for zero.

        q(x) = s·sign(x),   s = ‖x‖₁ / n ("mean") or ‖x‖₂ / √n ("l2")      of the n values that share s

    "mean" has the smallest error: ‖q(x) − x‖² = (1 − ‖x‖₁² / (n·‖x‖₂²))·‖x‖². "l2" keeps the norm but is *not contractive*: if few
    values are large, the error is up to twice the energy, and the residual of error feedback can grow.

    *Source*: "mean" is of EF-signSGD (Karimireddy et al., arXiv 1901.09847), "l2" of 1-bit Adam (Tang et al., arXiv 2102.02888).
    *Differs*: a block of any size may have its own s; 1-bit Adam's code has one for each tensor, as `Each(Sign("l2"))`.

    *Wire*: ⌈n/8⌉ bytes of signs (lowest bit first, 1 is negative), then the scales: 1 + 32/block bits per
    parameter. It cannot represent zero, so use it inside a sparse codec or with feedback.

    Args:
        scale: 'mean' or 'l2'.
        block: number of values that share a scale; None: the whole tensor.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Sign(block=1024).nbytes(4096)
    528
    """

    scale: Literal["mean", "l2"] = "mean"
    block: int | None = None

    any_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self)
        if self.scale not in ("mean", "l2"):
            raise ConfigurationError(f"Sign(scale={self.scale!r}): 'mean' or 'l2' is needed.")
        if self.block is not None and self.block < 1:
            raise ConfigurationError(f"Sign(block={self.block}): at least 1 is needed, or None for the whole tensor.")

    @property
    def claims(self) -> frozenset[str]:
        return frozenset(["contractive"] * (self.scale == "mean") + ["local"] * (self.block is not None))

    @property
    def grain(self) -> int | None:
        return self.block and math.lcm(self.block, 8)

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, 1) + 4 * -(-numel // self._block(numel))

    def layout(self, numel: int) -> tuple[Part, ...]:
        return Symbols(packed_nbytes(numel, 1)), Symbols(4 * -(-numel // self._block(numel)), 4)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        if not kernels_for(self, x, payload).encode_signs(x, payload, self._block(x.numel()), self.scale):
            raise not_finite(x)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        kernels_for(self, out, payload).add_signs(payload, out, self._block(out.numel()), weight)

    def _block(self, numel: int) -> int:
        return self.block or max(1, numel)
