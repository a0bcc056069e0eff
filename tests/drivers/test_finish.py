"""The end of training: no round departs without a step since the last one, and the last round is a plain average."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from strategies import METHODS
from torch import nn

import thinwire as tw
from thinwire.pieces.schedule import Calendar
from thinwire.testing.toy import adamw, batch, inner_step, journey, same_bits, toy, weights

FAST = {"local_sgd", "diloco", "streaming_diloco", "eager_diloco", "co2", "data_parallel", "outer_dgc", "qsr"}
DELTAS = [name for name in METHODS if not isinstance(METHODS[name].signal, tw.strategy.Gradients)]


def ends_on_time(strategy: tw.Strategy, fragments: int, least: int = 9) -> int:
    """Returns a number of steps at whose end a fragment departs."""
    calendar = Calendar(strategy.schedule, fragments, lambda step: 0.01)
    return next(step for step in range(1, 100) if calendar.departs(step) and step >= least)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in DELTAS])
@pytest.mark.parametrize("over", [0, 1])
def test_no_round_departs_without_a_step_trained(name, over):
    """For each fragment, every round carries steps that no earlier one has carried; in the end all are carried or discarded. A policy may have
    one more round at the end, for what was not sent.
    """
    strategy = METHODS[name]
    count = len(strategy.partition.fragments(toy()))
    steps = ends_on_time(strategy, count) + over
    departures = [(e["fragment"], e["step"]) for e in journey(strategy, 2, steps=steps)[0].heard("depart")]
    twice = count if strategy.policy.last is not strategy.policy else 0
    assert len(departures) <= len(set(departures)) + twice, "twice after one step"
    last = dict(departures)
    # then steps trained in flight are discarded
    forgets = isinstance(strategy.merge, tw.pieces.merge.Mix) and strategy.merge.alpha == 0
    least = steps - (strategy.schedule.delay if forgets else 0)
    assert all(last.get(fragment, 0) >= least for fragment in range(count))


@pytest.mark.parametrize("name", ["diloco", "sparse_loco", "local_sgd"])
def test_finish_right_after_a_round_moves_no_weight(name):
    """The anchors after the last scheduled round equal the model, bit for bit, also for a replica that resumed there."""
    strategy = dataclasses.replace(METHODS[name], schedule=tw.pieces.schedule.Every(3))
    whole = journey(strategy, 2, steps=9)
    for one in whole:
        assert same_bits(one.final, one.weights[-1])
        assert [e["step"] for e in one.heard("depart")] == [3, 6, 9]
        assert [e["scheduled"] for e in one.heard("wire")] == [True] * 3

    def resumed(group):
        model = toy()
        optimizer = adamw(model)
        replica = tw.Replica(strategy, model, optimizer, group)
        for step in range(1, 10):
            inner_step(model, optimizer, *batch(0, group.rank, step))
        tensors, facts = replica.state()
        replica.close()
        again = toy(seed=5)
        again.load_state_dict(model.state_dict())
        with tw.Replica(strategy, again, adamw(again), group) as second:
            second.load_state(tensors, facts)
            assert second.step == 9
        return second.state()[1]["rounds"], weights(again)

    for (rounds, ended), one in zip(tw.run_threads(2, resumed), whole):
        assert rounds == [3] and same_bits(ended, one.final)


def test_finish_exchanges_a_single_step():
    first, second = journey(tw.diloco(every=9), 2, steps=1)
    assert same_bits(first.final, second.final)
    assert [event["scheduled"] for event in first.heard("wire")] == [False]
    torch.testing.assert_close(first.final, (first.weights[0] + second.weights[0]) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("anchors", "order"), [("host", "0d 1d 2d 0l 1l 2l"), ("disk", "0d 1d 0l 2d 1l 2l")])
def test_the_last_rounds_are_in_the_air_together_but_two_of_what_is_on_disk(anchors, order):
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(4), partition=tw.pieces.partition.Strided(2), anchors=anchors
    )
    one, _ = journey(strategy, 2, steps=2)
    assert " ".join(f"{e['fragment']}{e['event'][0]}" for e in one.events if e["event"] in ("depart", "land")) == order


OUTERS = [tw.pieces.outer.Nesterov(0.7, 0.9), tw.pieces.outer.HeavyBall(0.8, 0.6), tw.pieces.outer.Average()]


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_the_last_round_is_a_plain_average(outer):
    """For any outer step the result is the mean of the replicas' parameters, and the outer state stays."""
    journeys = journey(tw.Strategy(schedule=tw.pieces.schedule.Every(3), outer=outer), 2, steps=8)
    mean = (journeys[0].weights[-1] + journeys[1].weights[-1]) / 2
    for one in journeys:
        torch.testing.assert_close(one.final, mean, rtol=1e-6, atol=1e-6)
        for key in (key for key in one.final_agreed if ".outer." in key):
            assert same_bits(one.final_agreed[key], one.agreed[-1][key])


