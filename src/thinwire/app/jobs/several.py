"""Several losses of one job, each with its own optimizer: a min-max job descends and ascends in one inner step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Routed(torch.autograd.Function):
    """The first loss, whose backward pass sends each loss's gradient to the parameters of that loss only."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, gradients: list[Tensor | None], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, *grown: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if one is None else one * grown[0] for one in ctx.gradients))


def routed(losses: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """One scalar for `losses`, with the value of the first. In the backward pass loss n reaches only the parameters of optimizer n.

    So a generator's loss may use the discriminator without training it. All losses are computed with the weights before the step.
    """
    if not torch.is_grad_enabled():
        return losses[0]
    parameters: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for number, (loss, optimizer) in enumerate(zip(losses, optimizers, strict=True)):
        own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        more = number + 1 < len(losses)  # later losses may share a part of the graph
        parameters += own
        gradients += torch.autograd.grad(loss, own, retain_graph=more, allow_unused=True)
    routed_to: Tensor = _Routed.apply(losses[0].detach(), gradients, *parameters)  # type: ignore[no-untyped-call]
    return routed_to
