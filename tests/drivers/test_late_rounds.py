"""Rounds that land a whole period late (CO2): the paper's recursion, its stability map, hidden time, and dropped rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from strategies import METHODS

import thinwire as tw
from thinwire.codecs.exact import energy
from thinwire.comm import Ledger, Link, LinkedGroup
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Scenario
from thinwire.testing.toy import Plan, adamw, batch, fill, inner_step, journey, same_bits, toy, travel, weights


def plain_co2(replicas, every, rounds, lr, momentum, gap, clip):
    """Returns the paper's recursion, written plainly on flat weights: x_t at the start of each round.

    m_t = β·m_(t−1) + (x_(t−1) − mean of the weights at the end of round t−1) / Λ_t, clipped; x_(t+1) = x_t − α·m_t.
    """
    models = [toy() for _ in range(replicas)]
    inner = [adamw(model) for model in models]
    x = before = weights(models[0])
    m, ended = torch.zeros_like(x), None
    for round_ in range(rounds):
        for rank, (model, optimizer) in enumerate(zip(models, inner)):
            for step in range(round_ * every + 1, (round_ + 1) * every + 1):
                inner_step(model, optimizer, *batch(0, rank, step))
        means = torch.stack([weights(model) for model in models]).mean(0)
        if ended is None:
            moved = x
        else:
            delta = before - ended
            penalty = 1 + gap * (x - before).norm() / delta.norm()
            m = momentum * m + delta / penalty
            m = m if clip is None else m.clamp(-clip, clip)
            moved = x - lr * m
        before, x, ended = x, moved, means
        for model in models:
            begin = 0
            for p in model.parameters():
                if p.requires_grad:
                    p.data.copy_(x[begin : begin + p.numel()].view_as(p))
                    begin += p.numel()
        yield x


@pytest.mark.parametrize("gap", [0.0, 1.0])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("replicas", [1, 3])
def test_late_rounds_follow_the_papers_recursion(replicas, gap, clip):
    outer = tw.pieces.outer.HeavyBall(0.9, 0.4, gap, clip)
    journeys = journey(
        tw.Strategy(schedule=tw.pieces.schedule.Every(3, 3), outer=outer, merge=tw.pieces.merge.Reset()),
        replicas,
        steps=15,
    )
    for round_, x in enumerate(plain_co2(replicas, 3, 5, 0.9, 0.4, gap, clip), 1):
        for one in journeys:
            torch.testing.assert_close(one.weights[3 * round_ - 1], x, rtol=1e-4, atol=1e-5)
    assert same_bits(journeys[0].weights[2], weights(toy())), (
        "what the first round has trained comes back with the second"
    )
    assert same_bits(journeys[0].weights[5], journeys[-1].weights[5]), "every round begins at the same point"


def test_the_clip_bounds_every_momentum_element():
    """Every element of the outer momentum is always within the bound; without the clip some would exceed it."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 3),
        outer=tw.pieces.outer.HeavyBall(1.0, 0.5, clip=0.02),
        merge=tw.pieces.merge.Reset(),
    )
    momenta = [at["0.outer.momentum"] for at in journey(strategy, 2)[0].agreed]
    assert max(float(m.abs().max()) for m in momenta) == pytest.approx(0.02)
    free = tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 3),
        outer=tw.pieces.outer.HeavyBall(1.0, 0.5),
        merge=tw.pieces.merge.Reset(),
    )
    assert max(float(at["0.outer.momentum"].abs().max()) for at in journey(free, 2)[0].agreed) > 0.04


def test_without_delay_it_is_slow_mo():
    """With no delay, Λ = 1 and no clip, it is DiLoCo with heavy-ball momentum (torch's SGD), within rounding."""
    journeys = journey(
        tw.Strategy(schedule=tw.pieces.schedule.Every(3), outer=tw.pieces.outer.HeavyBall(0.8, 0.5)), 2, steps=9
    )
    models, anchor = [toy(), toy()], toy()
    inner = [adamw(model) for model in models]
    outer = torch.optim.SGD(anchor.parameters(), lr=0.8, momentum=0.5)
    for step in range(1, 10):
        for rank in (0, 1):
            inner_step(models[rank], inner[rank], *batch(0, rank, step))
        if step % 3 == 0:
            for start, a, b in zip(anchor.parameters(), *(model.parameters() for model in models)):
                start.grad = start.data - (a.data + b.data) / 2
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
            torch.testing.assert_close(journeys[0].weights[step - 1], weights(anchor), rtol=1e-5, atol=1e-6)


