"""Error feedback on heterogeneous least squares: none, EF14, EF21 and EControl, with five of fifty coordinates sent in a round.

f_i(x) = ½ (x − b_i)ᵀ A_i (x − b_i) with diagonal A_i and distant b_i; gradients have noise σ. The result is the mean of
‖x − x*‖² over the last 1000 of 2500 steps. The order is that of EControl's paper (ICLR 2024). Any feedback is far better than none.
Without noise EF14 has a floor, which EF21 and EControl do not have. With noise EF21 is the worst of the three and EControl the best.
docs/methods/error_feedback.md shows the same figures.
"""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.testing.values import roundtrip

D, STEPS, LAST, LR = 50, 2500, 1000, 0.05
LADDER = {
    "none": None,
    "EF14": tw.lab.recipes.ef14().feedback,
    "EF21": tw.lab.recipes.ef21().feedback,
    "EControl(0.02)": tw.lab.recipes.econtrol(eta=0.02).feedback,
    "EControl(0.1)": tw.lab.recipes.econtrol(eta=0.1).feedback,
}
DUE = {  # by σ and n
    (0.0, 10): {"none": 23.4, "EF14": 0.55, "EF21": 0.0, "EControl(0.02)": 0.0, "EControl(0.1)": 0.0},
    (1.0, 10): {"none": 18.7, "EF14": 0.663, "EF21": 0.831, "EControl(0.02)": 0.596, "EControl(0.1)": 0.385},
    (1.0, 100): {"none": 4.16, "EF14": 0.0682, "EF21": 0.0742, "EControl(0.02)": 0.0591, "EControl(0.1)": 0.0375},
}
CODEC = tw.codecs.TopK(0.1, tw.codecs.Identity())


def largest(z):
    """Applies `CODEC` to all replicas at once."""
    index = z.abs().topk(5, dim=1).indices
    return torch.zeros_like(z).scatter_(1, index, z.gather(1, index))


def distance(feedback, sigma, n):
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(n, D, generator=generator) + 0.5
    b = torch.randn(n, D, generator=generator) * 3
    best = (a * b).mean(0) / a.mean(0)
    x, total = torch.zeros(D), 0.0
    state = feedback.init(n * D) if feedback else {}
    state = {name: value.view(n, D) for name, value in state.items()}
    for step in range(STEPS):
        s = a * (x - b) + sigma * torch.randn(n, D, generator=generator)
        c = largest(feedback.signal(s, state) if feedback else s)
        estimate = c.mean(0)
        if feedback:
            after = {name: torch.empty_like(value) for name, value in state.items()}
            estimate = feedback.settle(s, c, estimate.expand(n, D), state, after)[0]
            state = after
        x = x - LR * estimate
        total += float((x - best).square().sum()) if step >= STEPS - LAST else 0.0
    return total / LAST


def test_coding_all_replicas_together_equals_the_codec():
    z = torch.randn(7, D, generator=torch.Generator().manual_seed(0))
    assert torch.equal(largest(z), torch.stack([roundtrip(CODEC, row) for row in z]))


@pytest.mark.parametrize(
    ("sigma", "n"), [pytest.param(*at, marks=pytest.mark.slow) if at[1] > 10 else at for at in DUE]
)
def test_feedback_rules_converge_in_the_published_order(sigma, n):
    far = {name: distance(feedback, sigma, n) for name, feedback in LADDER.items()}
    none, ef14, ef21, little, more = far.values()
    assert far == pytest.approx(DUE[sigma, n], rel=0.05, abs=1e-6), "docs/methods/error_feedback.md shows these"
    if sigma:
        assert more < little < ef14 < ef21 < none / 10
    else:
        assert max(ef21, little, more) < 1e-4 * ef14 < ef14 < none / 10
