"""The mixture of experts: its guarantee for every text, on sources whose probabilities are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.app.trainer.model import Architecture, Output, Transformer
from thinwire.errors import ConfigurationError
from thinwire.lab.experts.mixture import Mixture, cached_prior

V, T = 12, 64


class Bigrams(nn.Module):
    """A source in which the distribution of the next token depends on the token; `sharpness` makes it easy or hard to predict."""

    vocabulary, context = V, 4096

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        super().__init__()
        drawn = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * sharpness
        self.logits = nn.Parameter(drawn)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        return Output(self.logits[tokens_BT], None)

    def write(self, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns tokens_BT and targets_BT drawn from this source."""
        generator, tokens = torch.Generator().manual_seed(seed), [torch.zeros(rows, dtype=torch.long)]
        for _ in range(length):
            tokens.append(torch.multinomial(self.logits[tokens[-1]].softmax(-1), 1, generator=generator)[:, 0])
        both = torch.stack(tokens, 1)
        return both[:, :-1], both[:, 1:]


SOURCES = [Bigrams(0, 3.0), Bigrams(1, 2.0), Bigrams(2, 1.0)]


@given(st.integers(0, 2), st.integers(0, 1000), st.lists(st.floats(0.001, 1), min_size=3, max_size=3))
def test_the_mixtures_loss_exceeds_an_experts_by_at_most_its_prior(source, seed, shares):
    """The bound holds for each sequence. Exactly: the probability of a text is the mean of the experts', weighed by priors (chain rule)."""
    prior = [share / sum(shares) for share in shares]
    tokens, targets = SOURCES[source].write(4, T, seed)
    mixture = Mixture(SOURCES, prior)
    scores = mixture.scores(tokens, targets)
    loss_B = -mixture.mixed(scores).mean(-1)
    for expert, share in enumerate(prior):
        assert (loss_B <= -scores[expert].mean(-1) + math.log(1 / share) / T + 1e-9).all()
    of_text = (scores.sum(-1) + torch.tensor(prior, dtype=torch.float64).log()[:, None]).logsumexp(0)
    assert torch.allclose(-loss_B * T, of_text, rtol=1e-12)
    # As a language model it gives the same loss, in fp32.
    output = mixture(tokens, targets)
    logs = output.logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(logs.double(), mixture.mixed(scores), atol=1e-4)
    assert output.logits.exp().sum(-1).sub(1).abs().max() < 1e-5
    assert output.loss is not None and abs(output.loss.item() - loss_B.mean().item()) < 1e-4


@pytest.mark.parametrize("source", range(3))
def test_the_posterior_finds_the_source_within_tens_of_tokens(source):
    mixture = Mixture(SOURCES)
    share_BT = mixture.posterior(mixture.scores(*SOURCES[source].write(64, T, seed=9)))[source].exp()
    assert share_BT[:, 0].sub(1 / 3).abs().max() < 1e-12
    assert share_BT[:, 40].median() > 0.99 and share_BT[:, -1].mean() > 0.95


def test_one_expert_is_the_mixture_and_equal_experts_keep_the_prior():
    model = Transformer(Architecture(layers=1, width=32, heads=1, vocabulary=V)).eval()
    tokens, targets = SOURCES[0].write(2, T, seed=1)
    alone, expected = Mixture([model]).eval(), model(tokens, targets)
    assert torch.allclose(alone(tokens, targets).logits, expected.logits.log_softmax(-1), atol=1e-6)
    assert torch.allclose(alone(tokens, targets).loss, expected.loss, atol=1e-6)
    alike = Mixture([SOURCES[0], SOURCES[0]], [0.8, 0.2])
    long = SOURCES[0].write(1, 4000, seed=2)  # a sum in half precision would have lost it
    shares = alike.posterior(alike.scores(*long)).exp()
    assert shares[0].sub(0.8).abs().max() < 1e-9 and shares[1].sub(0.2).abs().max() < 1e-9


def test_the_mixture_is_causal():
    tokens, targets = SOURCES[0].write(1, T, seed=3)
    other, _ = SOURCES[2].write(1, T, seed=4)
    changed = torch.cat((tokens[:, :30], other[:, 30:]), 1)
    mixture = Mixture(SOURCES)
    assert torch.equal(mixture(tokens).logits[:, :30], mixture(changed).logits[:, :30])
    assert torch.equal(mixture(tokens[:, :30]).logits, mixture(tokens).logits[:, :30])
    before, after = (mixture.posterior(mixture.scores(tokens, t))[..., :30] for t in (targets, other))
    same = (targets == other)[0, :29].cumprod(0).sum()  # as long as the targets are equal
    assert torch.equal(before[..., : same + 1], after[..., : same + 1]) and same < 29
    assert not torch.equal(before, after)


def test_the_cached_prior_is_an_average_over_all_sequences():
    """It equals its closed form, a moving average of the posteriors; it is not the posterior of the last sequence."""
    batches = [SOURCES[source].write(1, T, seed) for seed, source in enumerate((0, 0, 1))]
    mixture = Mixture(SOURCES)
    after = [mixture.posterior(mixture.scores(*batch))[:, 0, -1].exp() for batch in batches]
    expected = sum(0.7 * 0.3 ** (2 - i) * one for i, one in enumerate(after)) + 0.3**3 / 3
    found = torch.tensor(cached_prior(mixture, batches), dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9) and abs(float(found[0]) - 0.28) < 0.02
    assert min(cached_prior(mixture, [SOURCES[0].write(100, T, 5)])) > 0  # no expert is excluded for good


@pytest.mark.parametrize("prior", [[], [1.0], [0.5, 0.6, 0.1], [0.5, 0.5, 0.0], [0.5, 0.6, -0.1], [math.nan, 0.5, 0.5]])
def test_invalid_priors_are_refused(prior):
    with pytest.raises(ConfigurationError, match="a share above 0 for each expert"):
        Mixture(SOURCES, prior)


def test_after_no_text_the_posterior_is_the_prior():
    """As for a sample that has no prompt and ends with its first token."""
    experts = [Transformer(Architecture(layers=1, width=32, heads=1), seed) for seed in (0, 1)]
    mixture, nothing = Mixture(experts, [0.25, 0.75]), torch.zeros(1, 0, dtype=torch.long)
    after = mixture.posterior(mixture.scores(nothing, nothing))[:, 0, -1].exp()
    assert torch.allclose(after, torch.tensor([0.25, 0.75], dtype=torch.float64))
