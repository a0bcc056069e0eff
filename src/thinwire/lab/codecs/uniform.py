"""Even levels between the smallest and the largest value of a block."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from thinwire.codecs.base import Codec, check_fit, check_whole, not_finite
from thinwire.codecs.layout import Part, Symbols, packed_nbytes
from thinwire.errors import ConfigurationError
from thinwire.lab.codecs import reference_levels
from thinwire.rng import Key


@dataclass(frozen=True)
class Levels(Codec):
    """2^bits even levels from the smallest to the largest value of each block:

        unit = (max − min) / (2^bits − 1),   level = ⌊(x − min) / unit + ½⌋,   decoded min + level·unit

    No level is wasted if most values have one sign. If they have both, *zero is no level*, and may decode to half a unit.
    ‖q(x) − x‖² ≤ block / (2·(2^bits − 1)²)·‖x‖², so it is contractive for 4 bits in blocks of up to 450. Idempotent; not odd.

    *Source*: the quantiser of CGX (Markov et al., arXiv 2111.08617). *Differs*: min and max are sent, where CGX sends min and a unit
    that is rounded to fp32; units below 1e-10 are kept.

    *Wire*: the levels (lowest bits first), then min and max of each block in fp32 (a zero as +0): bits + 64/block bits per
    parameter. It runs on the CPU: a delta on a GPU is copied to the host in fp32.

    Args:
        bits: 1 to 8.
        block: number of neighbours that share a smallest and a largest value; a multiple of 8.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Levels(bits=4, block=512).nbytes(1024)
    528
    """

    bits: int = 4
    block: int = 512

    def __post_init__(self) -> None:
        check_whole(self)
        if not 1 <= self.bits <= 8:
            raise ConfigurationError(f"Levels(bits={self.bits}): 1 to 8 are needed; 4 is usual.")
        if self.block < 8 or self.block % 8:
            raise ConfigurationError(f"Levels(block={self.block}): a multiple of 8 is needed; 512 is usual.")

    claims: ClassVar[frozenset[str]] = frozenset({"idempotent", "local"})

    @property
    def grain(self) -> int:
        return self.block

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, self.bits) + 8 * -(-numel // self.block)

    def layout(self, numel: int) -> tuple[Part, ...]:
        return Symbols(packed_nbytes(numel, self.bits)), Symbols(8 * -(-numel // self.block), 4)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        if not _loops(x, payload).encode_levels(x, payload, self.bits, self.block):
            raise not_finite(x)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        _loops(out, payload).add_levels(payload, out, self.bits, self.block, weight)


def _loops(*tensors: Tensor) -> ModuleType:
    """The compiled loops for contiguous tensors of the CPU, otherwise plain torch, with the same bits."""
    if find_spec("numba") and all(t.is_contiguous() and t.device.type == "cpu" for t in tensors):
        from thinwire.lab.codecs import cpu_levels

        return cpu_levels
    return reference_levels
