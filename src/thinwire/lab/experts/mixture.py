"""Several language models as one: their exact mixture. At each token an expert's weight follows from how well it predicted the text so far.

Branch-Train-Merge (Li et al., arXiv 2208.03306, section 2) and HDEE (Ersoy et al., arXiv 2502.19385) infer in this way:

    l_j(t) = Σ_{u<t} log p_j(x_u | x_<u)      P(j | x_<t) = softmax_j(l_j(t) + log P(j))      p(x_t | x_<t) = Σ_j P(j | x_<t) p_j(x_t | x_<t)

The posterior never sees the token that it predicts. Probabilities are mixed, not logits and not log probabilities. So for every
text of T tokens, in nats per token: loss of the mixture ≤ loss of any expert j + log(1 / P(j)) / T.

Shapes: K experts, B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from thinwire.app.trainer.model import LanguageModel, Output, token_loss
from thinwire.app.trainer.trained import scores_of
from thinwire.errors import ConfigurationError

DECAY = 0.3  # the share of the cached prior that a sequence keeps
SEQUENCES = 100  # of development text that the cached prior is made from


class Mixture(nn.Module):
    """tokens_BT → `Output`, as a `LanguageModel`: the logits are log p of the mixture. `log_prior_K` is kept in fp64.

    If a context is truncated, as `generate` does, the posterior uses the truncated context only.
    Raises `ConfigurationError` for no experts, vocabularies that differ, and a prior that is no distribution.

    >>> from thinwire.app.trainer.model import Architecture, Transformer
    >>> experts = [Transformer(Architecture(layers=1, width=32, heads=1), seed) for seed in (0, 1)]
    >>> Mixture(experts)(torch.zeros(1, 8, dtype=torch.long)).logits.exp().sum(-1).allclose(torch.ones(1, 8))
    True
    """

    log_prior_K: Tensor

    def __init__(self, experts: Sequence[nn.Module], prior: Sequence[float] | None = None) -> None:
        super().__init__()
        prior = [1 / max(1, len(experts))] * len(experts) if prior is None else prior
        if not experts or len(prior) != len(experts) or not math.isclose(sum(prior), 1) or min(prior) <= 0:
            raise ConfigurationError(
                f"{len(experts)} experts with prior={prior}: a share above 0 for each expert is needed, with the sum 1."
            )
        models: list[LanguageModel] = list(experts)  # type: ignore[arg-type]
        if len({model.vocabulary for model in models}) > 1:
            raise ConfigurationError(
                f"experts with {[model.vocabulary for model in models]} tokens: one tokenizer for all is needed; branch from the same run."
            )
        self.experts = nn.ModuleList(experts)
        self.vocabulary, self.context = models[0].vocabulary, min(model.context for model in models)
        self.log_prior_K = torch.tensor(prior, dtype=torch.float64).log()

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        logs_KBTV = torch.stack([expert(tokens_BT).logits.float().log_softmax(-1) for expert in self.experts])
        # The token after the last one is not known; `posterior` does not ask for its score.
        next_BT = torch.cat((tokens_BT[:, 1:], tokens_BT[:, :1]), 1)
        scores_KBT = logs_KBTV.gather(-1, next_BT.expand(len(self.experts), -1, -1).unsqueeze(-1)).squeeze(-1)
        weights_KBT = self.posterior(scores_KBT)[..., :-1].to(logs_KBTV)
        logits_BTV = (logs_KBTV + weights_KBT.unsqueeze(-1)).logsumexp(0)
        return Output(logits_BTV, None if targets_BT is None else token_loss(logits_BTV, targets_BT))

    @torch.no_grad()
    def scores(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """log p_j(target | tokens up to it) of each expert, KBT in fp64; one expert's logits are in memory at a time."""
        return torch.stack([scores_of(expert, tokens_BT, targets_BT) for expert in self.experts])

    def posterior(self, scores_KBT: Tensor) -> Tensor:
        """log P(j | x_<t) for t = 0 ... T, fp64: entry t has seen the first t scores, so the first entry is the prior."""
        seen = nn.functional.pad(scores_KBT, (1, 0)).double().cpu().cumsum(-1)
        return (seen + self.log_prior_K[:, None, None]).log_softmax(0)

    def mixed(self, scores_KBT: Tensor) -> Tensor:
        """log p of the mixture for the same targets, BT in fp64."""
        return (self.posterior(scores_KBT)[..., :-1] + scores_KBT.double().cpu()).logsumexp(0)


def cached_prior(mixture: Mixture, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """P(j) as an exponential moving average over sequences: P ← d · P + (1 − d) · P(j | sequence), starting from the uniform prior; d is `DECAY`.

    Each posterior is taken under the uniform prior. *Differs*: the reference code takes it under the average so far, and multiplies it
    by decay^(i+1) at sequence i, so that only the last sequence counts. No share becomes 0.
    """
    count = len(mixture.experts)
    uniform = Mixture(list(mixture.experts))
    prior_K = torch.full((count,), 1 / count, dtype=torch.float64)
    for tokens, targets in batches:
        for after_K in uniform.posterior(uniform.scores(tokens, targets))[..., -1].exp().T:
            prior_K = DECAY * prior_K + (1 - DECAY) * after_K
    return [float(share) for share in prior_K / prior_K.sum()]
