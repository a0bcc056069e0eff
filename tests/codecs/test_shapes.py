"""The split of a flat tensor into matrices and the rest, against values by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs.shapes import split


@pytest.mark.parametrize(
    ("numel", "shapes", "matrices", "rest"),
    [
        (14, ((2, 3), (4,), (0, 5), (2, 1, 2)), {(2, 3): 0, (2, 2): 10}, [(6, 4), (10, 0), (14, 0)]),
        (15, ((2, 3), (4,)), {(2, 3): 0}, [(6, 4), (10, 5)]),
        (8, ((2, 3), (4, 4), (2, 1)), {(2, 3): 0}, [(6, 2)]),
        (3, (), {}, [(0, 3)]),
    ],
    ids=[
        "shapes of the whole tensor",
        "values after the last shape",
        "a shape beyond the end ends the list",
        "no shapes",
    ],
)
def test_a_flat_tensor_is_split_into_matrices_and_the_rest(
    numel: int, shapes: tuple[tuple[int, ...], ...], matrices: dict[tuple[int, int], int], rest: list[tuple[int, int]]
) -> None:
    found, others = split(torch.arange(numel), shapes)
    assert {tuple(one.shape): int(one.storage_offset()) for one in found} == matrices
    assert [(int(one.storage_offset()), one.numel()) for one in others] == rest
    assert all(one.dim() == 1 for one in others)
