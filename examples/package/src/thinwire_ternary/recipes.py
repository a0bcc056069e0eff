"""The recipe. All names in `__all__` are names for `--strategy`."""

from __future__ import annotations

from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Nesterov
from thinwire.pieces.schedule import Every
from thinwire.strategy import Strategy
from thinwire_ternary.codec import Ternary

__all__ = ["ternary_diloco"]


def ternary_diloco(*, every: int = 30, block: int = 64) -> Strategy:
    """DiLoCo whose deltas travel in two bits a value.

    Args:
        every: H, inner steps between two rounds.
        block: number of values that share a scale.
    """
    return Strategy(schedule=Every(every), codec=Ternary(block), feedback=Feedback(), outer=Nesterov(0.7, 0.5))
