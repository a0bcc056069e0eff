"""Coded predictions: the divergence and its gradient, sizes, rounding, quality, and refused bytes."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.errors import PacketError
from thinwire.lab.methods.predictions import (
    STEP,
    PredictionCoder,
    Predictions,
    cross_entropy,
    divergence,
    most_probable,
    weights_by_quality,
)

P, V, K = 40, 50, 5
CODER = PredictionCoder(P, V, K)


def logits_of(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(P, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_predictions_of_an_equal_model_have_no_gradient_before_rounding(temperature):
    """For any K the gradient is zero, because all other tokens count as one outcome in both distributions.

    Rounding adds exactly q − p, at most e^STEP − 1 of q.
    """
    logits = logits_of(0).requires_grad_()
    told = most_probable(logits, K, temperature)
    (gradient,) = torch.autograd.grad(divergence(logits, told, temperature), logits)
    assert float(gradient.abs().max()) < 1e-7
    rounded = CODER.decode(CODER.encode(told))
    (gradient,) = torch.autograd.grad(divergence(logits, rounded, temperature), logits)
    q = torch.softmax(logits.detach() / temperature, -1)
    rest = 1 - q.gather(-1, told.tokens).sum(-1, keepdim=True)
    p = (q * rounded.logs[:, -1:].exp() / rest).scatter(-1, rounded.tokens, rounded.logs[:, :-1].exp())
    torch.testing.assert_close(gradient * P * temperature, q - p, atol=1e-6, rtol=1e-4)
    assert bool(((q - p).abs() <= (math.exp(STEP) - 1) * q + 1e-6).all()) and float((q - p).abs().max()) > 1e-3


def test_the_divergence_is_that_of_the_coarsened_distributions():
    logits, told = logits_of(1), most_probable(logits_of(2), V - 1, 1.0)
    other = torch.log_softmax(logits_of(2), -1)
    full = (other.exp() * (other - torch.log_softmax(logits, -1))).sum(-1).mean()
    torch.testing.assert_close(divergence(logits, told, 1.0), full)
    assert float(divergence(logits, most_probable(logits_of(2), K, 1.0), 1.0)) < float(full)


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 100.0])
def test_predictions_are_decoded_up_to_rounding(scale):
    told = most_probable(logits_of(3, scale), K, 1.0)
    payload = CODER.encode(told)
    assert len(payload) <= CODER.nbytes
    back = CODER.decode(payload)
    assert torch.equal(back.tokens, told.tokens)
    if scale < 5:  # the code's least probability is e^−15.75
        assert float((back.logs - told.logs).abs().max()) <= STEP
    torch.testing.assert_close(back.logs.exp().sum(-1), torch.ones(P))
    assert torch.equal(CODER.encode(most_probable(logits_of(3, scale), K, 1.0)), payload)


def test_rice_codes_save_a_third_of_the_bytes_of_probabilities():
    """The bound `nbytes` is about the size of plain packing."""
    sizes = [len(CODER.encode(most_probable(logits_of(seed), K, 1.0))) for seed in range(8)]
    codes = P * K * 7 // 8
    assert max(sizes) < CODER.nbytes - codes // 3


def test_quality_is_the_loss_on_the_true_next_tokens():
    targets = torch.arange(P) % V
    certain = torch.full((P, V), 0.0).scatter(-1, targets[:, None], 12.0)
    uniform = torch.zeros(P, V)
    losses = [
        cross_entropy(CODER.decode(CODER.encode(most_probable(one, K, 1.0))), targets, V) for one in (certain, uniform)
    ]
    assert losses[0] < 0.01 and losses[1] == pytest.approx(math.log(V), abs=STEP)
    good, bad = weights_by_quality(losses, 5.0)
    assert bad < 1e-7 and good + bad == pytest.approx(1.0)
    assert weights_by_quality([1.0, 9.0], 0.0) == [0.5, 0.5]


def test_any_bytes_are_refused_or_decode_to_distributions():
    good = CODER.encode(most_probable(logits_of(4), K, 1.0))
    generator = torch.Generator().manual_seed(0)
    outcomes = {True: 0, False: 0}
    for trial in range(400):
        raw = good.clone()
        if trial % 4 == 0:
            raw = torch.randint(0, 256, (int(torch.randint(0, CODER.nbytes + 9, (1,), generator=generator)),),
                                dtype=torch.uint8, generator=generator)  # fmt: skip
        elif trial % 4 == 1:
            raw = raw[: int(torch.randint(0, len(raw), (1,), generator=generator))]
        else:
            raw[int(torch.randint(0, len(raw), (1,), generator=generator))] ^= 1 << trial % 8
        try:
            told = CODER.decode(raw)
        except PacketError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert bool(torch.isfinite(told.logs).all()) and 0 <= int(told.tokens.min()) <= int(told.tokens.max()) < V
        torch.testing.assert_close(told.logs.exp().sum(-1), torch.ones(P))
    assert all(outcomes.values())


def test_unknown_and_repeated_tokens_are_refused():
    told = most_probable(logits_of(5), K, 1.0)
    for tokens in (told.tokens[:, :1].expand(P, K).contiguous(), torch.where(told.tokens == 3, 63, told.tokens)):
        with pytest.raises(PacketError, match="a token twice, or one outside the vocabulary of 50"):
            CODER.decode(CODER.encode(Predictions(tokens, told.logs)))
