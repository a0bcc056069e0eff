"""Gradients of the mean over all tokens of a step, if micro-batches and replicas have different numbers of tokens.

ByteScale (arXiv 2502.21231): the mean of the micro-batches' means gives a token in a short micro-batch a larger weight. So a loss may be
a sum over tokens with their number, and the sum of all gradients is divided by the number of all tokens:

    g = Σ_m Σ_i ∇S_mi / Σ_m Σ_i T_mi

over micro-batches i, and over replicas m if gradients are exchanged. If deltas are exchanged, each replica takes its own steps, and
the weight of a delta is its number of tokens (drivers/token_weights.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinwire.app.jobs.base import Summed
from thinwire.comm import Group
from thinwire.comm.group import gather
from thinwire.drivers.attached import Attached
from thinwire.drivers.module_state import separate_gradients
from thinwire.errors import PacketError
from thinwire.replica import Replica

_TOKENS = struct.Struct("<d")


def by_samples(loss: Tensor | Summed, samples: int) -> Summed:
    """A mean over samples as a sum over them, so that a replica with larger micro-batches than others counts as much more."""
    return loss if isinstance(loss, Summed) else Summed(loss * samples, samples)


def descend(
    model: nn.Module, replica: Replica | Attached, loss: Callable[[int], Tensor | Summed], accumulate: int
) -> float:
    """Do the backward passes of all micro-batches of the next step. Returns the loss of this replica."""
    total = tokens = 0.0
    for micro in range(accumulate):
        part = loss(replica.step * accumulate + micro)
        if isinstance(part, Summed):
            tokens, part = tokens + part.tokens, part.total
        else:
            part = part / accumulate
        torch.autograd.backward(part)
        total += float(part.detach())
    if tokens:
        _divide_by_tokens(model, replica, tokens)
    return total / tokens if tokens else total


@torch.no_grad()
def _divide_by_tokens(model: nn.Module, replica: Replica | Attached, tokens: float) -> None:
    """Turn gradients of a sum into those of the mean over all tokens. Collective if gradients are exchanged: 16 bytes to each other replica."""
    if not replica.own_loop and replica.tokens is not None:
        replica.tokens = tokens  # the weight of a delta
    if not replica.own_loop and replica.strategy.exchanges_gradients:
        tokens = _mean_over_replicas(replica.group, tokens)  # type: ignore[arg-type]  # Gradients need a fixed group
    separate_gradients(model.parameters())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(tokens)


def _mean_over_replicas(group: Group, tokens: float) -> float:
    told = [_number(said) for said in gather(group, _TOKENS.pack(tokens), _TOKENS.size, "tokens")]
    return math.fsum(told) / len(told)


def _number(said: bytes) -> float:
    value = _TOKENS.unpack(said)[0] if len(said) == _TOKENS.size else math.nan
    if not math.isfinite(value) or value <= 0:
        raise PacketError(f"{said!r} is no number of tokens; does the job's loss give one on every replica?")
    return float(value)
