"""Over how many ranks what is spread."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter: of the weight, the gradient, and the optimizer's state (a master copy included)."""

    weight: int
    gradient: int
    optimizer: int


FP32 = Precision(4, 4, 8)  # `thinwire train`: AdamW's two moments; bf16 is autocast's own business
MIXED = Precision(2, 2, 12)  # the papers': bf16 with an fp32 master copy


@dataclass(frozen=True)
class Shards:
    """Over how many ranks weights, gradients and optimizer state are spread.

    >>> Shards(2, 8, 64).nbytes(10**9, MIXED)
    1437500000
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    def __post_init__(self) -> None:
        w, g, o = self.weights, self.gradients, self.optimizer
        if not (0 < w <= g <= o) or g % w or o % g:
            raise ConfigurationError(
                f"degrees ({w}, {g}, {o}): nested groups are needed, 1 <= s_w <= s_g <= s_o and each a multiple of the one "
                "before; such as (2, 8, 64)."
            )

    @classmethod
    def parse(cls, text: str) -> Shards:
        """From "2,8,64"."""
        try:
            w, g, o = (int(part) for part in text.split(","))
        except ValueError:
            raise ConfigurationError(
                f"degrees {text!r}: three whole numbers s_w,s_g,s_o are needed, as 2,8,64."
            ) from None
        return cls(w, g, o)

    @property
    def name(self) -> str:
        """What it is called where it has a name."""
        match (self.weights, self.gradients, self.optimizer):
            case (1, 1, 1):
                return "DDP"
            case (1, 1, _):
                return "ZeRO-1"
            case (1, g, o) if g == o:
                return "ZeRO-2"
            case (w, _, o) if w == o:
                return "ZeRO-3 (FSDP2)"
        return "three levels"

    def nbytes(self, parameters: int, precision: Precision = FP32) -> int:
        """That one rank keeps, rounded up to whole parameters."""
        parts = (
            (self.weights, precision.weight),
            (self.gradients, precision.gradient),
            (self.optimizer, precision.optimizer),
        )
        return sum(-(-parameters // degree) * each for degree, each in parts)
