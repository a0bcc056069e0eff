"""What all packages share: two types, and a view of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""State kept beside a piece: tensors by name, so that it can be saved, handed over and compared."""


class Observer(Protocol):
    """Hears the events of a run: called with each event, which happened at inner step `step`."""

    def __call__(self, event: str, step: int, **fields: Any) -> None: ...


def compact(tensor: Tensor) -> Tensor:
    """The elements of an expanded tensor that have memory of their own, as a view of it: of `x.expand(8)` those of x. Others are as given."""
    if tensor.layout != torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and stride == 0:
            tensor = tensor.select(dim, 0).unsqueeze(dim)  # `narrow` would keep the stride 0, which some views refuse
    return tensor
