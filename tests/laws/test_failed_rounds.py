"""Law 3: a failed round changes nothing, and nothing is lost: what was trained stays in the parameters and is sent in the next delta."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from pieces import Picky
from strategies import METHODS, each
from torch import nn

import thinwire as tw
from thinwire.testing.toy import Journey, adamw, batch, inner_step, journey, same_bits, toy, weights

NAN, INF = float("nan"), float("inf")
Gradient = Callable[[int, int], float]  # of replica and step


def line(strategy: tw.Strategy, replicas: int, steps: int, gradient: Gradient) -> list[list[float]]:
    """Trains one weight from 1 by SGD with lr 1. Returns it after every step and after finishing. Powers of two make sums exact."""

    def replica(group: tw.Group) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trace = []
        with tw.Replica(strategy, model, optimizer, group):
            for step in range(1, steps + 1):
                model.weight.grad = torch.full_like(model.weight, gradient(group.rank, step))
                optimizer.step()
                trace.append(model.weight.item())
        return [*trace, model.weight.item()]

    return tw.run_threads(replicas, replica, timeout=600.0)


def steady(rank: int, step: int) -> float:
    return (0.25, 0.5, 1.0)[rank]


def poisoned(rank: int, at: int, value: float = NAN) -> Gradient:
    return lambda m, step: value if (m, step) == (rank, at) else steady(m, step)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_progress_of_a_refused_round_is_sent_later(value):
    """Replica 1 of two is poisoned at step 2. The round at 3 is dropped; that at 6 carries six steps of replica 0 and three of replica 1."""
    zero, one = line(tw.local_sgd(every=3), 2, 6, poisoned(1, 2, value))
    assert zero[:5] == [1 - 0.25 * t for t in range(1, 6)], "replica 0 went on as if nothing had been"
    assert one[2:5] == [1.0, 0.5, 0.0], "replica 1 started again from the anchor, 1"
    agreed = 1 - (6 * 0.25 + 3 * 0.5) / 2
    assert zero[5:] == one[5:] == [agreed, agreed]


def test_progress_with_rounds_in_flight_survives_a_refusal():
    """Delay 2, α = 0: the refused round lands at 5 and is not merged, so the steps of the flight are kept too."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(3, 2))
    zero, one = line(strategy, 2, 8, poisoned(1, 2))
    assert zero[:7] == [1 - 0.25 * t for t in range(1, 8)]
    assert one[4:7] == [1.0, 0.5, 0.0]
    # the round departed at 6, with six steps of replica 0 and one of replica 1 since it restarted
    agreed = 1 - (6 * 0.25 + 0.5) / 2
    assert zero[7] == one[7] == agreed


def test_a_refused_round_changes_no_outer_state():
    """Momentum is as if the refused round had not happened: 1.9 times the whole delta at once."""
    strategy = tw.diloco(every=2, outer_lr=0.5, outer_momentum=0.5)
    zero, _ = line(strategy, 2, 6, poisoned(1, 1))
    first = (4 * 0.25 + 2 * 0.5) / 2  # the delta at step 4
    anchor, v = 1 - 0.5 * (first + 0.5 * first), first
    assert zero[3] == anchor
    second = (2 * 0.25 + 2 * 0.5) / 2
    v = 0.5 * v + second
    assert zero[5] == pytest.approx(anchor - 0.5 * (second + 0.5 * v), abs=1e-7)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_an_overflowing_round_is_refused_without_a_culprit(delay):
    """The outer step overflows on a delta below 1. All replicas keep their weights, and the sum of all progress lands at once."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, delay), outer=Picky(at_least=1.5), merge=tw.pieces.merge.Mix(0.0)
    )
    traces = line(strategy, 2, 6 + delay, steady)
    for rank, trace in enumerate(traces):
        assert trace[: 5 + delay] == [1 - steady(rank, 0) * t for t in range(1, 6 + delay)]
        assert trace[5 + delay] == 1 - 6 * (0.25 + 0.5) / 2


def test_eager_rounds_conserve_progress():
    """Replica 1 is poisoned at step 5. Its round of step 6 is refused at 9, where it restarts. Only its steps 4 … 9 are lost."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Staggered(3, 3), merge=tw.pieces.merge.Eager())
    for steps in (12, 13, 15, 17, 18):
        kept = sum(steady(0, t) for t in range(1, steps + 1)) + sum(
            steady(1, t) for t in range(1, steps + 1) if not 4 <= t <= 9
        )
        zero, one = line(strategy, 2, steps, poisoned(1, 5))
        assert zero[-1] == one[-1] == 1 - kept / 2, steps


