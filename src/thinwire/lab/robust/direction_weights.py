"""Robust rules that weigh replicas by directions: by the subspace that most share, or by the similarity of their histories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.lab.robust.by_products import as_row
from thinwire.lab.robust.coordinates import RobustRule
from thinwire.lab.robust.products import times
from thinwire.rng import Key
from thinwire.types import State

_SWEEPS = 30
_EXACT = Context(prec=30)


def eigen(matrix: Tensor) -> tuple[list[float], Tensor]:
    """Eigenvalues in descending order, and eigenvectors as columns, of a symmetric matrix in fp64, by Jacobi's rotations. Sums and products
    have a fixed order, so the bits do not depend on the machine.
    """
    a, size = matrix.clone(), len(matrix)
    vectors = torch.eye(size, dtype=torch.float64)
    least = 1e-30 * max(math.fsum(a.diagonal().square().tolist()), 1e-300)
    for _ in range(_SWEEPS):
        if math.fsum((a - torch.diag(a.diagonal())).square().flatten().tolist()) <= least:
            break
        for i in range(size):
            for j in range(i + 1, size):
                _rotate(a, vectors, i, j)
    values: list[float] = a.diagonal().tolist()
    order = sorted(range(size), key=lambda index: (-values[index], index))
    return [values[index] for index in order], vectors[:, order]


def _rotate(a: Tensor, vectors: Tensor, i: int, j: int) -> None:
    """Make a[i, j] zero, in place."""
    off = float(a[i, j])
    if off == 0.0:
        return
    half = (float(a[j, j]) - float(a[i, i])) / (2 * off)
    tangent = math.copysign(1.0, half) / (abs(half) + math.sqrt(half * half + 1)) if abs(half) < 1e150 else 0.5 / half
    cosine = 1 / math.sqrt(tangent * tangent + 1)
    sine = tangent * cosine
    for rows in (a, a.T, vectors.T):
        first, second = rows[i].clone(), rows[j].clone()
        rows[i] = first * cosine - second * sine
        rows[j] = first * sine + second * cosine


@dataclass(frozen=True)
class FlagAggregator(RobustRule):
    """The mean of all directions after projection to the subspace that they share most:  x̂ = s·(1/M)·Y·Yᵀ·Σ_i x_i/‖x_i‖.

        Y = argmin Σ_i √(1 − ‖Yᵀx_i‖²/‖x_i‖²) over orthonormal Y of ⌈(M + 1)/2⌉ columns;   s = the median of ‖x_i‖

    *Source*: Almasi et al. (arXiv 2302.05865, §3), without its pairwise term (λ = 0, its default), by its iterative weights
    (1 − v_i)^(−1/4), until the objective falls by less than 1e-10. *Differs*: the released code iterates once from a random Y, divides by the
    columns of Y, and returns the mean of unit vectors; here the median norm gives it a scale. It is blind to signs: negated values are in
    the same subspace. Its scale bounds how far fewer than half of the replicas can move it.

    *Wire* and cost: as `Krum`.

    >>> x = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    >>> [round(value, 6) for value in (FlagAggregator().mixing(x @ x.T, Key()) @ x)[0].tolist()]
    [2.0, 0.0]
    """

    needs_products: ClassVar[bool] = True

    def tolerates(self, size: int) -> int:
        return (size - 1) // 2

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        norms = [math.sqrt(max(0.0, square)) for square in products.diagonal().tolist()]
        scale = sorted(norms)[(len(norms) - 1) // 2]
        there = torch.tensor([1 / norm if norm else 0.0 for norm in norms], dtype=torch.float64)
        cosines = products * there[:, None] * there[None, :]
        weights, before = torch.ones_like(there), math.inf
        for _ in range(20):
            basis = self._basis(cosines, weights)
            seen = times(cosines, basis)  # Yᵀx̂_i, a row each
            missing = [max(0.0, 1.0 - math.fsum(row)) for row in seen.square().tolist()]
            objective = math.fsum(math.sqrt(one) for one in missing)
            if before - objective < 1e-10:
                break
            before = objective
            weights = torch.tensor([1 / math.sqrt(math.sqrt(one + 1e-7)) for one in missing], dtype=torch.float64)
        mean = times(basis, _column(seen))
        return (mean[:, 0] * there * (scale / len(norms)))[None, :]

    def _basis(self, cosines: Tensor, weights: Tensor) -> Tensor:
        """Y as weights of the unit vectors, [M, columns]."""
        columns = -(-(len(weights) + 1) // 2)
        values, vectors = eigen(weights[:, None] * cosines * weights[None, :])
        kept = [place for place in range(min(columns, len(values))) if values[place] > 1e-12 * values[0]]
        scale = torch.tensor([1 / math.sqrt(values[place]) for place in kept], dtype=torch.float64)
        return weights[:, None] * vectors[:, kept] * scale[None, :]


def _column(rows: Tensor) -> Tensor:
    """The sum over the rows as a column, added in a fixed order."""
    return times(torch.ones(1, len(rows), dtype=torch.float64), rows).T.contiguous()


@dataclass(frozen=True)
class FoolsGold(RobustRule):
    """Give less weight to replicas that resemble each other in all they have sent: a defence against many replicas of one liar (Sybils), not one.

        h_i ← h_i + x_i;   c_ij = cos(h_i, h_j), c_ii = 0;   m_i = max_j c_ij + 1e-5;   c_ij ← c_ij·m_i/m_j where m_i < m_j
        w_i = clip(1 − max_j c_ij, 0, 1), divided by the largest, at most 0.99;   w_i ← clip(ln(w_i/(1 − w_i) + 1e-5) + ½, 0, 1)
        x̂ = Σ_i w_i·x_i / Σ_i w_i

    *Source*: Fung et al. (arXiv 1808.04866, Algorithm 1; the released code's constants). *Differs*: the released code does not divide by the sum of
    the weights; without that the outer step's rate would depend on similarity. *Only if the replicas' data differ*: on similar data honest replicas
    resemble each other and lose all weight, and a liar keeps its weight. It does not tolerate a single liar, so NaN is refused as with a mean.

    *Wire*: as `Krum`. State: 4·M bytes a value that is aggregated here: all with `Direct`, a shard with `TwoShot`.

    >>> h = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    >>> FoolsGold().mixing(h @ h.T, Key()).tolist()
    [[1.0, 0.0, 0.0]]
    """

    needs_products: ClassVar[bool] = True

    def tolerates(self, size: int) -> int:
        return 0

    def init(self, numel: int, size: int) -> State:
        return {f"history{rank}": torch.zeros(numel) for rank in range(size)}

    def measured(self, values: Tensor, before: State, after: State) -> Tensor:
        for rank, row in enumerate(values):
            torch.add(before[f"history{rank}"], row, out=after[f"history{rank}"])
        return torch.stack([after[f"history{rank}"] for rank in range(len(values))])

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        weights = foolsgold(products)
        total = math.fsum(weights)
        return as_row([weight / total if total else 1 / len(weights) for weight in weights])


def foolsgold(products: Tensor, first: int | None = None) -> list[float]:
    """The weights from the inner products of histories, not divided by their sum; those of the `first` histories alone, which the others
    only are compared with.
    """
    size, norms = len(products), [math.sqrt(max(0.0, square)) for square in products.diagonal().tolist()]
    likeness = [
        [
            float(products[i, j]) / (norms[i] * norms[j]) if i != j and norms[i] and norms[j] else 0.0
            for j in range(size)
        ]
        for i in range(size)
    ]
    most = [max(row) + 1e-5 for row in likeness]
    for i in range(size):
        for j in range(size):
            if i != j and most[i] < most[j]:
                likeness[i][j] *= most[i] / most[j]
    weights = [min(1.0, max(0.0, 1 - max(row))) for row in likeness][:first]
    largest = max(weights, default=0.0)
    shares = [min(0.99, weight / largest) if largest else 0.0 for weight in weights]
    return [min(1.0, max(0.0, _logarithm(share / (1 - share) + 1e-5) + 0.5)) for share in shares]


def _logarithm(x: float) -> float:
    """ln x, with the same rounding on all machines."""
    return float(Decimal(x).ln(_EXACT))
