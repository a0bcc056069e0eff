"""Splits a flat tensor into the concatenated tensors of known shapes."""

from __future__ import annotations

import math

from torch import Tensor

from thinwire.codecs.base import Shapes


def split(x: Tensor, shapes: Shapes) -> tuple[list[Tensor], list[Tensor]]:
    """Views of flat `x`: its matrices (of more dimensions: the first by all others), and the rest as flat tensors in order.

    Elements that `shapes` do not cover belong to the rest, and so does a tensor that extends beyond the end of `x`.
    """
    matrices, rest, begin = [], [], 0
    for shape in shapes:
        size = math.prod(shape)
        if begin + size > x.numel():
            break
        part = x[begin : begin + size]
        if len(shape) > 1 and size:
            matrices.append(part.view(shape[0], -1))
        else:
            rest.append(part)
        begin += size
    return matrices, [*rest, x[begin:]]


def as_tuples(shapes: Shapes) -> Shapes:
    """`shapes` as tuples of integers, so that equal shapes compare equal."""
    return tuple(tuple(int(length) for length in shape) for shape in shapes)
