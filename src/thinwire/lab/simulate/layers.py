"""Layer by layer: forward and backward passes of one replica against one link, for many rates of that link at once.

The model is that of Streaming DiLoCo's study of compute utilization (arXiv 2501.18512, §3.1 and appendix): replicas
are alike, so one stands for all. Layers are equal; a forward pass takes a third of the step, a backward pass the rest.
A layer of a departing fragment is sent when its backward pass ends. The link carries one message at a time, first in first out, without
latency. The layer's forward pass in step t + 1 + τ waits until it has arrived. The strategy's own schedule gives the fragments that
depart after each step, and its own partition gives their layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.errors import ConfigurationError
from thinwire.pieces.schedule import busiest
from thinwire.strategy import Strategy

Floats = NDArray[np.float64]

FORWARD = 1 / 3  # share of a step
MOST_LAYERS = 2_000  # each is a module
CYCLES = 256  # most cycles until the pattern repeats; the remaining error is less than 1 / 256 of the slack
SAME = 1e-10  # difference of two equal times, as a share of a step


@dataclass(frozen=True)
class Stack:
    """A model of equal layers, with the seconds that one inner step takes.

    Args:
        parameters: number of parameters, at most 1e18.
        layers: number of layers, at most 2,000.
        step_seconds: seconds of an inner step, 1e-12 to 1e9.

    Raises:
        ConfigurationError: a number is too small or too large, or there are more layers than parameters.

    >>> len(list(Stack(1e9, layers=24, step_seconds=0.1).skeleton().parameters()))
    24
    """

    parameters: float
    layers: int
    step_seconds: float

    def __post_init__(self) -> None:
        for name, least, most in (("parameters", 1, 1e18), ("step_seconds", 1e-12, 1e9)):
            if not least <= getattr(self, name) <= most:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: a number from {least:g} to {most:g} is needed."
                )
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ConfigurationError(f"layers={self.layers}: between 1 and {MOST_LAYERS:,} are needed.")
        if self.parameters < self.layers:
            raise ConfigurationError(
                f"parameters={self.parameters:g} for {self.layers} layers: at least one parameter a layer is needed."
            )

    def skeleton(self) -> nn.Module:
        """Layers without storage, which a partition can cut."""
        with torch.device("meta"):
            return nn.Sequential(*(_Layer(round(self.parameters / self.layers)) for _ in range(self.layers)))

    def fragments(self, strategy: Strategy) -> list[list[int]]:
        """The layers of each of the strategy's fragments."""
        fragments = strategy.partition.fragments(self.skeleton())
        return [[int(name.split(".")[0]) for name, _ in fragment.parameters] for fragment in fragments]


class _Layer(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))


def compute_utilization(stack: Stack, strategy: Strategy, bits_per_parameter: float, bits_per_second: Floats) -> Floats:
    """Seconds in inner steps over seconds, in the long run; simulated for many rates of the link at once.

    No time grows when the rate does, so utilization never falls with it. Cost: a few operations on arrays [B] for every
    layer that is sent, until the pattern repeats.

    Args:
        stack: the model's layers.
        strategy: its schedule and partition say which layers are sent after which step.
        bits_per_parameter: bits of one parameter on the wire, times what the collective sends for one message.
        bits_per_second: rates of the link, float64 [B].

    Returns:
        Shares of the time, float64 [B].

    >>> from thinwire.recipes import diloco
    >>> compute_utilization(Stack(1e9, 24, 0.1), diloco(every=100), 16, np.array([1e9, 1e12])).round(2).tolist()
    [0.39, 1.0]
    """
    replica = _Lockstep(stack, strategy, bits_per_parameter, bits_per_second)
    every = strategy.schedule.every
    replica.run(2 * every + strategy.schedule.delay + 1)  # until every fragment has departed, and landed
    backlog = span = np.full_like(bits_per_second, np.inf)
    for _ in range(CYCLES):
        before, queued, began = span, backlog, replica.clock
        replica.run(every)
        span, backlog = replica.clock - began, np.maximum(replica.free - replica.clock, 0.0)
        unlike = np.abs(span - before) + np.abs(backlog - queued)
        if (unlike <= SAME * stack.step_seconds * every).all():
            break
    return np.minimum(every * stack.step_seconds / span, 1.0)  # rounding must not give more than 1


def compute_utilization_of_run(
    stack: Stack, strategy: Strategy, bits_per_parameter: float, bits_per_second: Floats, steps: int
) -> Floats:
    """As `compute_utilization`, but of a run that begins with an idle link and ends when the link is idle again.

    Args:
        stack: the model's layers.
        strategy: its schedule and partition say which layers are sent after which step.
        bits_per_parameter: bits of one parameter on the wire, times what the collective sends for one message.
        bits_per_second: rates of the link, float64 [B].
        steps: inner steps of the run.

    Returns:
        Shares of the time, float64 [B].

    >>> from thinwire.recipes import diloco
    >>> compute_utilization_of_run(Stack(1e9, 24, 0.1), diloco(every=100), 16, np.array([1e9]), 300).round(2).tolist()
    [0.39]
    """
    replica = _Lockstep(stack, strategy, bits_per_parameter, bits_per_second)
    replica.run(steps)
    return np.minimum(steps * stack.step_seconds / np.maximum(replica.clock, replica.free), 1.0)


class _Lockstep:
    """One replica that represents all: its clock, the time at which its link is free, and the arrivals of layers (arrays [B])."""

    def __init__(self, stack: Stack, strategy: Strategy, bits_per_parameter: float, rates: Floats) -> None:
        self.stack, self.schedule, self.step = stack, busiest(strategy.schedule), 0
        self.fragments = stack.fragments(strategy)
        self.forward = FORWARD * stack.step_seconds / stack.layers
        self.backward = (1 - FORWARD) * stack.step_seconds / stack.layers
        self.seconds_on_link = bits_per_parameter * stack.parameters / stack.layers / rates
        self.clock = np.zeros_like(rates)
        self.free = np.zeros_like(rates)
        self.arrivals: dict[int, dict[int, Floats]] = {}  # by the step that needs them, by layer

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self._forward(self.arrivals.pop(self.step, {}))
            departing = self.schedule.departs(self.step, len(self.fragments))
            self._backward([layer for fragment in departing for layer in self.fragments[fragment]])

    def _forward(self, arrivals: dict[int, Floats]) -> None:
        done = 0
        for layer in sorted(arrivals):
            self.clock = np.maximum(self.clock + (layer - done) * self.forward, arrivals[layer])
            done = layer
        self.clock = self.clock + (self.stack.layers - done) * self.forward

    def _backward(self, departing: list[int]) -> None:
        left = self.stack.layers
        needed = self.arrivals.setdefault(self.step + 1 + self.schedule.delay, {}) if departing else {}
        for layer in sorted(departing, reverse=True):
            self.clock = self.clock + (left - layer) * self.backward
            self.free = np.maximum(self.free, self.clock) + self.seconds_on_link
            needed[layer], left = self.free, layer
        self.clock = self.clock + left * self.backward