def test_a_user_outer_step_without_last_ends_with_a_usual_round():
    """Without `last`, the last round is like all others."""
    for piece, moved in ((Scaled(2.0), 2.0), (ThenHalf(2.0), 0.5)):
        (one,) = journey(tw.Strategy(schedule=tw.pieces.schedule.Every(3), outer=piece), 1, steps=4)
        anchor = one.agreed[-1]["0.now"]
        ended = torch.cat(one.final_fragments)
        torch.testing.assert_close(ended, anchor - moved * (anchor - one.weights[-1]), rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Scaled(tw.pieces.outer.Outer):
    by: float = 1.0
    linear = True

    def step(self, anchor, delta, state):
        return anchor - self.by * delta, state


class ThenHalf(Scaled):
    last = Scaled(0.5)


@pytest.mark.parametrize("merge", [tw.pieces.merge.Eager(), tw.pieces.merge.Reset()], ids=str)
def test_a_round_dropped_at_the_end_is_sent_again(merge):
    """A whole period is in the air, and nothing was trained since. What would be lost is sent once more; all stay finite and equal."""

    def before_step(replica, step):
        if step == 6 and replica.group.rank == 1:
            next(iter(replica.model.parameters())).grad.fill_(float("nan"))

    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(3, 3), merge=merge)
    journeys = journey(strategy, 2, steps=6, before_step=before_step)
    for one in journeys:
        assert [e["round"] for e in one.heard("refused")] == [1]
        assert [e["step"] for e in one.heard("depart")] == [3, 6, 6]
        assert torch.isfinite(one.final).all() and same_bits(one.final, journeys[0].final)


def test_replicas_finish_on_a_group_on_which_earlier_ones_did_not():
    """One was closed, one could not resume, and one began with NaN. What each said of its end is not taken for another's."""

    def replica(group):
        def fails(replica):
            raise tw.CheckpointError("no sound checkpoint")

        model = toy()
        tw.Replica(tw.local_sgd(every=9), model, adamw(model), group).close()
        with pytest.raises(tw.CheckpointError):
            tw.Replica(tw.local_sgd(every=9), model, adamw(model), group, resume=fails)
        with pytest.raises(tw.ModelError):
            bad = toy()
            torch.nn.init.constant_(bad.gain, torch.nan)
            tw.Replica(tw.local_sgd(every=9), bad, adamw(bad), group)
        with tw.Replica(tw.local_sgd(every=9), model, adamw(model), group) as attached:
            inner_step(model, attached.optimizer, *batch(0, group.rank, 1))
        return weights(model)

    assert same_bits(*tw.run_threads(2, replica, timeout=600.0))


@pytest.mark.parametrize("strategy", [tw.local_sgd(every=9), tw.data_parallel(), tw.lab.recipes.d_psgd()])
def test_a_finish_that_failed_does_not_succeed_the_second_time(strategy):
    """The weights are not those on which all agree, which a loop that tries again must hear."""

    def replica(group):
        model = toy()
        attached = tw.Replica(strategy, model, adamw(model), group)
        inner_step(model, attached.optimizer, *batch(0, group.rank, 1))
        if group.rank == 0:
            for _ in range(2):
                with pytest.raises(tw.LinkError, match="replica 1 closed"):
                    attached.finish()
        attached.close()

    tw.run_threads(2, replica, timeout=600.0)


@pytest.mark.parametrize("ends", [tw.Replica.finish, tw.Replica.close])
@pytest.mark.parametrize(
    "asks", [lambda replica: replica.mean(1.0), lambda replica: replica.averaged_buffers().__enter__()]
)
def test_a_replica_that_has_left_is_missed_in_an_evaluation(ends: Callable[[tw.Replica], None], asks: Any) -> None:
    """Before a round of theirs is due. Neither waits for the other until the time-out."""

    def train(group: tw.Group) -> str:
        model = nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = tw.Replica(tw.diloco(every=100), model, optimizer, group)
        for _ in range(3 - group.rank):
            optimizer.step()
        with pytest.raises(tw.ThinwireError) as caught:
            (ends if group.rank else asks)(replica)
            raise tw.LinkError("has closed")
        replica.close()
        return str(caught.value)

    zero, _ = tw.run_threads(2, train, timeout=600.0)
    assert re.match(r"replica 1 (has finished after|closed its Replica after) 2 inner steps", zero)


def test_a_mean_has_the_same_bits_on_all_replicas() -> None:
    def train(group: tw.Group) -> tuple[float, float]:
        model = nn.Linear(1, 1)
        with tw.Replica(tw.diloco(), model, torch.optim.SGD(model.parameters(), lr=0.1), group) as replica:
            model.weight.grad = None
            return replica.mean(0.1), replica.mean(float(group.rank))

    assert tw.run_threads(3, train, timeout=600.0) == [(0.1, 1.0)] * 3


def test_a_loop_may_close_its_replica_and_then_exchanges_nothing():
    """`with` does not finish what the loop has closed; the model keeps the replica's own weights."""

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        with tw.Replica(tw.diloco(every=5), model, optimizer, group) as attached:
            for step in range(1, 9):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            own = weights(model)
            attached.close()
        with pytest.raises(tw.ConfigurationError, match=r"finish\(\) after close\(\)"):
            attached.finish()
        assert same_bits(weights(model), own)
        inner_step(model, optimizer, *batch(0, group.rank, 9))
        return attached.step, own

    (steps, a), (_, b) = tw.run_threads(2, replica)
    assert steps == 8 and not same_bits(a, b)
