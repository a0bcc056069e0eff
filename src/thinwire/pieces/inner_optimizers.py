"""Inner optimizers that belong to a method: they make the optimizer, and check which others may replace it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigurationError, ModelError
from thinwire.pieces.inner import Inner
from thinwire.pieces.partition import Strided, is_sharded, trainable


@dataclass(frozen=True)
class AdamW(Inner):
    """torch.optim.AdamW, fused; the betas are those of DiLoCo's scaling laws (arXiv 2503.09799).

        m ← β₁·m + (1 − β₁)·g,   v ← β₂·v + (1 − β₂)·g²,   θ ← θ − η·λ·θ − η·m̂ / (√v̂ + ε)

    m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ), ε = 1e-8, η the learning rate, λ the weight decay.

    *Source*: Loshchilov, Hutter (arXiv 1711.05101, Algorithm 2). *Differs*: η multiplies λ, as in torch; in the paper only
    the schedule of η does.

    Args:
        beta1, beta2: decay of the moments, in [0, 1).

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> AdamW().make(torch.nn.Linear(2, 1), lr=0.1, weight_decay=0.0).defaults['betas']
    (0.9, 0.99)
    """

    beta1: float = 0.9
    beta2: float = 0.99

    lr_factor = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigurationError(f"{self}: 0 <= beta1, beta2 < 1 is needed; 0.9 and 0.99 are usual.")

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        parameters, betas = _parameters(model), (self.beta1, self.beta2)
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        _expect(self, optimizer, torch.optim.AdamW)


@dataclass(frozen=True)
class SGD(Inner):
    """torch.optim.SGD, with steps that round alike on all processors. Its weight decay passes through the momentum, so the given value
    is divided by the factor that momentum and `lr_factor` add.

        v ← μ·v + g + λ'·θ,   θ ← θ − η·f·v,   λ' = λ·(1 − μ)/f          μ = `momentum`, f = `lr_factor`, λ: the given weight decay

    *Source*: none; the usual SGD with momentum.

    Args:
        momentum: in [0, 1).
        lr_factor: times the learning rate of the run.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> SGD(0.9).make(torch.nn.Linear(2, 1), lr=0.1, weight_decay=0.0).defaults['lr']
    0.1
    """

    momentum: float = 0.0
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not self.lr_factor > 0:
            raise ConfigurationError(f"{self}: 0 <= momentum < 1 and lr_factor > 0 are needed; 0 or 0.9 are usual.")

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        decay = weight_decay * (1 - self.momentum) / self.lr_factor
        return UnfusedSGD(_parameters(model), lr * self.lr_factor, momentum=self.momentum, weight_decay=decay)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        _expect(self, optimizer, torch.optim.SGD)
        momenta = {group["momentum"] for group in optimizer.param_groups}
        if momenta != {self.momentum}:
            raise ConfigurationError(
                f"the strategy's inner optimizer is {self}, the given one has momentum {', '.join(map(str, sorted(momenta)))}; "
                f"give torch.optim.SGD(..., momentum={self.momentum})."
            )


@dataclass(frozen=True)
class Muon(Inner):
    """torch.optim.Muon for the matrices in the layers and AdamW for the rest (embeddings, head, vectors), as one optimizer.

        B ← μ·B + (1 − μ)·G,   O = NS(μ·B + (1 − μ)·G),   Θ ← Θ − η·λ·Θ − η·0.2·√max(rows, columns)·O

    NS: five Newton–Schulz steps towards the nearest orthogonal matrix; μ: `momentum`, G: the gradient, λ: the weight decay.

    *Source*: Muon (Jordan et al., 2024), with the update's RMS matched to AdamW's (Liu et al., arXiv 2502.16982), so that learning rate
    and weight decay are AdamW's. MuLoCo (arXiv 2505.23725) is DiLoCo with it. *Differs*: nothing in the update, which is torch's; only matrices
    inside the list of layers get it. Needs whole matrices, not sharded ones.

    Args:
        momentum: of Muon, in [0, 1).

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Muon()
    Muon(momentum=0.95)
    """

    momentum: float = 0.95

    lr_factor = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"{self}: 0 <= momentum < 1 is needed; 0.95 is usual.")

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        outside, *layers = [fragment.parameters for fragment in Strided(1).fragments(model)]
        inside = layers[0] if layers else outside  # a model may consist of layers only
        matrices = [p for _, p in inside if p.dim() == 2]
        if not matrices:
            raise ModelError(
                f"{self}: matrices inside a list of layers are needed, this model has none; choose AdamW()."
            )
        if any(is_sharded(p) for p in matrices):
            raise ConfigurationError(
                f"{self} on a sharded replica: whole matrices are needed; choose AdamW(), or one rank a replica."
            )
        chosen = {id(p) for p in matrices}
        rest = [p for p in _parameters(model) if id(p) not in chosen]
        parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr, weight_decay, self.momentum, adjust_lr_fn="match_rms_adamw")
        ]
        if rest:  # adapters are all matrices inside the layers
            parts.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay))
        return Both(*parts)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(isinstance(part, torch.optim.Muon) for part in getattr(optimizer, "parts", [optimizer])):
            raise ConfigurationError(
                f"the strategy's inner optimizer is {self}, {type(optimizer).__name__} was given; give what "
                "thinwire.pieces.inner_optimizers.Muon().make(model, lr, weight_decay) returns, or leave inner=None in the strategy."
            )


@dataclass(frozen=True)
class SAM(Inner):
    """Sharpness-aware minimisation (Foret et al., arXiv 2010.01412) around another inner optimizer: its steps take the gradient at the worst
    point nearby.

        ĝ = ∇f(θ + radius·g / ‖g‖),   g = ∇f(θ),   the same batch twice, ‖·‖ over all parameters of the replica

    An inner step takes twice the computing. The perturbation never stays in the weights, and buffers, such as running statistics, are updated
    once. Needs whole parameters, not sharded ones.

    *Differs*: any inner optimizer steps along ĝ, in the paper's Algorithm 1 SGD. Without a gradient, or with one that is not finite, weights are
    not perturbed.

    Args:
        inner: the optimizer that steps along ĝ.
        radius: ρ, the L2 norm of the perturbation, 0 or more. 0: `inner` alone, bit for bit.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> SAM(SGD(0.9), radius=0.05)
    SAM(inner=SGD(momentum=0.9, lr_factor=1.0), radius=0.05)
    """

    inner: Inner = AdamW()
    radius: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Inner) or isinstance(self.inner, type | SAM):
            raise ConfigurationError(f"SAM(inner={self.inner!r}): AdamW(), SGD() or Muon() is needed.")
        if not 0 <= self.radius < math.inf:
            raise ConfigurationError(f"SAM(radius={self.radius}): 0 or more is needed; 0.01 to 0.05 are usual.")

    @property
    def lr_factor(self) -> float:
        return self.inner.lr_factor

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        if any(is_sharded(p) for p in _parameters(model)):
            raise ConfigurationError(
                f"{self} on a sharded replica: the norm of all its gradients is needed, a rank has its shards'; choose {self.inner}, or one "
                "rank a replica."
            )
        return SharpnessAware(self.inner.make(model, lr, weight_decay), model, self.radius)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, SharpnessAware) or optimizer.radius != self.radius:
            raise ConfigurationError(
                f"the strategy's inner optimizer is {self}, {type(optimizer).__name__} was given; give what "
                f"thinwire.pieces.inner_optimizers.SharpnessAware(optimizer, model, radius={self.radius:g}) returns."
            )
        self.inner.check(optimizer.parts[0])


class UnfusedSGD(torch.optim.SGD):
    """v ← momentum·v + g + weight_decay·θ;  θ ← θ − lr·v: torch.optim.SGD, with its state, but every product and sum is rounded
    separately. torch rounds a product and its sum once or twice, depending on the processor, so replicas with equal gradients drift apart.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _move(self, parameter: Tensor, lr: float, momentum: float, decay: float) -> None:
        direction = parameter.grad
        assert direction is not None
        if decay:
            direction = direction + parameter * decay
        if momentum:
            before = self.state[parameter].get("momentum_buffer")
            direction = direction.clone() if before is None else before.mul_(momentum).add_(direction)
            self.state[parameter]["momentum_buffer"] = direction
        parameter.sub_(direction * lr)


