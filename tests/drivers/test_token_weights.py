"""Deltas of a fixed group weighed by their tokens: the result is the mean over tokens, not the mean of means."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import first_state
from thinwire.drivers.token_weights import TokenCount, tokens_of_step
from thinwire.errors import PacketError
from thinwire.exchange import Buffers
from thinwire.lab.robust.coordinates import Median
from thinwire.testing.toy import same_bits, weights

# the tokens of a replica's step, by round and replica
VALUES = (((1.0, 1.0, 1.0, 1.0), (6.0,)), ((2.0,), (12.0, 12.0, 12.0)))


def means_of_all(weighed: bool) -> list[list[float]]:
    """Returns the result of each round, before which each replica's model has moved to the mean of its own tokens."""

    def train(group: tw.ThreadGroup) -> list[float]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        after = []
        with tw.Replica(tw.local_sgd(every=1), model, optimizer, group, tokens=1 if weighed else None) as replica:
            for values in VALUES:
                own = torch.tensor(values[group.rank])
                replica.tokens = float(len(own)) if weighed else None
                optimizer.zero_grad()
                (0.5 * (model[0] - own).square().mean()).backward()
                optimizer.step()
                after.append(model[0].item())
        return after

    return tw.run_threads(2, train)


def test_weighing_by_tokens_removes_the_bias_of_equal_weights():
    """A round counts the tokens since the one before."""
    rounds = [[value for of_step in values for value in of_step] for values in VALUES]
    assert means_of_all(weighed=True) == [[sum(tokens) / len(tokens) for tokens in rounds]] * 2 == [[2.0, 9.5]] * 2
    assert means_of_all(weighed=False) == [[(1.0 + 6.0) / 2, (2.0 + 12.0) / 2]] * 2


STRATEGIES = {
    "streaming": replace(tw.streaming_diloco(every=4, fragments=2, delay=2), feedback=tw.pieces.feedback.Feedback()),
    "two-shot": replace(tw.diloco(every=3), exchange=tw.exchange.TwoShot()),
    "a dense end": tw.recipes.streaming_sparse(every=4, delay=1, partition=tw.pieces.partition.BySize(2)),
}


def step(replica: tw.Replica, rank: int) -> None:
    """Takes a step whose number of tokens depends on the step."""
    at = replica.step
    replica.tokens = 1 + (5 * at + 3 * rank) % 7
    for parameter in replica.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * rank + 0.01 * at)
    replica.optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_weighted_run_resumes_bit_for_bit_with_rounds_in_flight(strategy):
    """Laws 1 and 6: anchors are equal, and the resumed run equals an uninterrupted one, bit for bit."""

    def made(group: tw.ThreadGroup) -> tw.Replica:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        return tw.Replica(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), group, tokens=1)

    def train(group: tw.ThreadGroup) -> list[torch.Tensor]:
        ends = []
        with made(group) as whole:
            while whole.step < 13:
                step(whole, group.rank)
                if whole.step == 5:
                    tensors, facts = whole.state()
                    kept = {name: value.clone() for name, value in tensors.items()}
                    own = [parameter.detach().clone() for parameter in whole.model.parameters()]
            plain = [anchor.clone() for anchor in whole.anchors()]
        ends.append(torch.cat([p.detach().flatten() for p in whole.model.parameters()]))
        with made(group) as again:
            with torch.no_grad():
                for parameter, value in zip(again.model.parameters(), own):
                    parameter.copy_(value)
            again.load_state(kept, facts)
            while again.step < 13:
                step(again, group.rank)
        ends.append(torch.cat([p.detach().flatten() for p in again.model.parameters()]))
        return [*ends, *plain]

    first, second = tw.run_threads(2, train)
    assert all(same_bits(a, b) for a, b in zip(first, second)) and same_bits(first[0], first[1])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("steps", [4, 5, 6, 7])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_weighted_run_ends_after_any_step(strategy, steps, replicas):
    """Also where the last round begins without a step since the one before."""

    def train(group: tw.ThreadGroup) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.Replica(strategy, model, optimizer, group, tokens=1) as replica:
            for _ in range(steps):
                step(replica, group.rank)
        return weights(model)

    first, *others = tw.run_threads(replicas, train)
    assert all(same_bits(first, other) for other in others) and bool(torch.isfinite(first).all())