def test_energy_does_not_depend_on_the_order_of_summation():
    x = torch.randn((1 << 21) + 12345, generator=torch.Generator().manual_seed(0))
    assert energy(x) == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    assert energy(x) == energy(x.clone()) and energy(torch.empty(0)) == 0.0
    assert math.isfinite(energy(torch.full((8,), 3e38)))


# ---- the stability map: both devices are needed


def settled(
    every: int, lr: float, momentum: float, gap: float, clip: float | None, rounds: int = 200, seed: int = 0
) -> float:
    """Returns the distance from the optimum, per coordinate, after `rounds` rounds of four replicas with different quadratics and noise.
    Each delta lands a round late. A run that diverges gives infinity."""
    draw = torch.Generator().manual_seed(seed)
    # What a round of inner steps at a rate of 0.05 leaves of the distance.
    kept = (1 - 0.05 * torch.logspace(-1, 0, 20)) ** every
    noise = 0.005 * ((1 - kept**2) / (1 - kept ** (2 / every))).sqrt()  # the noise that so many steps accumulate
    optima = 0.1 * torch.randn(4, 20, generator=draw)
    outer, x, late = tw.pieces.outer.HeavyBall(lr, momentum, gap, clip), torch.ones(20), None
    state = outer.init(x)
    for _ in range(rounds):
        own = optima + kept * (x - optima) + noise * torch.randn(4, 20, generator=draw)
        delta = x - own.mean(0)
        if late is not None:
            x, state = outer.step(x, late, state)
        late = delta
        if not bool(x.abs().max() < 1e12):
            return math.inf
    return float((x - optima.mean(0)).square().mean().sqrt())


@pytest.mark.parametrize("seed", range(3))
def test_stability_matches_the_papers_map(seed):
    """Mild momentum needs neither device. β = 0.8 diverges without one, and either holds it. Long rounds with a high rate diverge with the
    penalty alone, and the clip bounds them. If both hold, the penalty ends nearer to the optimum."""

    def map_(every, lr, momentum):
        return [
            settled(every, lr, momentum, gap, clip, seed=seed)
            for gap, clip in ((0, None), (1, None), (0, 0.05), (1, 0.05))
        ]

    mild = map_(8, 1.0, 0.5)
    assert max(mild) < 0.1
    free, penalised, clipped, both = map_(8, 1.0, 0.8)
    assert free > 1e3 and max(penalised, clipped, both) < 0.3
    free, penalised, clipped, both = map_(32, 1.5, 0.8)
    assert min(free, penalised) > 1e3 and max(clipped, both) < 0.5
    free, penalised, clipped, both = map_(32, 1.0, 0.5)
    assert free > 1e3 and max(penalised, clipped, both) < 0.3 and both < clipped


# ---- time


def test_exchange_time_is_hidden_behind_inner_steps():
    """Simulated: a round takes the longer of its inner steps and its flight; a round of DiLoCo takes the sum."""
    late = tw.Strategy(
        schedule=tw.pieces.schedule.Every(10, 10), outer=tw.pieces.outer.HeavyBall(), merge=tw.pieces.merge.Reset()
    )
    numel, rounds = 125_000, 20
    for flight, period in ((6.0, 10.0), (16.0, 16.0)):
        link = Link(8 * late.nbytes_per_period([numel], 2) / flight)
        hidden = simulate(late, [numel], Scenario.alike(2, 1.0, link), 10 * rounds).wall_seconds[0]
        waited = simulate(tw.local_sgd(every=10), [numel], Scenario.alike(2, 1.0, link), 10 * rounds).wall_seconds[0]
        assert hidden == pytest.approx(rounds * period, abs=2 * flight + 10)
        assert waited == pytest.approx(rounds * (10 + flight), abs=2 * flight + 10)


