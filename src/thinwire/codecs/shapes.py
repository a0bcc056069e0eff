"""The tensors of known shapes that lie one after another in a flat tensor."""

from __future__ import annotations

import math

from torch import Tensor

from thinwire.codecs.base import Shapes


def split(x: Tensor, shapes: Shapes) -> tuple[list[Tensor], list[Tensor]]:
    """Views of flat `x`: its matrices (more than two dimensions: the first by all others), and all the rest, flat, in order.

    What `shapes` do not cover is rest, and so is a tensor that reaches behind the end of `x`.
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


def checked(shapes: Shapes) -> Shapes:
    """`shapes` as tuples of whole numbers, so that equal shapes are equal values."""
    return tuple(tuple(int(length) for length in shape) for shape in shapes)