def test_refused_rounds_conserve_progress():
    """Σ of the anchors' moves = Σ of all replicas' moves, over two poisonings. Only what a poisoned replica trained since its last good
    round is lost."""
    nans = {(1, 4), (2, 13)}
    traces = line(tw.local_sgd(every=5), 3, 20, lambda m, t: NAN if (m, t) in nans else steady(m, t))
    lost = {(1, t) for t in range(1, 6)} | {(2, t) for t in range(11, 16)}
    kept = sum(steady(m, t) for m, t in itertools.product(range(3), range(1, 21)) if (m, t) not in lost)
    assert [trace[-1] for trace in traces] == pytest.approx([1 - kept / 3] * 3, abs=1e-5)


TWO = tw.pieces.partition.BySize(2)
KEEP = tw.Strategy(schedule=tw.pieces.schedule.Staggered(10, 6), partition=TWO, merge=tw.pieces.merge.Keep())


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [(KEEP, range(15, 22)), (tw.lab.recipes.d_psgd(every=10, delay=7, partition=TWO), range(11, 16))],
    ids=["deltas", "gossip"],
)
def test_what_is_in_flight_at_a_restart_counts_once(strategy: tw.Strategy, missing: range) -> None:
    """The second weight of replica 1 becomes NaN at step 14, and the loop leaves out steps whose loss is not finite. At the restart the
    first weight is in flight, with steps before that; only steps that have not departed, or were left out, are missing."""

    def replica(group: tw.Group) -> float:
        model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with tw.Replica(strategy, model, optimizer, group):
            for step in range(1, 25):
                sound = all(bool(torch.isfinite(weight)) for weight in model)
                for weight in model:
                    weight.grad = torch.full_like(weight, -steady(group.rank, step)) if sound else None
                if (group.rank, step) == (1, 14):
                    model[1].grad = torch.tensor([NAN])
                optimizer.step()
        return model[0].item()

    kept = sum(steady(0, step) + steady(1, step) * (step not in missing) for step in range(1, 25))
    assert tw.run_threads(2, replica) == [kept / 2] * 2


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot()], ids=str)
@pytest.mark.parametrize("codec", [tw.codecs.Sign(block=8), tw.codecs.TopK(0.5)], ids=str)
@pytest.mark.parametrize("filters", [(), (tw.pieces.transforms.Momentum(0.5),)], ids=["feedback", "filters"])
def test_a_replica_that_an_aggregate_leaves_out_keeps_its_own_state(exchange, codec, filters):
    """The delta at step 8 of replica 1 is NaN, and the median of the others lands. Its next delta is whole, with what was held back before."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(4), codec=codec, filters=filters, feedback=tw.pieces.feedback.Feedback(),
        exchange=exchange, aggregate=tw.lab.robust.coordinates.Median(),
    )  # fmt: skip
    held: dict[int, dict[str, torch.Tensor]] = {}

    def poison(replica: tw.Replica, step: int) -> None:
        poison_gradient(5)(replica, step)
        if replica.group.rank == 1:
            own = {name: t.clone() for name, t in replica.state()[0].items() if name.endswith(("residual", "velocity"))}
            held[step] = own

    journeys = journey(strategy, 3, steps=16, before_step=poison)
    assert all(torch.isfinite(kept).all() for of in held.values() for kept in of.values())
    before, after, later = (held[step]["0.feedback.residual"] for step in (8, 9, 13))
    assert before.any() and not same_bits(after, later)
    assert same_bits(before, after) or exchange != tw.exchange.Direct()  # in other shards its values have counted
    assert all(same_bits(one.final, journeys[0].final) and not one.heard("refused") for one in journeys)


# ---- the poisoned replica recovers


def poison_gradient(at: int, rank: int = 1, value: float = NAN):
    def poison(replica: tw.Replica, step: int) -> None:
        if step == at and replica.group.rank == rank:
            next(p for p in replica.model.parameters() if p.grad is not None).grad.view(-1)[0] = value

    return poison


def poison_parameter(at: int, rank: int = 1, value: float = NAN):
    def poison(replica: tw.Replica, step: int) -> None:
        if step == at and replica.group.rank == rank:
            with torch.no_grad():
                next(p for p in replica.model.parameters() if p.requires_grad).view(-1)[0] = value

    return poison


def check_recovery(journeys: list[Journey], rank: int, unseen: bool = False) -> None:
    """Checks that replica `rank` recovered. `unseen`: a landing with α = 0 may overwrite NaN in a parameter before it departs."""
    refused = [[(e["step"], e["fragment"], e["round"], e["by"]) for e in one.heard("refused")] for one in journeys]
    assert refused[0] or unseen
    assert all(other == refused[0] for other in refused), "refused everywhere or nowhere"
    assert all(by == [rank] for *_, by in refused[0])
    for one in journeys:
        for now in one.agreed:
            assert all(torch.isfinite(t).all() for t in now.values()), "NaN in an anchor or in outer state"
        assert torch.isfinite(one.final).all() and same_bits(one.final, journeys[0].final)
        assert max((step for step, *_ in refused[0]), default=0) < one.events[-1]["step"], "training went on"
    assert torch.isfinite(journeys[rank].weights[-1]).all()


NOT_GRADIENTS = [name for name in METHODS if not isinstance(METHODS[name].signal, tw.strategy.Gradients)]
GRADIENTS = [name for name in METHODS if name not in NOT_GRADIENTS]
INFINITE = ("data_parallel", "diloco", "eager_diloco", "one_bit_adam", "streaming_sign")  # NaN: with all methods


@cache
def refused_once(name: str) -> list[Journey]:
    return journey(METHODS[name], 3, steps=16, before_step=poison_gradient(5))


@pytest.mark.parametrize("name", each(METHODS))
def test_training_recovers_from_a_nan_gradient(name):
    """One gradient of one replica is NaN. In AdamW it reaches the weights and both moments, and must disappear from all of them."""
    check_recovery(refused_once(name), 1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in INFINITE)) for n in METHODS])
def test_training_recovers_from_an_infinite_gradient(name):
    """The replica with it is the one with whose bytes the others compare theirs."""
    check_recovery(journey(METHODS[name], 2, steps=16, before_step=poison_gradient(5, 0, INF)), 0)


@pytest.mark.parametrize("name", each(NOT_GRADIENTS))
def test_training_recovers_from_a_nan_parameter(name):
    journeys = journey(METHODS[name], 2, steps=16, before_step=poison_parameter(5))
    check_recovery(journeys, 1, unseen=METHODS[name].merge == tw.pieces.merge.Mix(0.0))


@pytest.mark.parametrize("name", each(GRADIENTS))
def test_bad_weights_without_anchors_end_the_run_by_name(name):
    """With Gradients no replica holds anchors, and training without steps for ever would be worse."""

    def poison_step(replica, step):
        if step == 5 and replica.group.rank == 1:
            replica.optimizer.param_groups[0]["lr"] = INF

    for poison in (poison_parameter(5), poison_step):
        with pytest.raises(
            tw.NonFiniteError, match=r"the weights of replica 1 hold NaN or infinity.*resume from the last checkpoint"
        ):
            journey(METHODS[name], 2, steps=24, before_step=poison)


@pytest.mark.parametrize("name", each(GRADIENTS))
def test_a_refused_gradient_changes_nothing(name):
    """Weights and moments stay on every replica and in every fragment, and the next step is as if it were this one."""
    journeys = journey(METHODS[name], 2, steps=8, before_step=poison_gradient(4))
    for one in journeys:
        assert same_bits(one.weights[3], one.weights[2]) and not same_bits(one.weights[4], one.weights[3])
        assert {e["step"] for e in one.heard("refused")} == {3}  # during inner step 4


@pytest.mark.parametrize("name", each(NOT_GRADIENTS))
def test_a_refused_round_changes_no_anchor(name):
    """Anchors and outer state have the same bits before and after the landing of a refused round of the only fragment."""
    for one in refused_once(name):
        for event in one.heard("refused"):
            prefix = f"{event['fragment']}."
            if event["step"] < 2:
                continue
            before, after = one.agreed[event["step"] - 2], one.agreed[event["step"] - 1]
            assert all(same_bits(before[n], after[n]) for n in before if n.startswith(prefix))


def test_replica_zero_is_unharmed_by_a_peers_nan():
    """Until the next good round it trains as if alone, like the inner optimizer, bit for bit."""
    journeys = journey(tw.local_sgd(every=4), 2, steps=7, before_step=poison_gradient(2))
    model = toy()
    alone = adamw(model)
    for step in range(1, 8):
        inner_step(model, alone, *batch(0, 0, step))
        assert same_bits(journeys[0].weights[step - 1], weights(model)), step


def test_restarts_from_the_anchors_keep_no_memory() -> None:
    """Each drops the own delta, and the deviation from the anchor with its outer state."""
    merge, outer = tw.pieces.merge.Eager(), tw.pieces.outer.Nesterov(0.5, 0.5)
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4, 4), merge=merge, outer=outer)

    def lent(group: tw.Group, poisons: range) -> int:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.Replica(strategy, model, optimizer, group) as replica:
            for step in range(1, 61):
                value = NAN if group.rank and step in poisons else 1.0
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, value)
                optimizer.step()
        return len(replica._driver._flights.buffers._lent)  # type: ignore[attr-defined]

    often, never = (
        tw.run_threads(2, lambda group, poisons=poisons: lent(group, poisons), timeout=600.0)
        for poisons in (range(5, 61, 12), range(0))
    )
    assert all(a <= b for a, b in zip(often, never, strict=True)), (often, never)
