"""A model's own tensors, as PyTorch keeps them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

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
    """This rank's part of the gradient; one that is missing is made, as zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def clip_alike(parameters: Iterable[nn.Parameter], most: float) -> float:
    """As `torch.nn.utils.clip_grad_norm_`, but of gradients that are equal on all replicas, and so in the same bits on any processor."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = 0.0
    for one in gradients:
        square += energy(one.reshape(-1))
    norm = math.sqrt(square)
    for one in gradients if norm > most else []:
        one.mul_(most / (norm + 1e-6))
    return norm


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
