"""A model's own tensors, as PyTorch keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from thinwire.codecs.exact import energy
from thinwire.comm.group import Group
from thinwire.errors import NonFiniteError
from thinwire.pieces.partition import local
from thinwire.runtime.handshake import agree_on_weights, digest

COMPARED = 100  # steps from one look at weights that should be equal to the next
_DRIFTED = (
    "the weights of the replicas have drifted apart: their processors, or their optimizers, round differently. All take replica 0's now, "
    f"and wherever it is found again, every {COMPARED} steps; thinwire.SGD(...).make(...) steps alike on all processors."
)


def exported(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as whole tensors on the CPU, copied. With FSDP all ranks of a site must call it."""
    return {
        name.replace("_orig_mod.", ""): (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .cpu()
        .clone()
        for name, value in model.state_dict().items()
    }


def reshard(model: nn.Module) -> None:
    """Let FSDP forget whole parameters that it has gathered: a forward pass without backward keeps the root's, stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
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


class Stepped:
    """The weights of replicas that step by themselves, each with its own optimizer, from equal gradients. Not every processor rounds
    alike, so they are compared now and then, and where they have drifted apart all take replica 0's; `say` hears of it once.
    """

    def __init__(
        self, model: nn.Module, weights: Callable[[], Sequence[Tensor]], group: Group, say: Callable[[str], None]
    ) -> None:
        self._model, self._weights, self._group, self._say = model, weights, group, say
        self._alike = digest(weights())  # of what all held when that was known last
        self._drifted = False

    def after(self, step: int) -> None:
        """All have taken inner step `step`."""
        if step % COMPARED == 0:
            self.compare()

    @torch.no_grad()
    def compare(self) -> None:
        """Collective. 24 bytes to each other replica; where they differ the weights besides, from replica 0 to each."""
        self._alike, differ = agree_on_weights(self._group, self._weights(), "comparison")
        if differ:
            reshard(self._model)
            if not self._drifted:
                self._say(_DRIFTED)
            self._drifted = True

    def check(self) -> None:
        """Raise `NonFiniteError` where the own weights are not finite: there is no anchor to start again from."""
        if not all(bool(torch.isfinite(weight).all()) for weight in self._weights()):
            raise NonFiniteError(
                f"the weights of replica {self._group.rank} hold NaN or infinity, and data-parallel training keeps no "
                "anchors to start again from; go on from the last checkpoint."
            )

    def facts(self) -> dict[str, str]:
        """What to save, for JSON."""
        return {"alike": self._alike.hex(), "own": digest(self._weights()).hex()}

    def resume(self, facts: Mapping[str, str]) -> bytes:
        """Go on from `facts`. What must be equal on all who do so: `alike`, or the digest of weights that are not those that were saved."""
        own = digest(self._weights())
        self._alike = bytes.fromhex(facts["alike"]) if facts.get("own") == own.hex() else own
        return self._alike
