"""Gradient codes: any n − s of n replicas' results give the sum over all n chunks of a batch. Pure: no network, no clock.

Source: Tandon, Lei, Dimakis, Karampatziakis (arXiv 1612.03301). Replica i computes the gradients of s + 1 chunks and sends one vector,
Σ_k B_ik·g_k. From the results of the replicas I a receiver finds weights a with aᵀB_I = 1ᵀ; then Σ_i a_i·(result of i) is the sum.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

_OFF = 1e-6  # how far from 1 the weight of a chunk may be after decoding


class GradientCode(Protocol):
    """Which chunks each replica computes, and how the sum over all follows without some of the replicas."""

    @property
    def replicas(self) -> int:
        """n: the number of replicas, and of chunks."""

    @property
    def stragglers(self) -> int:
        """s: how many replicas may be missing, whichever they are."""

    def factors(self, replica: int) -> dict[int, float]:
        """The chunks of a replica, each with its factor B_ik."""

    def decodes(self, heard: Collection[int]) -> bool:
        """Whether the results of these replicas suffice."""

    def weights(self, heard: Collection[int]) -> dict[int, float]:
        """Factors a_i of the results of some of these replicas. Raises `ConfigurationError` if they do not suffice."""


def load(code: GradientCode) -> Fraction:
    """The share of the batch that one replica computes: (s + 1) / n.

    >>> load(Repetition(replicas=6, stragglers=2))
    Fraction(1, 2)
    """
    return Fraction(code.stragglers + 1, code.replicas)


@dataclass(frozen=True)
class Repetition:
    """Fractional repetition: groups of s + 1 replicas compute the same s + 1 chunks and send the plain sum; one of each group is enough.

    All factors are 1, so nothing is amplified. If the results within a group have equal bits, the sum has the same bits whichever replicas
    are late.

    Args:
        replicas: number n of replicas, and of chunks; a multiple of s + 1.
        stragglers: number s of replicas that may be missing.

    Raises:
        ConfigurationError: s + 1 does not divide n.

    >>> code = Repetition(replicas=4, stragglers=1)
    >>> code.factors(1), code.weights({1, 2, 3})
    ({0: 1.0, 1: 1.0}, {1: 1.0, 2: 1.0})
    """

    replicas: int
    stragglers: int

    def __post_init__(self) -> None:
        _check(self)
        if self.replicas % (self.stragglers + 1):
            raise ConfigurationError(
                f"{self}: groups of {self.stragglers + 1} replicas were asked for; a number of replicas that {self.stragglers + 1} divides is "
                "needed. Cyclic(...) takes any."
            )

    def factors(self, replica: int) -> dict[int, float]:
        first = self._group(replica) * (self.stragglers + 1)
        return dict.fromkeys(range(first, first + self.stragglers + 1), 1.0)

    def decodes(self, heard: Collection[int]) -> bool:
        return len({self._group(replica) for replica in heard}) * (self.stragglers + 1) == self.replicas

    def weights(self, heard: Collection[int]) -> dict[int, float]:
        if not self.decodes(heard):
            raise ConfigurationError(f"{self} heard {sorted(heard)}: at least one replica of each group is needed.")
        first = {self._group(replica): replica for replica in sorted(heard, reverse=True)}
        return {first[group]: 1.0 for group in sorted(first)}

    def _group(self, replica: int) -> int:
        return replica // (self.stragglers + 1)


@dataclass(frozen=True)
class Cyclic:
    """Replica i computes the chunks i, i + 1, ..., i + s (mod n). Any n − s results are enough, for any s < n.

    If n − s is odd, every row of B is the same polynomial, shifted: its roots are the s powers of exp(2πi/n) about −1 (Raviv, Tamo,
    Tandon, Dimakis, arXiv 1707.03858). If n − s is even, no such real code exists, and B is drawn as in Tandon et al., Algorithm 2: H is
    Gaussian, [s, n], with rows that sum to 0; B_ii = 1 and B_i,i+1..i+s = −H_i+1..i+s⁻¹·H_i. Decoding amplifies rounding, the drawn
    code's by far more (docs/methods/gradient_coding.md): encode in fp32 or fp64, never in bf16.

    Args:
        replicas: number n of replicas, and of chunks.
        stragglers: number s of replicas that may be missing, less than n.
        seed: of the drawn code; an integer number.

    Raises:
        ConfigurationError: a setting cannot work.

    >>> Cyclic(replicas=4, stragglers=1).factors(3)
    {3: 1.0, 0: 1.0}
    """

    replicas: int
    stragglers: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def factors(self, replica: int) -> dict[int, float]:
        return {chunk: float(self._encoding[replica, chunk]) for chunk in self._chunks(replica)}

    def decodes(self, heard: Collection[int]) -> bool:
        return len(set(heard)) >= self.replicas - self.stragglers

    def weights(self, heard: Collection[int]) -> dict[int, float]:
        if not self.decodes(heard):
            raise ConfigurationError(
                f"{self} heard {len(set(heard))} replicas: {self.replicas - self.stragglers} are needed."
            )
        used = sorted(set(heard))[: self.replicas - self.stragglers]
        rows = self._encoding[used]
        found = np.linalg.lstsq(rows.T, np.ones(self.replicas), rcond=None)[0]
        off = float(np.abs(found @ rows - 1).max())
        if off > _OFF:
            raise ConfigurationError(
                f"{self}: a chunk's weight is {off:.1e} off after decoding, at most {_OFF} is sound; take fewer stragglers, or a Repetition."
            )
        return dict(zip(used, found.tolist(), strict=True))

    def _chunks(self, replica: int) -> list[int]:
        return [(replica + k) % self.replicas for k in range(self.stragglers + 1)]

    @cached_property
    def _encoding(self) -> NDArray[np.float64]:
        """B [n, n]."""
        n, s = self.replicas, self.stragglers
        encoding = np.zeros((n, n))
        if (n - s) % 2:
            roots = [power for power in range(n) if abs(2 * power - n) < s]
            row = np.real(np.poly(np.exp(2j * np.pi * np.array(roots) / n))) if roots else np.ones(1)
            row /= np.abs(row).max()
            for replica in range(n):
                encoding[replica, self._chunks(replica)] = row
            return encoding
        drawn = np.random.default_rng(self.seed).standard_normal((s, n))
        drawn[:, -1] = -drawn[:, :-1].sum(axis=1)
        for replica in range(n):
            others = self._chunks(replica)[1:]
            encoding[replica, replica] = 1.0
            encoding[replica, others] = -np.linalg.solve(drawn[:, others], drawn[:, replica]) if s else 0.0
        return encoding


def gradient_code(replicas: int, stragglers: int) -> GradientCode:
    """`Repetition` if s + 1 divides n, otherwise `Cyclic`.

    >>> gradient_code(4, 1), gradient_code(5, 1)
    (Repetition(replicas=4, stragglers=1), Cyclic(replicas=5, stragglers=1, seed=0))
    """
    alike = 0 <= stragglers < replicas and replicas % (stragglers + 1) == 0
    return Repetition(replicas, stragglers) if alike else Cyclic(replicas, stragglers)


def _check(code: Repetition | Cyclic) -> None:
    whole = type(code.replicas) is int and type(code.stragglers) is int
    if not whole or code.replicas < 1 or not 0 <= code.stragglers < code.replicas:
        raise ConfigurationError(
            f"{code}: whole numbers are needed, replicas >= 1 and 0 <= stragglers < replicas, so at most {code.replicas - 1}."
            if whole
            else f"{code}: whole numbers are needed."
        )
