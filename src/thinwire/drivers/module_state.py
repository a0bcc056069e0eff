"""Access to a model's weights and gradients."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.codecs.exact import energy
from thinwire.pieces.partition import is_sharded, local


def export_state(model: nn.Module) -> dict[str, Any]:
    """The state dict with whole tensors on the CPU; a copy, with what modules give as extra state. With FSDP all ranks of a site must call it."""

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return (value.full_tensor() if is_sharded(value) else value).detach().cpu().clone()

    return {name.replace("_orig_mod.", ""): whole(value) for name, value in model.state_dict().items()}


def reshard(model: nn.Module) -> None:
    """Let FSDP release the parameters that it has gathered, because after a forward pass without backward it keeps stale ones of the root."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was not imported, no module is wrapped by it
    for module in model.modules():
        if fsdp and isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode; afterwards each of its modules is in its own mode again, also a frozen one."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # a module comes before those inside it
            if module.training != training:
                module.train(training)


def gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient, dense; zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    found = local(parameter.grad)
    return found.to_dense() if found.is_sparse else found


def put_gradient(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the gradient to `values`. A sparse gradient stays sparse, with the rows that are not zero, because its optimizer takes no other."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = values.view_as(parameter).to(parameter).to_sparse(1)
    else:
        gradient(parameter).copy_(values)


def separate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient memory of its own, so that one can be changed and no other. After backward, autograd may have made several as views
    of one tensor: those of a and b in `a.unsqueeze(0) + b.unsqueeze(0)`.
    """
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    end = 0
    for parameter in sorted(dense, key=lambda p: gradient(p).data_ptr()):
        own = gradient(parameter)
        if own.data_ptr() < end:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        end = max(end, own.data_ptr() + own.nbytes)


def has_sparse(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any gradient is sparse, such as that of a sparse embedding."""
    return any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)


def _values(parameter: nn.Parameter) -> Tensor:
    """The stored values of a gradient, as a view."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


def clip_alike(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Like `torch.nn.utils.clip_grad_norm_`, also for sparse gradients. Gradients that are equal on all replicas stay equal, with the same
    bits on any processor.
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
    """Clip the gradients to the norm `most`, and return their earlier norm. `alike`: they are equal on all replicas, and stay equal."""
    separate_gradients(parameters)
    if alike or has_sparse(parameters):  # torch cannot take the norm of sparse gradients
        return clip_alike(parameters, most)
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    return float(getattr(norm, "full_tensor", lambda: norm)())


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set values that are not finite to zero in the optimizer's state, and reset running statistics that are not finite."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                local(value).nan_to_num_(0.0, 0.0, 0.0)
    for module in model.modules():
        buffers = [b for b in module.buffers(recurse=False) if b.is_floating_point()]
        if isinstance(module, _NormBase) and not all(bool(torch.isfinite(b).all()) for b in buffers):
            module.reset_running_stats()
