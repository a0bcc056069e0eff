"""Error feedback: what a codec lost is added to what is sent next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec, nested
from thinwire.errors import ConfigurationError
from thinwire.types import State


@dataclass(frozen=True)
class Feedback:
    """One recursion that covers almost every form of error feedback. For a delta s, with state h (reference) and e (residual):

        z = α·(s − h) + η·e      is encoded;  c is what it decodes to, on every replica
        estimate = h + c         of s; receivers know the mean of all h, so they need only c
        e ← β·e + s − estimate
        h ← κ·estimate

    | κ, η, β, α        | method                                                                      |
    |-------------------|-----------------------------------------------------------------------------|
    | 0, 1, 1, 1        | error feedback: EF14 (arXiv 1809.07599), 1-bit Adam, DGC (arXiv 1712.01887) |
    | 0, 0.95, 0.95, 1  | SparseLoCo (arXiv 2508.15706); with 0.999 DeMo (arXiv 2411.19870)           |
    | 1, 0, –, 1        | EF21 (arXiv 2106.05203)                                                     |
    | 1, in (0, 1), 1, 1| EControl (Gao, Islamov, Stich, arXiv 2311.05645)                            |
    | 1, 0, –, in (0, 1]| SCALLION's gain (arXiv 2308.08165)                                          |

    Nothing is lost: with β = 1 and η > 0, Σ estimates + e = Σ deltas, whatever the codec. A refused round does not change the
    state. The codec must be contractive (not `RandomK`; `Sign("l2")` at your own risk), otherwise e can grow without bound.

    *Source*: the papers of the table. *Differs*: h and e begin at 0, so nothing travels uncompressed at first. Every replica computes the mean
    of all h; there is no server. e gathers s, not the learning rate times s as in DeMo's and SparseLoCo's codes.
    SCALLION has unbiased codecs; here they must be contractive.

    State, in host memory: 4 bytes a parameter for e, if η > 0; 8 for h and the mean of all h, if κ = 1.

    Args:
        kappa: κ, the number 1 if differences to a reference travel, otherwise 0.
        eta, beta: η and β of the equations, in [0, 1].
        alpha: α of the equations, in (0, 1].

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> z = Feedback().signal(torch.tensor([1.0]), {"residual": torch.tensor([0.5])})
    >>> z.item()
    1.5
    """

    kappa: int = 0
    eta: float = 1.0
    beta: float = 1.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        fits = self.kappa in (0, 1) and 0 <= self.eta <= 1 and 0 <= self.beta <= 1 and 0 < self.alpha <= 1
        if not fits or (self.kappa == 0 == self.eta):
            raise ConfigurationError(
                f"{self}: kappa 0 or 1, eta and beta in [0, 1] and alpha in (0, 1] are needed, and kappa or eta above 0 "
                "(otherwise leave feedback=None)."
            )

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round; empty: the membership may change."""
        if not self.kappa:
            return ""
        return "keeps the mean of all references, and so needs the same replicas in every round; kappa=0 does not"

    def check(self, codec: Codec) -> None:
        """Raise `ConfigurationError` if with `codec` the residual could grow, or references and their mean could drift apart."""
        if any(c.samples for c in nested(codec)):
            raise ConfigurationError(
                f"{self} over {codec}: a contractive codec is needed, otherwise the residual grows; choose "
                "TopK, or leave feedback=None."
            )
        if self.kappa and codec.joint:
            raise ConfigurationError(
                f"{self} over {codec}: with kappa=1 the mean over all is needed, otherwise references drift from the agreed mean; choose the "
                "codec inside OverSenders, or kappa=0."
            )

    def init(self, numel: int) -> State:
        names = (["residual"] if self.eta else []) + (["reference", "agreed"] if self.kappa else [])
        return {name: torch.zeros(numel) for name in names}

    def signal(self, delta: Tensor, state: State, out: Tensor | None = None) -> Tensor:
        """z, the values to encode for `delta`. Here and in `settle`, delta and state may also be the same range of each."""
        if self.kappa:
            z = torch.sub(delta, state["reference"], out=out).mul_(self.alpha)
        elif self.alpha == 1:  # the same bits in fewer passes, and without another tensor
            if self.eta == 1:
                return torch.add(delta, state["residual"], out=out)
            return torch.mul(state["residual"], self.eta, out=out).add_(delta)
        else:
            z = torch.mul(delta, self.alpha, out=out)
        if self.eta:  # rounded as two operations, so alike on all devices
            z.add_(state["residual"] if self.eta == 1 else state["residual"] * self.eta)
        return z

    def settle(self, delta: Tensor, sent: Tensor, mean: Tensor, state: State, after: State) -> Tensor:
        """The estimate of the mean delta, the same on all replicas, from the own c (`sent`) and the `mean` of all.

        The new state goes into the tensors of `after`; `state` stays, `mean` may be overwritten.
        """
        if self.kappa:
            own = torch.add(state["reference"], sent, out=after["reference"])
            mean = torch.add(state["agreed"], mean, out=after["agreed"])
        else:
            own = sent
        if self.eta:
            residual = after["residual"]
            if self.beta == 1:
                torch.add(state["residual"], delta, out=residual).sub_(own)
            else:
                torch.mul(state["residual"], self.beta, out=residual).add_(delta).sub_(own)
        return mean
