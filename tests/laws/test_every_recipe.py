"""Laws of every recipe, from one complete table. (test_every_piece and test_checkpoint hold equal bits, bytes, arrival order and resuming.)

With a codec that drops nothing, a method equals a reference of a few lines, for any number of replicas. One
replica alone equals that reference on its own data, and replicas with equal data equal one replica.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from strategies import GOSSIP, METHODS

import thinwire as tw
from thinwire.catalogue.methods import RECIPES
from thinwire.testing.toy import batch, journey, own, same_bits, sgd, toy, weights

STEPS = 12


def gradients(models, step, ranks):
    """Returns the gradients of each model on its own batch; None for a parameter without one."""
    made = []
    for model, rank in zip(models, ranks):
        x, y = batch(0, rank, step)
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = ((model(x) - y) ** 2).mean()
        made.append(torch.autograd.grad(loss, trained, allow_unused=True))
    return made


def mean_of(parts):
    return [None if p[0] is None else torch.stack(p).mean(0) for p in zip(*parts)]


class Direction:
    """The direction that a method computes from the mean gradient."""

    def __call__(self, number, mean):
        return mean


class Adam(Direction):
    """m / (√v + ε), with v frozen after four steps, without bias correction."""

    def __init__(self):
        self.m, self.v, self.t = {}, {}, {}

    def __call__(self, number, mean):
        if number not in self.m:
            self.m[number], self.v[number] = torch.zeros_like(mean), torch.zeros_like(mean)
        t = self.t[number] = self.t.get(number, 0) + 1
        self.m[number] = 0.9 * self.m[number] + 0.1 * mean
        if t <= 4:
            self.v[number] = 0.999 * self.v[number] + 0.001 * mean**2
        return self.m[number] / (self.v[number].sqrt() + 1e-8)


class SignOf(Direction):
    def __call__(self, number, mean):
        return mean.sign()


def of_gradients(direction, make_inner):
    """Every step: one inner step along the direction computed from the mean gradient."""

    def walk(strategy, replicas):
        model = toy()
        optimizer, turn = make_inner(strategy, model), direction()
        for step in range(1, STEPS + 1):
            mean = mean_of(gradients([model] * replicas, step, range(replicas)))
            for number, (parameter, g) in enumerate(zip([p for p in model.parameters() if p.requires_grad], mean)):
                parameter.grad = None if g is None or not g.any() else turn(number, g)
            optimizer.step()
            yield weights(model)

    return walk


def of_deltas(outer_lr, outer_momentum):
    """Every H steps: an outer Nesterov step on the mean delta, from which all replicas restart."""

    def walk(strategy, replicas):
        models = [toy() for _ in range(replicas)]
        inner = [own(strategy, model) for model in models]
        anchor, velocity = weights(models[0]), torch.zeros_like(weights(models[0]))
        for step in range(1, STEPS + 1):
            for model, optimizer, parts in zip(models, inner, gradients(models, step, range(replicas))):
                for parameter, g in zip([p for p in model.parameters() if p.requires_grad], parts):
                    parameter.grad = g
                optimizer.step()
            if step % strategy.schedule.every == 0:
                delta = torch.stack([anchor - weights(model) for model in models]).mean(0)
                velocity = outer_momentum * velocity + delta
                anchor = anchor - outer_lr * (delta + outer_momentum * velocity)
                for model in models:
                    begin = 0
                    for p in [p for p in model.parameters() if p.requires_grad]:
                        p.data.copy_(anchor[begin : begin + p.numel()].view(p.shape))
                        begin += p.numel()
                yield anchor
            else:
                yield None

    return walk


def any_inner(strategy, model):
    return own(strategy, model)


REFERENCES = {
    "data_parallel": of_gradients(Direction, any_inner),
    "qsgd": of_gradients(Direction, any_inner),
    "cgx": of_gradients(Direction, any_inner),
    "ef14": of_gradients(Direction, any_inner),
    "ef21": of_gradients(Direction, any_inner),
    "econtrol": of_gradients(Direction, any_inner),
    "power_sgd": of_gradients(Direction, any_inner),
    "dgc": of_gradients(Direction, any_inner),  # everything is sent, so all memory is cleared: SGD without momentum
    "one_bit_adam": of_gradients(Adam, any_inner),
    "demo": of_gradients(SignOf, any_inner),
    "local_sgd": of_deltas(1.0, 0.0),
    "sparse_loco": of_deltas(1.0, 0.0),
    "outer_dgc": of_deltas(1.0, 0.0),
    "l_greco": of_deltas(1.0, 0.0),
    "diloco": of_deltas(0.7, 0.9),
    "muloco": of_deltas(0.7, 0.9),
    "streaming_diloco": of_deltas(0.4, 0.9),  # one fragment, no delay, no mixing
    "streaming_sign": of_deltas(1.0, 0.0),  # as above
    "streaming_sparse": of_deltas(1.0, 0.0),  # as above
    "finetune": of_deltas(1.0, 0.3),  # as above
}
ELSEWHERE = {
    "eager_diloco": "test_order_of_events.py: against the paper's recursion, with a delay",
    "co2": "test_late_rounds.py: against the paper's recursion, a period late",
    **dict.fromkeys(GOSSIP.keys() & RECIPES.keys(), "test_gossip.py: there is no anchor that all agree on"),
    "qsr": "test_schedules.py: its rounds are no fixed number of steps; without scale it is local_sgd",
}


def unclipped(strategy):
    """Removes settings that depend on the number of replicas."""
    return dataclasses.replace(
        strategy, filters=tuple(f for f in strategy.filters if not isinstance(f, tw.pieces.transforms.Clip))
    )


def plain(name):
    """Returns the recipe with a codec that drops nothing, and without settings that distinguish replicas or fragments."""
    strategy = dataclasses.replace(
        unclipped((METHODS | GOSSIP)[name]), codec=tw.codecs.Identity(), policy=tw.pieces.policy.Constant()
    )
    if name in ("streaming_diloco", "streaming_sign", "streaming_sparse", "finetune"):
        strategy = dataclasses.replace(
            strategy,
            schedule=tw.pieces.schedule.Every(6),
            partition=tw.pieces.partition.Whole(),
            merge=tw.pieces.merge.Mix(0.0),
        )
    return strategy


def test_a_recipe_has_one_reference():
    """A new recipe needs none to be found: the laws below hold for it by its row in recipes/table.py."""
    assert set(REFERENCES) | set(ELSEWHERE) <= set(RECIPES) and not set(REFERENCES) & set(ELSEWHERE)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_lossless_methods_equal_their_reference(name, replicas):
    """For one replica, the reference is the inner optimizer alone on its own data."""
    strategy = plain(name)
    journeys = journey(strategy, replicas, steps=STEPS)
    for step, due in enumerate(REFERENCES[name](strategy, replicas)):
        if due is not None:
            torch.testing.assert_close(journeys[0].weights[step], due, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(journeys[0].weights[-1], weights(toy()), rtol=1e-3, atol=2e-4)


NOT_ONE = {
    "qsgd": "each sender rounds by its own chance",
    "eager_diloco": "only its own share of a delta counts at once for a replica: all of it where it is alone",
}


@pytest.mark.parametrize("name", RECIPES)
def test_replicas_with_equal_data_equal_one_replica(name):
    """The method keeps its own codec; the mean of equal values is that value."""
    strategy = unclipped((METHODS | GOSSIP)[name])
    (alone,) = journey(strategy, 1, steps=STEPS)
    for one in journey(strategy, 2, steps=STEPS, data=lambda rank: 0):
        close = torch.allclose(one.final, alone.final, rtol=1e-3, atol=1e-4)
        assert close != (name in NOT_ONE)


@pytest.mark.parametrize("name", RECIPES)
def test_zero_gradients_move_no_weight(name):
    """With any codec, filters and feedback, zeros give zeros."""

    def silence(replica, step):
        for parameter in replica.model.parameters():
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)

    strategy = (METHODS | GOSSIP)[name]
    journeys = journey(strategy, 2, steps=STEPS, before_step=silence, optimizer=_without_decay(strategy))
    assert all(same_bits(one.final, weights(toy())) for one in journeys)


def _without_decay(strategy):
    return lambda model: strategy.inner.make(model, 0.01, 0.0) if strategy.inner else sgd(model)


# ---- nothing is lost


class Watch:
    """Records the gradients of one replica, the estimates, and its state, step by step."""

    def __init__(self):
        self.given, self.estimates, self.states = [], [], []

    def __call__(self, replica, step):
        flat = [torch.zeros(p.shape) if p.grad is None else p.grad.clone() for _, p in replica.fragments[0].parameters]
        self.given.append(torch.cat([g.reshape(-1) for g in flat]))
        replica.exchange_gradients()
        flat = [torch.zeros(p.shape) if p.grad is None else p.grad.clone() for _, p in replica.fragments[0].parameters]
        self.estimates.append(torch.cat([g.reshape(-1) for g in flat]))
        self.states.append({name: value.clone() for name, value in replica.state()[0].items()})


def watched(strategy, replicas):
    watches = [Watch() for _ in range(replicas)]
    journey(strategy, replicas, steps=40, before_step=lambda r, step: watches[r.group.rank](r, step))
    return watches


@pytest.mark.parametrize("name", ["ef14", "econtrol", "power_sgd"])
def test_estimates_and_residuals_sum_to_the_mean_gradients(name):
    """Σ estimates + mean of what is held back = Σ of the mean gradients, with three replicas."""
    watches = watched(METHODS[name], 3)
    held = sum(w.states[-1]["0.feedback.residual"] for w in watches) / 3
    due = sum(sum(w.given) for w in watches) / 3
    torch.testing.assert_close(sum(watches[0].estimates) + held, due, rtol=1e-4, atol=1e-4)
    assert held.abs().max() > 0.01


def test_one_bit_adam_telescopes_on_both_sides():
    """Since the freeze, Σ m + mean δ_i + δ̄ = Σ mean of m_i, with three replicas. δ̄ is what the owners hold back, one shard each."""
    watches, freeze = watched(unclipped(METHODS["one_bit_adam"]), 3), 4
    means, last = [[s["0.filter.0.average"] for s in w.states] for w in watches], [w.states[-1] for w in watches]
    said = sum(0.9 * means[0][t - 1] + 0.1 * sum(w.given[t] for w in watches) / 3 for t in range(freeze, 40))
    own = sum(state["0.feedback.residual"] for state in last) / 3
    owners = torch.cat([state["0.exchange.residual"] for state in last])
    touched = last[0]["0.filter.0.square"] > 0
    total = sum(means[0][freeze:]) + own + owners
    torch.testing.assert_close(total[touched], said[touched], rtol=1e-4, atol=1e-4)
    assert all(same_bits(a, b) for a, b in zip(means[0], means[2])) and owners.abs().max() > 0.001
