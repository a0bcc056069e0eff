"""Computations with inner products of replicas' values, with the same bits on every machine."""

from __future__ import annotations

from torch import Tensor

from thinwire.codecs.exact import total


def times(a: Tensor, b: Tensor) -> Tensor:
    """a·b of small matrices in fp64, added in a fixed order."""
    return total(a.T[:, :, None] * b[:, None, :])


def squared_distances(products: Tensor) -> list[list[float]]:
    """‖x_i − x_j‖² from the inner products."""
    norms = products.diagonal()
    found: list[list[float]] = (norms[:, None] + norms[None, :] - 2 * products).clamp_(min=0.0).tolist()
    return found
