"""A model's own tensors, as PyTorch keeps them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.codecs.exact import energy
from thinwire.pieces.partition import is_sharded, local


def exported(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as whole tensors on the CPU, copied. With FSDP all ranks of a site must call it."""
    return {
        name.replace("_orig_mod.", ""): (value.full_tensor() if is_sharded(value) else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }


def reshard(model: nn.Module) -> None:
    """Let FSDP forget whole parameters that it has gathered: a forward pass without backward keeps the root's, stale."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it, nothing is wrapped by it
    for module in model.modules():
        if fsdp and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient, dense; one that is missing is made, as zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    found = local(parameter.grad)
    return found.to_dense() if found.is_sparse else found


def put_gradient(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the gradient; where it was sparse, of the rows that are not zero: an optimizer for sparse gradients takes no other."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = values.view_as(parameter).to(parameter).to_sparse(1)
    else:
        gradient(parameter).copy_(values)


def has_sparse(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any gradient is sparse, as of an embedding of which few rows were looked up."""
    return any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)


def _values(parameter: nn.Parameter) -> Tensor:
    """All of a gradient that is not known to be zero; it shares memory with it."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


def clip_alike(parameters: Iterable[nn.Parameter], most: float) -> float:
    """As `torch.nn.utils.clip_grad_norm_`, sparse gradients too; those that are equal on all replicas stay so, in the same bits on any
    processor.
    """
    gradients = [_values(parameter) for parameter in parameters if parameter.grad is not None]
    square = 0.0
    for one in gradients:
        square += energy(one.reshape(-1))
    norm = math.sqrt(square)
    for one in gradients if norm > most else []:
        one.mul_(most / (norm + 1e-6))
    return norm


def clip(parameters: Sequence[nn.Parameter], most: float, alike: bool) -> float:
    """The norm of all gradients, which is `most` at most afterwards; `alike`: they are equal on all replicas, and stay so."""
    if alike or has_sparse(parameters):  # of those torch takes no norm
        return clip_alike(parameters, most)
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    return float(getattr(norm, "full_tensor", lambda: norm)())


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make what is not finite zero in the optimizer's state, and begin anew with running statistics that are not."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                local(value).nan_to_num_(0.0, 0.0, 0.0)
    for module in model.modules():
        buffers = [b for b in module.buffers(recurse=False) if b.is_floating_point()]
        if isinstance(module, _NormBase) and not all(bool(torch.isfinite(b).all()) for b in buffers):
            module.reset_running_stats()
