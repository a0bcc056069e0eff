"""Applies an aggregation rule to vectors as an exchange does."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.exchange.products import inner_products
from thinwire.pieces.aggregate import Aggregate, Values
from thinwire.rng import Key


def aggregated(rule: Aggregate, x: Tensor, key: Key = Key(seed=1)) -> Tensor:
    """Returns the aggregate of the rows of fp32 `x` under `rule`."""
    if rule.needs_products:
        rule = rule.given(inner_products(x), key)
    out = torch.zeros(x.shape[1])
    payloads = [row.contiguous().view(torch.uint8) for row in x]
    rule.into(out, [Values(Identity(), payload, Key(sender=i), len(out)) for i, payload in enumerate(payloads)])
    return out