@pytest.mark.parametrize("name", ["co2", "a whole period late, in fragments"])
def test_the_link_changes_no_bit_of_the_result(name):
    """An emulated link of 20 ms gives the same bits as no link."""
    plan = Plan(METHODS[name], steps=9)

    def replica(group):
        ledger = Ledger()
        linked = LinkedGroup(group, Link(2e6, 0.02), ledger)
        return travel(Plan(METHODS[name], steps=9, wrap=lambda _: linked), group)

    near = tw.run_threads(2, lambda group: travel(plan, group), timeout=600.0)
    far = tw.run_threads(2, replica, timeout=600.0)
    for a, b in zip(near, far):
        assert all(same_bits(x, y) for x, y in zip(a.weights, b.weights, strict=True)) and same_bits(a.final, b.final)


# ---- dropped and refused rounds


@pytest.mark.parametrize("bad", [4, 9])
def test_a_dropped_late_round_is_sent_again(bad):
    """One gradient of one replica is NaN. No other progress is lost: it lands with the next round, and all stay finite."""

    def before_step(replica, step):
        if step == bad and replica.group.rank == 1:
            next(iter(replica.model.parameters())).grad.fill_(float("nan"))

    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 3), outer=tw.pieces.outer.Average(), merge=tw.pieces.merge.Reset()
    )
    journeys = journey(strategy, 2, steps=18, before_step=before_step)
    for one in journeys:
        refused = [e for e in one.heard("refused")]
        assert refused and {tuple(e["by"]) for e in refused} == {(1,)}
        assert torch.isfinite(one.final).all() and same_bits(one.final, journeys[0].final)
    calm = journey(strategy, 2, steps=18)
    assert not same_bits(calm[0].final, journeys[0].final)


@dataclass(frozen=True)
class Once(tw.pieces.outer.Outer):
    """An average that overflows on the first delta of a run."""

    heard: list[torch.Tensor] = field(default_factory=list)
    linear = True

    def step(self, anchor, delta, state):
        if delta.numel() > 1:  # otherwise it is only the warm-up
            self.heard.append(delta.clone())
        return (anchor * torch.inf if len(self.heard) == 1 else anchor - delta), state


def test_deltas_in_flight_are_added_to_a_refused_round():
    """The first round cannot land, so nothing moves. The second round carries both deltas."""
    outer = Once()
    (one,) = journey(
        tw.Strategy(schedule=tw.pieces.schedule.Every(3, 3), outer=outer, merge=tw.pieces.merge.Reset()), 1, steps=6
    )
    model = toy()
    optimizer, begun, deltas = adamw(model), weights(model), []
    for step in range(1, 7):
        inner_step(model, optimizer, *batch(0, 0, step))
        if step % 3 == 0:
            deltas.append(begun - weights(model))
            fill(model)
    assert [e["round"] for e in one.heard("refused")] == [0]
    assert same_bits(one.weights[2], begun) and same_bits(one.weights[5], begun)
    torch.testing.assert_close(outer.heard[0], deltas[0])
    torch.testing.assert_close(outer.heard[1], deltas[0] + deltas[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.pieces.outer.HeavyBall(lr=0.0), "lr > 0"),
        (lambda: tw.pieces.outer.HeavyBall(momentum=1.0), "momentum < 1"),
        (lambda: tw.pieces.outer.HeavyBall(gap=-1.0), "gap >= 0"),
        (lambda: tw.pieces.outer.HeavyBall(clip=0.0), "clip > 0"),
        (lambda: tw.pieces.outer.HeavyBall(clip=float("nan")), "clip > 0"),
        (lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(4, 3), merge=tw.pieces.merge.Reset()), "choose delay=4"),
        (lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(4, 4)), "choose eager updates, or Reset"),
        (
            lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(4), outer=tw.pieces.outer.HeavyBall(gap=1.0)),
            "choose gap=0, or merge=Reset",
        ),
        (
            lambda: tw.Strategy(
                schedule=tw.pieces.schedule.Every(4, 4),
                outer=tw.pieces.outer.HeavyBall(clip=1.0),
                merge=tw.pieces.merge.Eager(),
            ),
            "linear",
        ),
        (
            lambda: tw.Strategy(schedule=tw.pieces.schedule.Quadratic(4, 0.1), merge=tw.pieces.merge.Reset()),
            "such a round takes a whole period",
        ),
        (lambda: tw.Strategy(merge=0.5), "a Merge is needed"),
    ],
)
def test_unsupported_late_settings_are_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        make()
