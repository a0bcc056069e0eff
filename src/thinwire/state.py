"""State kept beside a piece: a dict of tensors, so that it can be saved, handed over and compared."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

State = Mapping[str, Tensor]