class Both(torch.optim.Optimizer):
    """Several optimizers for different parameters as one, with one state and one list of groups."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        self.parts: Sequence[torch.optim.Optimizer] = ()
        super().__init__(groups, {})
        self.parts = parts
        self._counts = [len(part.param_groups) for part in parts]
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give the parts this optimizer's groups and state, which loading replaces."""
        begin = 0
        for part, count in zip(self.parts, self._counts):
            part.param_groups, part.state = self.param_groups[begin : begin + count], self.state
            if isinstance(part, Both):
                part._share()
            begin += count


class SharpnessAware(Both):
    """`SAM` for a loop. `step(closure)` calls the closure twice, at θ and at the worst point nearby; or put `perturbed` around the second backward.

    Args:
        optimizer: steps along the second gradient; this optimizer shares its groups and state.
        model: its buffers are set back after the second backward.
        radius: ρ, the norm of the perturbation.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> sharp = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), model, radius=0.5)
    >>> def closure():
    ...     sharp.zero_grad()
    ...     loss = model(torch.ones(1, 1)).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> _ = nn.init.ones_(model.weight)
    >>> _ = sharp.step(closure)
    >>> round(model.weight.item(), 4)  # the gradient at 1.5 is 3
    0.7
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, radius: float) -> None:
        self.radius, self._model, self._ready = radius, model, False
        super().__init__(optimizer)

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """A context in which the weights are θ + radius·g / ‖g‖ and all gradients are cleared. Call backward once more in it, on the same batch."""
        with torch.no_grad():
            held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            before = [p.detach().clone() for p in held]
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            scale = self.radius / (float(norm) + 1e-12)
            for p in held if math.isfinite(scale) and scale > 0 else []:
                assert p.grad is not None
                p.add_(p.grad, alpha=scale)
        self.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(held, before):
                    p.copy_(value)
                for buffer, value in buffers:
                    buffer.copy_(value)
        self._ready = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step with a closure that sets all gradients to zero and computes the loss and the gradients. Raises `ModelError` without a closure,
        unless the gradients are those of `perturbed`, or all are None: that skips an update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
                with self.perturbed():
                    closure()
        elif not self._ready and any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise ModelError(
                "step() of SAM without a closure, and no backward inside perturbed(): it would step along the gradient at the weights "
                "themselves. Call step(closure), or backward once more within `with optimizer.perturbed():`."
            )
        self._ready = False
        for part in self.parts:  # not `super().step()`: torch wraps each class's own `step`, so hooks would run twice
            part.step()
        return loss


def at_the_worst_point(optimizer: torch.optim.Optimizer, backward: Callable[[], float]) -> float:
    """Compute the gradients of a step, and return the loss at the weights themselves.

    Args:
        optimizer: the inner optimizer; if it is `SharpnessAware`, the gradients are those at the worst point nearby.
        backward: computes gradients and returns the loss; with `SharpnessAware` it is called twice, on the same batch.

    >>> at_the_worst_point(torch.optim.SGD(nn.Linear(1, 1).parameters()), lambda: 0.5)
    0.5
    """
    loss = backward()
    if isinstance(optimizer, SharpnessAware):
        with optimizer.perturbed():
            backward()
    return loss


def _expect(inner: Inner, optimizer: torch.optim.Optimizer, kind: type) -> None:
    if not isinstance(optimizer, kind):
        raise ConfigurationError(
            f"the strategy's inner optimizer is {inner}, {type(optimizer).__name__} was given; give torch.optim.{kind.__name__}, or leave "
            "inner=None in the strategy to train with another optimizer."
        )


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter for _, parameter in trainable(model)]
