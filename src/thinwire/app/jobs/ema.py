"""An exponential moving average of a model's weights, kept as buffers: so checkpoints have it, and replicas agree on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EMA(nn.Module):
    """Averages a model's weights: a ← d·a + (1 − d)·θ at every `update`, d = min(decay, (1 + n)/(10 + n)) after n updates (as in TensorFlow).

    The averages are this module's buffers, so make it a part of the model. Each replica averages its own weights. If buffers are averaged
    (`Replica(buffers="mean")`), the averages of all replicas become their mean, which is the average of the replicas' mean weights, because
    the update is linear. It costs 4 bytes per parameter, and the same number on the wire in each evaluation.

    Args:
        model: its parameters that require gradients are averaged, in their own dtype.
        decay: the largest d, in [0, 1).

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> average = EMA(model, decay=0.9)
    >>> average.update(model)
    >>> torch.equal(average.weights()["weight"], model.weight)
    True
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        super().__init__()
        self.decay, self.names = decay, [name for name, p in model.named_parameters() if p.requires_grad]
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        for name, own in self._named(model):
            self.register_buffer(name, own.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add `model`'s present weights to the average."""
        n = int(self.get_buffer("updates"))
        decay = min(self.decay, (1 + n) / (10 + n))
        for name, own in self._named(model):
            self.get_buffer(name).lerp_(own, 1 - decay)
        self.get_buffer("updates").add_(1)

    def weights(self) -> dict[str, Tensor]:
        """The averages under the model's own names: `torch.func.functional_call(model, ema.weights(), inputs)` runs the model with them."""
        return {name: self.get_buffer(_flat(name)) for name in self.names}

    def _named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(_flat(name), model.get_parameter(name)) for name in self.names]


def _flat(name: str) -> str:
    """A buffer's name may have no dot."""
    return name.replace(".", "|")
