"""The weight of a delta: 1, or the tokens behind it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from elastic_toy import SIZES, Inline, RecordedRun, Toy, agree, one_thread, train
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.round_thread import RoundThread
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.membership.timeouts import Timeouts

__all__ = ["one_thread"]  # a fixture


def test_every_round_is_the_weighted_mean_of_its_deltas() -> None:
    """Replicas differ in speed and batch size. The weights are the tokens behind each delta."""
    cluster, record = SimulatedCluster(), RecordedRun()
    of = {"a": (1.0, 8.0), "b": (1.0, 24.0), "c": (3.0, 8.0)}  # seconds and tokens of a step
    results = cluster.play(
        {
            name: train(cluster, record, steps=60, step_seconds=s, tokens=t, least=2, grace=1.0)
            for name, (s, t) in of.items()
        }
    )
    agree(results, record)
    rounds = record.history(results["a"].elastic.rounds.loop.agreed.state_digest)
    assert rounds[0].weights == [4 * 8.0, 4 * 24.0]  # without the slow replica
    assert any(len(one.weights) == 3 and one.weights[2] < one.weights[0] for one in rounds)


@pytest.mark.parametrize("tokens", [None, 16.0])
def test_weighted_deltas_survive_a_killed_replica(tokens: float | None) -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.at("b", "put", lambda: cluster.kill("b"), 4)
    agree(cluster.play({name: train(cluster, record, steps=40, least=2, tokens=tokens) for name in "abc"}), record)


@pytest.mark.parametrize("tokens", [None, 16.0])
def test_an_outlier_delta_is_clipped(tokens: float | None) -> None:
    """One replica jumps far once. The others do not follow, and it continues from near their anchor."""
    cluster, record, far = SimulatedCluster(), RecordedRun(), 1e6

    def inner(toy: Toy, fragment: int) -> Tensor:
        return torch.full((SIZES[fragment],), far if (toy.name, toy.step) == ("b", 30) else 1.0)

    results = cluster.play({name: train(cluster, record, steps=60, tokens=tokens, inner=inner) for name in "abc"})
    clipped = [(name, fields["fragment"]) for name, event, fields in record.events if event == "clipped"]
    assert sorted(clipped) == [("b", 0), ("b", 1)], "each fragment once"
    assert len({toy.elastic.rounds.loop.agreed.state_digest for toy in results.values()}) == 1
    for toy in results.values():
        for piece, start in zip(toy.pieces, record.start):
            assert 40 < float((piece.anchor - start).max()) <= 60, "what the others trained counts, and no more"


def first_round(tokens: bool) -> tuple[Tensor, list[int]]:
    """Returns the anchor after the first round, and how many values each replica had seen.

    The inner step is a running mean, θ ← θ + (x − θ) / n: after n values θ is their mean. Every value of "f" is 1, every
    value of "s" is 6, and "s" is slower.
    """
    cluster, record = SimulatedCluster(), RecordedRun()
    seen = {"f": 0, "s": 0}

    def inner(toy: Toy, fragment: int) -> Tensor:
        seen[toy.name] += fragment == 0  # once for each step
        value = 1.0 if toy.name == "f" else 6.0
        return (value - toy.parameters[fragment].detach()) / seen[toy.name]

    def run(name: str) -> Any:
        worth = 1.0 if tokens else None
        toy = Toy(cluster, name, record, least=2, grace=100.0, tokens=worth, inner=inner)
        toy.elastic.join()
        for toy.step in (1, 2, 3, 4) if name == "f" else (4,):  # the step of s jumps to that of f
            for fragment, parameter in enumerate(toy.parameters):
                parameter.data += inner(toy, fragment)
            toy.elastic.after_inner_step()
        return toy.pieces[0].anchor

    ended = cluster.play({"f": run, "s": run})
    assert torch.equal(ended["f"], ended["s"]), ended
    return ended["f"], list(seen.values())


def test_weights_by_tokens_correct_unequal_speeds() -> None:
    """The mean of all values is 2. Weights by tokens give it; equal weights would count each value of the slow replica four times."""
    (biased, seen), (unbiased, same) = first_round(tokens=False), first_round(tokens=True)
    assert seen == same == [4, 1]
    torch.testing.assert_close(biased, torch.full((SIZES[0],), 3.5))
    torch.testing.assert_close(unbiased, torch.full((SIZES[0],), 2.0))


BAD: list[Any] = [0, -1, math.nan, math.inf, True, "many", 1e13]


@pytest.mark.parametrize("tokens", BAD)
def test_an_invalid_token_count_is_refused(tokens: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="the number of tokens per inner step"):
        tw.Replica(tw.diloco(every=4), model, optimizer, SimulatedCluster().membership("a", least=1), tokens=tokens)


def alone(tokens: float | None, least: int = 1) -> tuple[tw.Replica, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    membership = SimulatedCluster().membership("a", least=least, timeouts=Timeouts(view=5.0))
    return tw.Replica(tw.diloco(every=4), model, optimizer, membership, tokens=tokens), optimizer


def test_token_counts_may_change_between_steps_but_not_be_switched_off() -> None:
    replica, optimizer = alone(tokens=100)
    for replica.tokens in (100, 50.0):
        optimizer.step()
    assert replica.state()[1]["agreed"]["trained"] == 150
    for replica.tokens in (-1, None):
        with pytest.raises(ConfigurationError, match="tokens"):
            optimizer.step()
    replica.close()
    replica, optimizer = alone(tokens=None)
    replica.tokens = 5
    with pytest.raises(ConfigurationError, match="at the start"):
        optimizer.step()
    replica.close()


def test_a_checkpoint_with_other_weighting_is_refused() -> None:
    replica, other = alone(tokens=100)[0], alone(tokens=None)[0]
    tensors, facts = replica.state()
    with pytest.raises(CheckpointError, match="is the number of its tokens, here it is 1"):
        other.load_state(tensors, facts)
    replica.close(), other.close()


def test_replicas_with_different_weighting_are_refused() -> None:
    cluster = SimulatedCluster()

    def run(name: str) -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = 8 if name == "b" else None
        tw.Replica(tw.diloco(every=4), model, optimizer, cluster.membership(name), tokens=tokens).close()

    told = cluster.play({name: run for name in "abc"})["b"]
    assert isinstance(told, DisagreementError) and "weights: by tokens there, alike at 'a'" in str(told)


def test_replicas_with_different_frozen_parameters_are_refused() -> None:
    cluster = SimulatedCluster()

    def run(name: str) -> Any:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False).fill_(name == "b")
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        tw.Replica(tw.diloco(every=4), model, optimizer, cluster.membership(name)).close()

    told = cluster.play({name: run for name in "abc"})["b"]
    assert isinstance(told, DisagreementError) and "frozen parameters: 1 tensors, digest " in str(told)


def test_the_last_deltas_are_averaged_without_momentum() -> None:
    """As in a fixed group, a whole outer step for a delta of less than a period would overshoot."""
    anchor, delta, outer = torch.zeros(4), torch.ones(4), tw.pieces.outer.Nesterov(lr=0.5, momentum=0.8)
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4), outer=outer)
    agreed = GlobalState([anchor], [outer.init(anchor)])
    rounds = RoundThread(
        strategy, SimulatedCluster().membership("a", least=1), agreed, [Identity()], [0], observe=lambda *_, **__: None,
        thread=Inline(),
    )  # fmt: skip
    rounds.join(0)
    rounds.depart(Ready(0, delta, 1.0, 4, {}), own_steps=4)
    rounds.finish(0.0)
    rounds.meet(Ready(0, delta, 1.0, 5, {}))
    first, second = (outcome for outcome in rounds.outcomes(99) if outcome.anchor is not None)
    due, state = outer.step(anchor, delta, outer.init(anchor))
    torch.testing.assert_close(first.anchor, due)
    torch.testing.assert_close(second.anchor, due - delta)
    assert second.state.keys() == state.keys()
    for name, kept in state.items():  # rounds of a joiner continue from this state
        torch.testing.assert_close(second.state[name], kept)
