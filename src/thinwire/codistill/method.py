"""Replicas of unlike models as a method: a frozen value that says what they tell each other, when, and what it counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.codistill.driver import Probe, Talking
from thinwire.codistill.predictions import PredictionCoder
from thinwire.comm.group import Group
from thinwire.errors import ConfigurationError
from thinwire.methods.base import nbytes_to_all, silent
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.types import Observer

BYTES = 256  # the vocabulary of the tokenizer that is the default


@dataclass(frozen=True, kw_only=True)
class Codistill:
    """Each replica has a model of its own, and learns from what the others predict on a shared probe set. See `codistill`.

    >>> Codistill(every=10, probe=128).nbytes_per_period(1_000_000, size=2)
    20209
    """

    every: int = 10
    delay: int = 2
    probe: int = 256
    top: int = 8
    weight: float = 0.5
    warmup: int = 100
    temperature: float = 1.0
    sharpness: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (self.every, self.delay, self.probe, self.top, self.warmup)
        if any(type(number) is not int for number in whole) or min(self.every, self.probe, self.top) < 1:
            raise ConfigurationError(f"{self}: whole numbers are needed, of every, probe and top above 0.")
        if not 0 <= self.delay < self.every or self.warmup < 0:
            raise ConfigurationError(f"{self}: 0 <= delay < every is needed, and a warmup of 0 or more.")
        positive = (self.temperature, 1.0 + self.weight, 1.0 + self.sharpness)
        if not all(0 < number < math.inf for number in positive) or min(self.weight, self.sharpness) < 0:
            raise ConfigurationError(
                f"{self}: a temperature above 0 is needed, and weight and sharpness of 0 or more, all finite."
            )

    def weight_at(self, step: int) -> float:
        """What the others' predictions count in inner step `step`, counted from 1.

        >>> [Codistill(weight=0.5, warmup=100).weight_at(step) for step in (100, 150, 200, 300)]
        [0.0, 0.25, 0.5, 0.5]
        """
        return self.weight * min(1.0, max(0.0, (step - self.warmup) / self.warmup)) if self.warmup else self.weight

    def told(self, round_: int) -> bool:
        """Whether the predictions of a round are ever of use; else it carries none."""
        return self.weight_at((round_ + 1) * self.every + self.delay) > 0

    def nbytes(self, round_: int, vocabulary: int) -> int:
        """The most bytes of a packet's payload."""
        return PredictionCoder(self.probe * self.every, vocabulary, self.top).nbytes if self.told(round_) else 0

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        probe: Probe | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Talking:  # fmt: skip
        """Join this method with what it trains, and `probe`, which makes the model's predictions. Collective. Raises `ModelError`,
        `ConfigurationError`, `DisagreementError`, `LinkError`.
        """
        if probe is None:
            raise ConfigurationError(f"{self} without a probe: what the model is to predict is needed; give probe=.")
        return Talking(self, model, optimizer, group, probe, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int | None = None) -> int:
        """The most that a replica sends in the round at the end of `period` (None: after the warm-up), at a vocabulary of bytes.
        The size of the model has no part in it.
        """
        return nbytes_to_all(self.nbytes(1 + (2 * self.warmup if period is None else period), BYTES), size)


def codistill(
    *,
    every: int = 10,
    delay: int = 2,
    probe: int = 256,
    top: int = 8,
    weight: float = 0.5,
    warmup: int = 100,
    temperature: float = 1.0,
    sharpness: float = 5.0,
) -> Codistill:
    """Talking Models (arXiv 2310.03188; codistillation, arXiv 1804.03235): replicas of unlike models learn from each other's predictions.

        p_j = the K most probable tokens of softmax(z_j / T) and the rest, rounded          of replica j, on a shared probe set
        w_j = softmax_j(−s·CE_j)                                                            CE_j: of p_j on the text of the probe set
        ∇_i = ∇ (own loss + λ·T²·Σ_{j≠i} w_j·KL(p_j ‖ q_i))                                 q_i: what replica i itself predicts there

    *Differs*: predictions travel, and no learned encoding of hidden states; all replicas learn, none is a teacher; weights by quality.
    *Wire*: at most 49 + ⌈P·K·b/8⌉ + ⌈P·6/8⌉ + ⌈P·K·7/8⌉ bytes to each other replica every H steps, for P = H·`probe` positions and b bits
    of a token; 48 while λ is 0.

    Args:
        every: H, inner steps between two rounds.
        delay: τ, inner steps for which a round is in flight, fewer than `every`.
        probe: positions of the probe set that a replica predicts and learns from in each inner step.
        top: K, number of tokens of which the probability is told.
        weight: λ in the long run; 0: each replica trains alone.
        warmup: inner steps through which λ is 0; in as many more it rises to `weight`.
        temperature: T, by which logits are divided.
        sharpness: s, per nat: how much less a replica counts whose predictions are worse.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> codistill().nbytes_per_period(1_000_000, size=3)  # bytes, at most
    80738
    """
    return Codistill(
        every=every, delay=delay, probe=probe, top=top, weight=weight, warmup=warmup, temperature=temperature, sharpness=sharpness
    )  # fmt: skip


CODISTILL: dict[str, Callable[..., Codistill]] = {"codistill": codistill}