def test_unsupported_weighing_is_refused():
    def train(group: tw.ThreadGroup, strategy: tw.Strategy, tokens: float | None) -> None:
        model = nn.Linear(2, 1)
        tw.Replica(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), group, tokens=tokens)

    (alone,) = tw.ThreadGroup.create(1)
    for strategy, says in (
        (tw.data_parallel(), "step together"),
        (tw.lab.recipes.noloco(), "weighs neighbours"),
        (replace(tw.diloco(), aggregate=Median()), "not a mean"),
        (
            replace(tw.diloco(), codec=tw.lab.codecs.OverSenders(tw.codecs.TopK())),
            "divides by the number of those who sent",
        ),
        (
            replace(tw.diloco(), feedback=tw.pieces.feedback.Feedback(kappa=1, eta=0)),
            "would drift from their agreed mean",
        ),
    ):
        with pytest.raises(tw.ConfigurationError, match=says):
            train(alone, strategy, 8.0)

    def unlike(group: tw.ThreadGroup) -> None:
        train(group, tw.local_sgd(every=2), 8.0 if group.rank else None)

    with pytest.raises(tw.DisagreementError, match="weights: by tokens there, absent on replica 0"):
        tw.run_threads(2, unlike)


@pytest.mark.parametrize("tokens", [None, 4.0])
def test_a_run_keeps_its_way_of_weighing(tokens):
    """Neither a loop nor a checkpoint may change it."""
    (alone,) = tw.ThreadGroup.create(1)
    ways = ("1", "the number of its tokens")

    def made(tokens: float | None) -> tw.Replica:
        model = nn.Linear(2, 1)
        model(torch.ones(2)).backward()
        return tw.Replica(tw.diloco(every=2), model, torch.optim.SGD(model.parameters(), lr=0.1), alone, tokens=tokens)

    with made(tokens) as one:
        one.optimizer.step()
        saved = one.state()
        one.tokens = None if tokens else 4.0
        with pytest.raises(tw.ConfigurationError, match="began without them, or removed"):
            one.optimizer.step()
        one.tokens = tokens
    other = made(None if tokens else 4.0)
    was, now = ways if tokens is None else ways[::-1]
    with pytest.raises(tw.CheckpointError, match=f"run the weight of a delta is {was}, here it is {now}; resume"):
        other.load_state(*saved)
    other.close()


@pytest.mark.parametrize(("steps", "due"), [(13, -(8 * 6 - 1) / 9), (11, -4.0)])
def test_training_that_a_restart_from_the_anchors_drops_has_no_weight(steps: int, due: float) -> None:
    """Replica 0 steps by -1, replica 1 by 1, and its weights are NaN in step 9. The round of step 10 is refused at 12, or at the end, and the
    last one has the tokens since step 5 of replica 0, and those since the refusal of replica 1."""

    def train(group: tw.ThreadGroup) -> float:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(5, 2))
        with tw.Replica(strategy, model, optimizer, group, tokens=8):
            for step in range(1, steps + 1):
                model[0].grad = torch.tensor([math.nan if group.rank and step == 9 else 1.0 - 2 * group.rank])
                optimizer.step()
        return model[0].item()

    assert tw.run_threads(2, train) == [pytest.approx(due)] * 2


def test_invalid_token_counts_are_refused():
    assert [tokens_of_step(tokens) for tokens in (0.5, 1, 1e12)] == [0.5, 1.0, 1e12]
    for wrong in (True, 0, -1.0, 1e12 + 1, math.nan, "8"):
        with pytest.raises(tw.ConfigurationError, match="the number of tokens per inner step is needed"):
            tokens_of_step(wrong)

    def replica(group: tw.ThreadGroup, said: float) -> float:
        counts = TokenCount(group, 0, said if group.rank else 3.0)
        if group.rank or said == 0.5:
            return counts.share()
        with pytest.raises(PacketError, match="replica 1 sent"):
            counts.share()
        return math.nan

    for said in (-1.0, math.inf, 1.7e308, math.nan):
        tw.run_threads(2, lambda group, said=said: replica(group, said))
    assert tw.run_threads(2, lambda group: replica(group, 0.5)) == [3.0 * 2 / 3.5, 0.5 * 2 / 3.5]
    assert tw.run_threads(2, lambda group: TokenCount(group, 0, 0.0).share()) == [1.0, 1.0]


def test_a_deltas_weight_is_divided_out_for_its_feedback():
    """The residual is that of the delta itself: what was sent is taken without the weight."""
    strategy = tw.Strategy(codec=tw.codecs.Sign(), feedback=tw.pieces.feedback.Feedback())
    held = first_state(strategy, tw.pieces.partition.Whole().fragments(torch.nn.Linear(1, 1))[0], 0, 0, 1)
    values = torch.tensor([1.0, -3.0])
    for share, factor in ((0.0, 1.0), (1.0, 1.0), (2.0, 2.0)):  # 0: a replica that does not count in this round
        flight = Flight(held.begin_round(strategy, values, 1), Buffers(), share)
        assert torch.equal(flight.signal(0, 2), factor * values)
        flight.settle(0, torch.zeros(2), factor * values)
        assert torch.equal(flight.feedback["residual"], torch.zeros(2))
