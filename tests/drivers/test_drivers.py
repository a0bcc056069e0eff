"""The driver that a replica chooses, and that a new driver fits behind the same face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from strategies import METHODS
from torch import Tensor

import thinwire as tw
from thinwire import checkpoint
from thinwire.drivers.base import Driver, Training
from thinwire.drivers.deltas import DeltaDriver
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.fragment import first_state
from thinwire.drivers.gradients import GradientDriver
from thinwire.exchange import ExchangeTraits
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, toy, weights


@pytest.mark.parametrize("name", ["streaming_diloco", "data_parallel"])
def test_the_strategy_selects_the_driver_of_a_fixed_group(name):
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    with tw.Replica(METHODS[name], model, adamw(model), group) as replica:
        due = GradientDriver if isinstance(METHODS[name].signal, tw.strategy.Gradients) else DeltaDriver
        assert type(replica._driver) is due
        assert (replica._driver.training.step, replica._driver.training.stall_seconds) == (0, 0.0)
        inner_step(model, replica.optimizer, *batch(0, 0, 1))


@dataclass(frozen=True)
class Disagreeing(tw.exchange.Exchange):
    """A user's exchange that declares `agrees` False, as gossip does."""

    traits = ExchangeTraits(agrees=False)

    def depart(self, round_, state): ...

    def arrive(self, departure): ...

    def nbytes_sent(self, codec, numel, size, rank=None):
        return 0

    def seconds(self, codec, numel, size, link):
        return 0.0


def test_an_own_exchange_that_does_not_agree_is_refused_by_name():
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    with pytest.raises(
        tw.ConfigurationError, match=r"Disagreeing\(\) declares that replicas do not agree, and names no driver"
    ):
        tw.Replica(tw.Strategy(exchange=Disagreeing()), model, adamw(model), group)


def test_a_membership_selects_the_elastic_driver():
    cluster = SimulatedCluster()

    def play(name):
        model = toy()
        membership = cluster.membership(name, least=1)
        replica = tw.Replica(tw.local_sgd(every=2), model, adamw(model), membership)
        replica.close()
        return type(replica._driver)

    assert cluster.play({"a": play}) == {"a": ElasticDriver}


class Alone(Driver):
    """A driver for one replica: every third step its anchors become its parameters."""

    def __init__(self, training: Training, fragments: list[tw.pieces.partition.Fragment]) -> None:
        self.training, self.heard = training, []
        training.fragments += [first_state(training.strategy, one, i, 0, 1) for i, one in enumerate(fragments)]

    def before_inner_step(self, closure: bool) -> None:
        self.heard.append(f"before {self.training.step + 1}")

    def after_inner_step(self) -> None:
        self.heard.append(f"after {self.training.step}")
        if self.training.step % 3 == 0:
            for one in self.training.fragments:
                one.anchor = one.snapshot(torch.empty_like(one.anchor))

    def finish(self, keep_seconds: float) -> bool:
        self.heard.append("finish")
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self.training.state()
        return tensors, facts | {"heard": self.heard}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.training.load_state(tensors, facts)
        self.heard = list(facts["heard"])

    def anchors(self) -> list[Tensor]:
        return [one.anchor.clone() for one in self.training.fragments]

    def load_anchors(self) -> None:
        self.training.load_anchors()

    def request_stop(self) -> None:
        self.training.stopping = True

    def close(self) -> None:
        self.heard.append("close")


def test_a_new_driver_needs_no_change_in_replica(monkeypatch, tmp_path):
    def choose(
        training: Training, fragments: list[tw.pieces.partition.Fragment], group: object, site: object
    ) -> Driver:
        return Alone(training, fragments)

    monkeypatch.setattr("thinwire.replica.choose", choose)
    (group,) = tw.ThreadGroup.create(1)

    def begin():
        model = toy()
        return model, tw.Replica(tw.local_sgd(every=3), model, adamw(model), group)

    model, replica = begin()
    after = []
    for step in range(1, 6):
        inner_step(model, replica.optimizer, *batch(0, 0, step))
        after.append(weights(model))
    with replica.anchored():
        assert same_bits(weights(model), after[2])
    assert same_bits(weights(model), after[4]) and replica.step == 5 and not replica.stopping
    saved = checkpoint.read(checkpoint.save(tmp_path, replica, {}))
    replica.request_stop()
    replica.exchange_gradients()
    assert replica.stopping
    replica.finish()
    assert same_bits(weights(model), after[2])
    heard = [f"{when} {step}" for step in range(1, 6) for when in ("before", "after")]
    assert replica._driver.heard == [*heard, "before 6", "finish", "close"]
    inner_step(model, replica.optimizer, *batch(0, 0, 6))
    assert replica.step == 5  # the replica is detached

    model, other = begin()
    checkpoint.load(saved, other)
    assert other.step == 5 and other._driver.heard == heard and same_bits(weights(model), after[4])
    other.close()


class Unhooked(torch.optim.Optimizer):
    """As accelerate's: it steps another one, and does not initialise its base class."""

    def __init__(self) -> None:
        self.optimizer = adamw(toy())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": tw.diloco}, "strategy: a function was given; a Strategy is needed"),
        ({"strategy": "diloco"}, "strategy: a str was given"),
        ({"model": [toy()]}, "model: a list was given; .* nn.ModuleList"),
        ({"optimizer": toy()}, "optimizer: a Toy was given; a torch.optim.Optimizer"),
        ({"group": tw.ThreadGroup.create(2)}, "group: a list was given; this replica's Group"),
        ({"group": None}, "group: a NoneType was given"),
        ({"optimizer": Unhooked()}, "a Unhooked was given, whose steps torch's hooks do not see"),
    ],
)
def test_an_argument_of_another_kind_is_named(given, said):
    (group,), model = tw.ThreadGroup.create(1), toy()
    arguments = {"strategy": tw.diloco(), "model": model, "optimizer": adamw(model), "group": group}
    with pytest.raises((tw.ConfigurationError, tw.ModelError), match=said):
        tw.Replica(**(arguments | given))
