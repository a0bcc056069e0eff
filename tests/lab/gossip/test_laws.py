"""Laws of replicas that hear only neighbours: what is conserved, speed of consensus, bytes, order of arrival, resuming, stopping."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest
import torch
from strategies import GOSSIP

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.errors import NonFiniteError
from thinwire.lab.gossip.consensus import mean_of_all
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import AdaptThenCombine, Choco, CombineThenAdapt, NoLoCo, PushSum, Tracking
from thinwire.lab.topology import (
    Complete,
    Cut,
    Exponential,
    Listed,
    MoshpitGrid,
    OnePeerExponential,
    RandomGroups,
    RandomPairs,
    Ring,
    Torus,
    mixing,
    spectrum,
)
from thinwire.rng import Key
from thinwire.testing.strategies import any_order_of_arrival, counted, counted_as_predicted, resumed_is_never_stopped
from thinwire.testing.toy import batch, inner_step, journey, same_bits, sgd, toy, weights


@cache
def calm(name):
    """A run of four replicas with its bytes counted, which several laws read."""
    return counted(GOSSIP[name], 4, steps=8, clock=lambda: 5.0)


named = pytest.mark.parametrize("name", GOSSIP)
SIZE = 8
ONE_WAY = Listed((*((i, (i + 1) % SIZE) for i in range(SIZE)), (0, 3), (0, 5), (2, 6)), one_way=True)


def gossip(topology, rule, **pieces):
    return tw.Strategy(exchange=tw.lab.gossip.exchange.Gossip(topology, rule), **pieces)


def apart(strategy, size, steps, train=0.0):
    """Runs replicas that start with different weights. Returns x and state of each round, flat, as [replica, numel]."""

    def replica(group):
        model = toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=train)
        seen = []
        with tw.Replica(strategy, model, optimizer, group) as one:
            driver = one._driver
            (fragment,) = driver.training.fragments
            first = strategy.exchange.begins(fragment.anchor, Key(sender=group.rank), size)
            assert all(same_bits(fragment.exchange[name], value) for name, value in first.items())
            own = torch.randn(fragment.anchor.numel(), generator=torch.Generator().manual_seed(group.rank))
            fragment.anchor = own.clone()
            rule = strategy.exchange.rule
            # Choco's public copies must be equal on all replicas; with different starts only zeros are
            fragment.exchange = rule.init(torch.zeros_like(own) if isinstance(rule, Choco) else own)
            fragment.load_into_parameters(own)
            for step in range(steps + 1):
                x, state = fragment.anchor, fragment.exchange
                seen.append((x.clone(), strategy.exchange.rule.conserved(x, state).clone(), dict(state)))
                if step < steps:
                    optimizer.zero_grad()
                    optimizer.step()
        return seen, weights(model)

    runs = tw.run_threads(size, replica, timeout=600.0)
    rounds = list(zip(*(seen for seen, _ in runs)))
    return (
        [torch.stack([x for x, _, _ in of]).double() for of in rounds],
        [torch.stack([kept for _, kept, _ in of]).double() for of in rounds],
        [[state for _, _, state in of] for of in rounds],
        [final for _, final in runs],
    )


def distance(x):
    return float((x - x.mean(0)).norm())


# ---- what is conserved, and how fast replicas reach consensus


@pytest.mark.parametrize(
    "strategy",
    [
        gossip(Ring(), AdaptThenCombine()),
        gossip(Exponential(), CombineThenAdapt()),
        gossip(Torus(2), Choco(0.2), codec=tw.codecs.TopK(0.1)),
        gossip(Ring(), Choco(), codec=tw.codecs.E3M0(8)),
        gossip(ONE_WAY, PushSum()),
        gossip(OnePeerExponential(), PushSum()),
        gossip(Ring(), Tracking()),
        gossip(MoshpitGrid(), AdaptThenCombine()),
        gossip(ONE_WAY, MGS(PushSum(), 2)),
        gossip(Cut(Ring(), 2, 5), AdaptThenCombine()),
        gossip(RandomGroups(4), NoLoCo()),
        gossip(RandomPairs(), NoLoCo()),
    ],
    ids=lambda one: str(one.exchange),
)
def test_the_sum_is_conserved_in_every_round(strategy):
    """Σx (push-sum: Σw·x, and Σw = M) is conserved within rounding under any codec, and all replicas end at its mean."""
    sparse = strategy.codec != tw.codecs.Identity()  # it reaches consensus more slowly
    x, kept, states, finals = apart(strategy, SIZE, 24 if sparse else 8)
    begun, size = kept[0].sum(0), float(kept[0].abs().max())
    for number, now in enumerate(kept):
        assert float((now.sum(0) - begun).abs().max()) < 2e-6 * SIZE * size, number
    if "weight" in states[0][0]:
        totals = [sum(float(state["weight"]) for state in of) for of in states]
        assert all(abs(total - SIZE) < 1e-5 for total in totals)
        assert all(float(state["weight"]) > 0 for of in states for state in of)
    assert distance(x[-1]) < 0.75 * distance(x[0])
    assert all(same_bits(finals[0], other) for other in finals), "at the end all take the mean"
    torch.testing.assert_close(finals[0].double(), x[0].mean(0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("topology", [Ring(), Torus(2), Exponential(), Complete()], ids=str)
def test_consensus_contracts_as_the_spectrum_says(topology):
    """The contraction is no slower than ‖W − J‖, and equal to it along the slowest direction. It is measured on real exchanges."""
    x, _, _, _ = apart(gossip(topology, AdaptThenCombine()), SIZE, 10)
    found, slowest = spectrum(topology, SIZE), np.linalg.norm(mixing(topology, SIZE) - 1 / SIZE, 2)
    shrunk = [distance(after) / distance(before) for before, after in itertools.pairwise(x) if distance(before) > 1e-3]
    assert all(ratio <= slowest + 1e-5 for ratio in shrunk)
    if found.second:
        assert shrunk[-1] == pytest.approx(found.second, rel=0.05)


@pytest.mark.parametrize(
    ("topology", "rule"),
    [(Ring(), AdaptThenCombine()), (OnePeerExponential(), AdaptThenCombine()), (ONE_WAY, PushSum())],
    ids=str,
)
def test_a_round_of_several_gossip_steps_is_as_many_rounds(topology, rule):
    """Without training they are equal, bit for bit. So ‖x − mean‖ shrinks by ‖W^Q − J‖, and the mean stays."""
    once, _, _, _ = apart(gossip(topology, rule), SIZE, 6)
    steps, _, _, _ = apart(gossip(topology, MGS(rule, 3)), SIZE, 2)
    if rule == AdaptThenCombine():
        assert torch.equal(steps[1], once[3]) and torch.equal(steps[2], once[6])
    torch.testing.assert_close(steps[2], once[6], atol=1e-6, rtol=0)
    assert topology != OnePeerExponential() or distance(steps[1]) < 2e-6  # three such rounds give the mean of eight


def test_dfedsam_without_radius_is_local_sgd_with_gossip():
    plain = journey(tw.lab.recipes.dfedsam(every=3, radius=0.0), 4, steps=7)
    inner = tw.lab.recipes.dfedsam().inner.inner
    other = journey(dataclasses.replace(tw.lab.recipes.d_psgd(every=3), inner=inner), 4, steps=7)
    assert all(same_bits(a, b) for one, two in zip(plain, other) for a, b in zip(one.weights, two.weights))
    sharp = journey(tw.lab.recipes.dfedsam(every=3), 4, steps=7)
    assert not same_bits(sharp[0].weights[0], plain[0].weights[0])


def test_two_cut_halves_agree_within_and_converge_when_healed():
    x, _, _, _ = apart(gossip(Cut(Ring(), 1, 25), AdaptThenCombine()), SIZE, 65)
    cut, healed = x[25], x[65]
    assert distance(cut[:4]) < 1e-2 * distance(x[0]) and distance(cut[4:]) < 1e-2 * distance(x[0])
    between = distance(torch.stack([cut[:4].mean(0), cut[4:].mean(0)]))
    assert between == pytest.approx(distance(torch.stack([x[1][:4].mean(0), x[1][4:].mean(0)])), rel=1e-4)
    assert distance(healed) < 1e-2 * between


@pytest.mark.parametrize(
    ("topology", "rounds"), [(OnePeerExponential(), 3), (MoshpitGrid(2), 3), (MoshpitGrid(), 2)], ids=str
)
def test_one_topology_period_gives_the_exact_mean(topology, rounds):
    x, _, _, _ = apart(gossip(topology, AdaptThenCombine()), SIZE, rounds)
    assert distance(x[rounds - 1]) > 0.1 and distance(x[rounds]) < 2e-6


def test_a_moshpit_group_averages_by_reduce_scatter_and_gather():
    """2·(g − 1)/g of the weights are sent, and a group of more than two holds equal bits after its round."""
    strategy, ledgers = gossip(MoshpitGrid(), AdaptThenCombine()), [Ledger() for _ in range(SIZE)]
    journeys = journey(strategy, SIZE, steps=1, wrap=lambda group: CountedGroup(group, ledgers[group.rank]))
    for row in (range(4), range(4, 8)):
        assert all(same_bits(journeys[row[0]].weights[0], journeys[other].weights[0]) for other in row)
    assert not same_bits(journeys[0].weights[0], journeys[4].weights[0])
    (numel,) = (fragment.numel for fragment in strategy.partition.fragments(toy()))
    for ledger in ledgers:
        assert ledger.sent("packet") == pytest.approx(6 * numel, abs=6 * 48 + 3 * SIZE + 12)


def test_push_sum_is_unbiased_where_degrees_differ_and_one_way_averaging_is_not():
    """§m.2: averaging without the weights ends at another point."""
    x, _, _, _ = apart(gossip(ONE_WAY, PushSum()), SIZE, 50)
    torch.testing.assert_close(x[-1], x[0].mean(0).expand_as(x[-1]), atol=1e-5, rtol=0)
    with pytest.raises(tw.ConfigurationError, match="add up to"):
        apart(gossip(ONE_WAY, AdaptThenCombine()), SIZE, 1)


def test_noloco_contracts_at_its_radius_and_diloco_s_momentum_would_not():
    """§m.5: momenta 0.5 and 0.7 shrink the squared distance by 0.7 a round on average; 0.9 and 0.7 are refused."""
    rounds = 30
    ratios = []
    for seed in range(2):
        x, _, _, _ = apart(gossip(RandomPairs(), NoLoCo(), seed=seed), SIZE, rounds)
        ratios.append((distance(x[-1]) / distance(x[0])) ** 2)
    mean = (sum(ratios) / len(ratios)) ** (1 / rounds)
    assert NoLoCo().radius == pytest.approx(0.7, abs=1e-3) and mean < 0.78
    with pytest.raises(tw.ConfigurationError, match=r"grows by 1\.098 .* pull \(or lr\) below 0\.38"):
        tw.lab.recipes.noloco(outer_momentum=0.9)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_complete_graph_and_one_step_are_the_fixed_group_s_bits(size):
    """An exchange with all replicas after every step equals local SGD in a fixed group within rounding, and all replicas are equal, bit for bit."""
    ours = journey(gossip(Complete(), AdaptThenCombine()), size, steps=8, optimizer=sgd)
    fixed = journey(tw.recipes.local_sgd(every=1), size, steps=8, optimizer=sgd)
    keep = gossip(Complete(), AdaptThenCombine(), merge=tw.pieces.merge.Keep())
    kept = journey(keep, size, steps=8, optimizer=sgd)[0]
    for step in range(8):
        assert same_bits(ours[0].weights[step], kept.weights[step]), "no flight, nothing to keep"
        assert all(same_bits(ours[0].weights[step], other.weights[step]) for other in ours)
        torch.testing.assert_close(ours[0].weights[step], fixed[0].weights[step], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_of_a_round_on_the_complete_graph_has_direct_s_bits(size):
    from thinwire.exchange import Direct, SendContext, once
    from thinwire.lab.gossip.exchange import Gossip

    def replica(group):
        own = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank))
        estimates = []
        for exchange in (Direct(), Gossip(Complete(), AdaptThenCombine())):
            context = SendContext(group)
            key = Key(round=len(estimates), sender=group.rank)
            estimate, _ = once(exchange, context, tw.codecs.Identity(), own, key, {})
            context.close(wait=True)
            estimates.append(estimate)
        return estimates

    for direct, ours in tw.run_threads(size, replica, timeout=600.0):
        assert same_bits(direct, ours)


def test_one_replica_is_the_inner_optimizer_alone():
    """The same holds with rounds in the air, because the replica keeps the steps of the flight."""
    late = {"schedule": tw.pieces.schedule.Every(3, delay=1), "merge": tw.pieces.merge.Keep()}
    for rule, pieces in ((AdaptThenCombine(), {}), (PushSum(), {}), (AdaptThenCombine(), late)):
        (one,) = journey(gossip(Complete(), rule, **pieces), 1, steps=6, optimizer=sgd)
        model = toy()
        optimizer = sgd(model)
        for step in range(1, 7):
            inner_step(model, optimizer, *batch(0, 0, step))
            assert same_bits(one.weights[step - 1], weights(model))
            assert same_bits(one.agreed[step - 1]["0.now"], weights(model)), "between rounds, too"


def test_a_merge_that_takes_the_anchor_drops_the_steps_of_the_flight():
    (one,) = journey(gossip(Complete(), AdaptThenCombine(), schedule=tw.pieces.schedule.Every(3, delay=1)), 1, steps=5)
    begun, departed, landed, after = one.weights[1:5]
    assert same_bits(landed, departed) and not same_bits(departed, begun) and not same_bits(after, landed)


def test_tracked_gradients_have_the_sum_of_the_gradients():
    """Each step has gradients of its own; from the second on they hold the neighbours'. An early exchange is the step's only one."""

    def replica(group, early=False):
        model, seen = toy(), []
        optimizer = sgd(model)
        with tw.Replica(gossip(Complete(), Tracking()), model, optimizer, group) as one:
            for step in range(1, 4):
                x, y = batch(0, group.rank, step)
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                trained = [p.grad for p in model.parameters() if p.grad is not None]
                own = torch.cat([grad.flatten() for grad in trained])
                if early:
                    one.exchange_gradients()
                optimizer.step()
                seen.append((own, torch.cat([grad.flatten() for grad in trained])))
        return seen

    runs = tw.run_threads(2, replica, timeout=600.0)
    early = tw.run_threads(2, lambda group: replica(group, True), timeout=600.0)
    assert all(same_bits(a, b) for one, other in zip(runs, early) for (_, a), (_, b) in zip(one, other))
    for step, ((a, tracked_a), (b, tracked_b)) in enumerate(zip(*runs)):
        torch.testing.assert_close(tracked_a + tracked_b, a + b, rtol=1e-4, atol=1e-5)
        assert same_bits(tracked_a, a) == (step == 0)


# ---- the laws of every strategy, as far as they apply to gossip


@named
def test_predicted_bytes_are_sent_to_neighbours_only(name):
    strategy, (journeys, ledgers) = GOSSIP[name], calm(name)
    counted_as_predicted(strategy, journeys, ledgers)
    numels = [fragment.numel for fragment in strategy.partition.fragments(toy())]
    due = sum(tw.exchange.TwoShot().nbytes_sent(tw.codecs.Identity(), numel, 4, 1) for numel in numels)
    assert ledgers[1].sent("mean") == due  # once, at the end


@named
def test_a_resumed_gossip_run_equals_an_unstopped_one(name):
    """It is saved at the beginning, after each step of a period, and at the end: what a save holds depends on the step of the period only."""
    steps = 7
    period = range(2, min(steps, 2 + GOSSIP[name].schedule.every))
    resumed_is_never_stopped(GOSSIP[name], 4, steps, [0, *period, steps])


@named
def test_arrival_order_changes_nothing(name):
    any_order_of_arrival(GOSSIP[name], 4, calm(name)[0])


@named
def test_all_end_with_the_same_weights_and_train_apart_before(name):
    journeys, _ = calm(name)
    assert all(torch.isfinite(one.final).all() and not one.heard("refused") for one in journeys)
    assert all(same_bits(journeys[0].final, one.final) for one in journeys)
    departures = journeys[0].heard("depart")
    assert len(departures) == len(journeys[0].heard("land")), "finishing lands what is in flight"
    assert not any(event["seconds_spent"] for event in departures), "the clock stands still"
    assert not same_bits(journeys[0].weights[-1], journeys[1].weights[-1])


@pytest.mark.parametrize(
    ("name", "asks", "stops"),
    [
        ("complete", 3, 4),  # a request that comes in time for a round of all replicas stops all after it
        ("complete", 5, 6),
        ("d_psgd", 1, 2),
        ("sgp", 2, 4),
        ("dfedsam_mgs", 5, 13),
        ("combined, then adapted, in the air", 9, 14),
        # windows of three and of four rounds; in the first, and after it
        *(("noloco in the air, 4 bits", asks, stops) for asks, stops in ((1, 20), (2, 20), (5, 20), (9, 44))),
    ],
)
def test_a_stop_spreads_and_all_stop_at_one_step(name, asks, stops):
    """The request is sent from the beginning of a window of rounds, and all stop where its last round lands."""

    def ask(replica, step):
        if step == asks and replica.group.rank == 3:
            replica.request_stop()

    complete = gossip(Complete(), AdaptThenCombine(), schedule=tw.pieces.schedule.Every(2))
    journeys = journey(GOSSIP.get(name, complete), 4, steps=60, before_step=ask)
    assert [one.stopped_at for one in journeys] == [stops] * 4


@named
def test_nonfinite_weights_are_never_sent(name):
    """The replica returns to its values after the previous round; the others receive nothing from it."""

    def poison(replica, step):
        if step == 4 and replica.group.rank == 2:
            next(p for p in replica.model.parameters() if p.grad is not None).grad.fill_(torch.nan)

    journeys = journey(GOSSIP[name], 4, steps=9, before_step=poison)
    assert all(torch.isfinite(one.final).all() for one in journeys)
    if not GOSSIP[name].exchange.rule.tracks:
        assert any("not finite" in event["message"] for event in journeys[2].heard("warning"))


@pytest.mark.parametrize(
    ("size", "name", "said"),
    [
        (3, "noloco", "among 3 replicas: an even number is needed"),
        (5, "push-sum, one way, unlike degrees", "no path leads from replica 0 to replica 4"),
        (3, "combined, then adapted, in the air", "by which 3 divides"),
    ],
)
def test_an_unfit_group_is_refused_before_training(size, name, said):
    with pytest.raises(tw.ConfigurationError, match=said):
        journey(GOSSIP[name], size)


def test_the_final_mean_of_nonfinite_weights_is_refused():
    def replica(group: tw.Group) -> None:
        own = torch.tensor([1.0, 2.0 if group.rank == 0 else float("nan")])
        with pytest.raises(NonFiniteError, match="so there is no mean over all"):
            mean_of_all(group, own, Key(sender=group.rank))

    tw.run_threads(2, replica)
