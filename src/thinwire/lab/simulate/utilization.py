"""The rate that a link needs for a given compute utilization: the study of Streaming DiLoCo (arXiv 2501.18512, Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinwire.codecs import E3M0, Cast
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.formulas import floor_bits_per_second
from thinwire.lab.simulate.layers import Floats, Stack, compute_utilization, compute_utilization_of_run
from thinwire.pieces.schedule import Staggered, short_first
from thinwire.recipes import data_parallel, diloco, eager_diloco, streaming_diloco
from thinwire.strategy import Strategy

STUDIED = (
    *("data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-fp4"),
    *("streaming-eager", "streaming-eager-fp4"),
)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
PAPER_GRID = np.logspace(-1, 3, 50) * 1e9  # the paper's axis: all its rates are among these, rounded
PAPER_STEPS = 300
PAPER_BITS = 13.4  # bits per parameter that reproduce the paper's table; the paper names 16
LANES = 32  # number of rates that a search tries at once for a target
LEAST_BITS, MOST_BITS = 1e-9, 1_000_000  # per parameter
LONGEST_PERIOD = 10_000  # most inner steps between two exchanges, because each calls the schedule
PASSES = 6  # passes of a search: from 14 decades to a factor of 1 + 4e-8


@dataclass(frozen=True)
class Study:
    """A model, and the settings of the studied methods.

    *Differs* from training: as in the paper, the period is P·⌊H/P⌋ for P fragments, and at least P. `Staggered` is given that
    period, and keeps it exactly. If P does not divide the number of layers, some fragments have one layer less.

    Args:
        stack: the model's layers.
        every: inner steps H between two exchanges, 1 to 10,000.
        delay: inner steps from departure to landing.
        fragment_layers: number of layers in a fragment.
        bits_per_parameter: bits of a parameter in one exchange without 4-bit codes, the collective's traffic included;
            with 4-bit codes it is a quarter.

    Raises:
        ConfigurationError: a number is out of range.

    >>> study = Study(Stack(1e9, layers=24, step_seconds=0.1))
    >>> f"{study.floor('diloco'):.2g}"  # bits per second
    '1.6e+09'
    """

    stack: Stack
    every: int = 100
    delay: int = 1
    fragment_layers: int = 3
    bits_per_parameter: float = 16.0

    def __post_init__(self) -> None:
        if not LEAST_BITS <= self.bits_per_parameter <= MOST_BITS:
            raise ConfigurationError(
                f"bits_per_parameter={self.bits_per_parameter}: a number from {LEAST_BITS:g} to {MOST_BITS:,} is needed."
            )
        if not 1 <= self.every <= LONGEST_PERIOD:
            raise ConfigurationError(
                f"every={self.every}: between 1 and {LONGEST_PERIOD:,} inner steps between two exchanges are needed."
            )

    def strategy(self, method: str) -> Strategy:
        """The composition that `method` names. Raises `ConfigurationError`."""
        match method:
            case "data-parallel":
                return data_parallel(codec=Cast())
            case "diloco":
                return diloco(every=self.every, codec=Cast())
            case "streaming" | "streaming-overlap" | "streaming-overlap-fp4":
                count, period = self._period()
                return streaming_diloco(
                    every=period,
                    fragments=count,
                    offsets=short_first(period, count),
                    delay=0 if method == "streaming" else self.delay,
                    codec=E3M0() if method.endswith("fp4") else Cast(),
                )
            case "streaming-eager" | "streaming-eager-fp4":
                count, period = self._period()
                codec = E3M0() if method.endswith("fp4") else Cast()
                schedule = Staggered(period, period, short_first(period, count))
                return replace(eager_diloco(every=period, fragments=count, codec=codec), schedule=schedule)
        raise ConfigurationError(f"method={method!r} is not known; choose from {', '.join(STUDIED)}.")

    def bits(self, method: str) -> float:
        """Bits of a parameter in one exchange of `method`."""
        return self.bits_per_parameter / 4 if method.endswith("fp4") else self.bits_per_parameter

    def floor(self, method: str) -> float:
        """Predicted: the rate below which every schedule of this period must wait."""
        every = self.strategy(method).schedule.every
        return floor_bits_per_second(self.stack.parameters, self.bits(method), every, self.stack.step_seconds)

    def convention(self) -> str:
        """An explanation of the bits per parameter, for the caption of a figure."""
        bits = self.bits_per_parameter
        meant = {16.0: f"bf16 as it is; the paper's table follows from {PAPER_BITS:g}"}
        meant[PAPER_BITS] = "gives the paper's table, which itself names 16"
        said = meant.get(bits, f"bf16 is 16; the paper's table follows from {PAPER_BITS:g}")
        return f"volume: {bits:g} bits a parameter and exchange, a quarter in fp4 ({said})"

    def utilization(self, method: str, bits_per_second: Floats) -> Floats:
        """Simulated, for each of the rates [B]."""
        return compute_utilization(self.stack, self.strategy(method), self.bits(method), bits_per_second)

    def paper_rates(self, method: str, targets: Sequence[float] = TARGETS) -> list[float | None]:
        """The rates by the paper's method: for each target the first rate of its grid that reaches it, None if none does. The run has whole
        cycles and at least 300 steps, the last transfer included.
        """
        strategy = self.strategy(method)
        steps = -(-PAPER_STEPS // strategy.schedule.every) * strategy.schedule.every
        used = compute_utilization_of_run(self.stack, strategy, self.bits(method), PAPER_GRID, steps)
        return [float(PAPER_GRID[np.argmax(used >= t)]) if (used >= t).any() else None for t in targets]

    def rates(self, method: str, targets: Sequence[float] = TARGETS) -> list[float]:
        """For each target the least rate that reaches it, to seven digits; utilization rises with the rate."""
        alone = self.bits(method) * self.stack.parameters / self.stack.step_seconds  # one exchange takes one step
        low, high = (np.full(len(targets), alone * decades) for decades in (1e-8, 1e6))
        for _ in range(PASSES):
            tried = np.geomspace(low, high, LANES)  # [lanes, targets]
            reached = self.utilization(method, tried.ravel()).reshape(tried.shape) >= np.array(targets)
            first = np.maximum(reached.argmax(axis=0), 1)
            low, high = (np.take_along_axis(tried, (first - back)[None], axis=0)[0] for back in (1, 0))
        return [float(rate) for rate in high]

    def _period(self) -> tuple[int, int]:
        """Number of fragments, and inner steps until all have departed."""
        if not 1 <= self.fragment_layers <= self.stack.layers:
            raise ConfigurationError(
                f"fragment_layers={self.fragment_layers} for {self.stack.layers} layers: between 1 and {self.stack.layers} is needed."
            )
        count = -(-self.stack.layers // self.fragment_layers)
        return count, max(1, self.every // count) * count
