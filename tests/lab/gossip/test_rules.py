"""The gossip rules in fp64 without communication, against the numbers of their papers and of simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from replicas_by_row import normal, spread_of

from thinwire.codecs import E3M0, Identity, RandomK, TopK
from thinwire.errors import ConfigurationError
from thinwire.lab.gossip.gasloc import GASLoC
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import (
    AdaptThenCombine,
    Choco,
    CombineThenAdapt,
    NoLoCo,
    PushSum,
    Tracking,
)
from thinwire.lab.gossip.stability import largest_pull, radius_of_pairs, radius_of_rounds
from thinwire.lab.topology import (
    Complete,
    Exponential,
    Listed,
    Mesh,
    MoshpitGrid,
    OnePeerExponential,
    RandomPairs,
    Ring,
    mixing,
)
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.outer import Nesterov


def rounds_of(rule, topology, x, rounds, *, train=None, codec=None, state=None, seed=0):
    """Yield x and the state after each of `rounds` rounds of the rule among the rows of x; `train(x, number)` gives θ."""
    state = rule.init(x) if state is None else state
    for number in range(rounds):
        theta = x if train is None else train(x, number)
        if number == 0 or not topology.fixed:
            weights = torch.from_numpy(rule.weights(topology, len(x), number, 0, seed))
        said = rule.says(x, theta, state)
        said = (said[0] if codec is None else codec(said[0]), *said[1:])
        x, state = rule.hears(x, theta, state, [weights @ vector for vector in said], said)
        yield x, state


def last(steps):
    *_, end = steps
    return end


# ---- NoLoCo


def test_spectral_radii_match_the_published_table():
    alphas = (0.0, 0.3, 0.5, 0.7, 0.9)
    assert [round(radius_of_pairs(alpha, 0.7), 3) for alpha in alphas] == [0.545, 0.553, 0.7, 0.891, 1.098]
    assert [round(largest_pull(alpha), 2) for alpha in alphas] == [2.0, 1.82, 1.5, 1.02, 0.38]
    assert [round(largest_pull(0.9, group), 2) for group in (4, 8)] == [0.69, 1.17]


@pytest.mark.parametrize(
    ("momentum", "pull", "converges"),
    [(0.9, 0.1, True), (0.9, 0.3, True), (0.9, 0.5, False), (0.9, 0.7, False), (0.5, 0.7, True), (0.5, 2.0, False)],
)
def test_pairs_converge_exactly_where_the_radius_is_below_one(momentum, pull, converges):
    """Consensus without training among 8 replicas, without the check that refuses diverging settings."""
    rule = NoLoCo(momentum, 0.7, pull)
    x = normal(8, 20)
    end, _ = last(rounds_of(rule, RandomPairs(), x, 300))
    assert (spread_of(end) < 0.1 * spread_of(x)) == converges == (rule.radius < 1)
    if converges:
        rule.check(RandomPairs(), Identity())
    else:
        with pytest.raises(ConfigurationError, match="grows by 1"):
            rule.check(RandomPairs(), Identity())


def test_the_radius_on_a_fixed_graph_follows_from_the_eigenvalues():
    """φ″ = (1 + α − γ(1 − λ))·φ′ − α·φ for each eigenvalue λ."""
    size, momentum, pull = 8, 0.9, 0.7
    weights = mixing(Ring(), size)
    roots = []
    for eigenvalue in np.sort(np.linalg.eigvalsh(weights))[:-1]:
        roots += list(np.abs(np.roots([1, -(1 + momentum - pull * (1 - eigenvalue)), momentum])))
    assert radius_of_rounds(momentum, pull, [weights]) == pytest.approx(max(roots), abs=1e-9)
    assert max(roots) < 1  # DiLoCo's settings are stable on a ring, which is fixed
    start = normal(size, 30)
    end, _ = last(rounds_of(NoLoCo(momentum, pull), Ring(), start, 300))
    assert spread_of(end) < 1e-6 * spread_of(start)
    slowest = np.sort(np.linalg.eigvalsh(weights))[-2]
    assert radius_of_rounds(0.0, pull, [weights] * 3) == pytest.approx(1 - pull * (1 - slowest), abs=1e-9)
    period = [mixing(OnePeerExponential(), size, number) for number in range(3)]
    grown = radius_of_rounds(0.5, 3.9, period)
    with pytest.raises(ConfigurationError, match=f"grows by {grown:.3f} in every round"):
        NoLoCo(0.5, 3.9).weights(OnePeerExponential(), size, 0, 0, 0)
    NoLoCo(0.9).check(Ring(), Identity())
    for diverges in (NoLoCo(0.5, 4.0), NoLoCo(0.9, 3.9), GASLoC(0.7, 0.5, 4.0)):  # by factors of 2.3 and 1.3 per round
        with pytest.raises(ConfigurationError, match="they diverge"):
            diverges.weights(Complete(), 8, 0, 0, 0)


@pytest.mark.parametrize(
    "numbers",
    [
        (-0.1,),
        (1.0,),
        (0.5, 0.0),
        (0.5, math.inf),
        (0.5, 0.7, 0.0),
        (0.5, 0.7, math.inf),
        (math.nan,),
        (0.5, 0.0, 1.0),
        (0.5, math.inf, 1.0),
    ],
    ids=str,
)
def test_invalid_noloco_settings_are_refused(numbers):
    with pytest.raises(ConfigurationError, match=r"momentum in \[0, 1\), lr and pull above 0"):
        NoLoCo(*numbers)


def test_noloco_of_two_replicas_takes_the_steps_of_diloco():
    """Two replicas are a pair in every round, so their mean takes DiLoCo's heavy-ball steps."""
    rule, x, momentum = NoLoCo(0.5, 0.7), normal(2, 5), torch.zeros(5, dtype=torch.float64)
    mean, steps = x.mean(0), [normal(2, 5, seed=seed) for seed in range(6)]
    for number, (now, _) in enumerate(rounds_of(rule, RandomPairs(), x, 6, train=lambda x, n: x + steps[n])):
        momentum = 0.5 * momentum + 0.7 * steps[number].mean(0)
        mean = mean + momentum
        torch.testing.assert_close(now.mean(0), mean)


# ---- GASLoC


def test_the_mean_of_gasloc_takes_the_steps_of_diloco_on_any_graph():
    """The steps are Nesterov's for any deltas. NoLoCo's radius tells whether pairs converge; GASLoC sends half as many vectors."""
    x, outer, anchor = normal(8, 5), Nesterov(0.7, 0.9), normal(8, 5).mean(0)
    state, steps = outer.init(anchor), [normal(8, 5, seed=seed) for seed in range(6)]
    for number, (now, _) in enumerate(rounds_of(GASLoC(0.7, 0.9), Ring(), x, 6, train=lambda x, n: x + steps[n])):
        anchor, state = outer.step(anchor, -steps[number].mean(0), state)
        torch.testing.assert_close(now.mean(0), anchor)
    for momentum, pull in ((0.9, 0.3), (0.5, 1.0)):
        end, _ = last(rounds_of(GASLoC(0.7, momentum, pull), RandomPairs(), x, 300))
        assert spread_of(end) < 0.1 * spread_of(x)
    with pytest.raises(ConfigurationError, match=r"grows by 1\.098"):
        GASLoC(0.7, 0.9, 0.7).check(RandomPairs(), Identity())


@pytest.mark.parametrize(
    "wrong",
    [{name: value} for name in ("momentum", "lr", "pull") for value in (-0.1, 0.0, 1.0, math.inf, math.nan)],
    ids=str,
)
def test_gasloc_is_refused_outside_its_range(wrong):
    ((name, value),) = wrong.items()
    assert GASLoC() == GASLoC(lr=0.7, momentum=0.5, pull=1.0)
    if 0 <= value < 1 if name == "momentum" else 0 < value < math.inf:
        assert getattr(GASLoC(**wrong), name) == value
    else:
        with pytest.raises(ConfigurationError, match=r"momentum in \[0, 1\), lr and pull above 0"):
            GASLoC(**wrong)


# ---- CHOCO


def top_tenth(x):
    kept = x.abs().topk(x.shape[1] // 10, 1).indices
    return torch.zeros_like(x).scatter(1, kept, x.gather(1, kept))


@pytest.mark.parametrize(
    ("step", "bound"), [(0.05, 1e-4), (0.1, 1e-10), (0.2, 1e-20), (0.3, 1e-20), (0.5, None), (1.0, None)]
)
def test_choco_converges_for_small_steps_only(step, bound):
    """A ring of 16, d = 200, the largest 10 %, 3,000 rounds. Every case that converges keeps the mean."""
    rule, x = Choco(step), normal(16, 200)
    zeros = {"public": torch.zeros_like(x), "neighbours": torch.zeros_like(x)}
    for now, _ in rounds_of(rule, Ring(), x, 3000, codec=top_tenth, state=zeros):
        if not torch.isfinite(now).all() or spread_of(now) > 1e6:
            break
    if bound is None:
        assert not torch.isfinite(now).all() or spread_of(now) > 100
    else:
        assert spread_of(now) < bound and float((now.mean(0) - x.mean(0)).abs().max()) < 1e-11


def test_a_sparse_codec_without_public_copies_stays_far_from_consensus():
    x, weights = normal(16, 200), torch.from_numpy(mixing(Ring(), 16))
    now = x
    for _ in range(1000):
        sent = top_tenth(now)
        now = now + 0.3 * (weights @ sent - sent)
    assert spread_of(now) > 1


# ---- D-PSGD, gradient tracking and push-sum on quadratics with different optima


OPTIMA = normal(16, 10, seed=3)


def descend(lr):
    return lambda x, number: x - lr * (x - OPTIMA)


@pytest.mark.parametrize("rule", [AdaptThenCombine(), CombineThenAdapt()], ids=str)
def test_the_mean_reaches_the_optimum_and_the_distance_its_fixed_point(rule):
    ends = {}
    for lr, rounds in ((0.1, 300), (0.01, 3000)):
        x, _ = last(rounds_of(rule, Ring(), normal(16, 10), rounds, train=descend(lr)))
        assert float((x.mean(0) - OPTIMA.mean(0)).abs().max()) < 1e-12
        ends[lr] = spread_of(x)
    # fixed point: (I − W + lr·I)·(x − x̄) = lr·(b − b̄), or W times it where mixing comes last
    off, weights = OPTIMA - OPTIMA.mean(0), torch.from_numpy(mixing(Ring(), 16))
    for lr, end in ends.items():
        eye = torch.eye(16, dtype=torch.float64)
        inner = eye - weights + lr * eye if rule == CombineThenAdapt() else eye - (1 - lr) * weights
        due = torch.linalg.solve(inner, lr * (off if rule == CombineThenAdapt() else weights @ off))
        assert end == pytest.approx(spread_of(due), rel=1e-6)
    assert 10 < ends[0.1] / ends[0.01] < 100


def test_row_stochastic_weights_bias_the_mean():
    """A classic bug under faults: a replica that keeps its own weights leaves a matrix that is only row-stochastic."""
    weights = torch.from_numpy(mixing(Ring(), 16)).clone()
    weights[4] = torch.eye(16, dtype=torch.float64)[4]
    x = normal(16, 10)
    for _ in range(2000):
        x = weights @ (x - 0.1 * (x - OPTIMA))
    assert 0.05 < float((x.mean(0) - OPTIMA.mean(0)).norm()) < 5


def test_gradient_tracking_reaches_the_optimum_on_every_replica():
    """The direction y tracks the mean gradient, and Σy = Σg after every step."""
    rule, lr, x = Tracking(), 0.05, normal(16, 10)
    state, weights = rule.init(x), torch.from_numpy(mixing(Ring(), 16))
    for _ in range(1500):
        gradients = x - OPTIMA
        direction, state = rule.tracked(gradients, state)
        assert float((state["direction"].sum(0) - gradients.sum(0)).abs().max()) < 1e-9
        theta = x - lr * direction
        said = rule.says(x, theta, state)
        x, state = rule.hears(x, theta, state, [weights @ vector for vector in said], said)
    assert float((x - OPTIMA.mean(0)).abs().max()) < 1e-10
    for bad in (math.nan, math.inf):  # counts as the gradient before
        followed, kept = rule.tracked(torch.full_like(x, bad), state)
        assert followed.equal(state["direction"]) and kept is state


def test_push_sum_reaches_the_mean_where_plain_averaging_does_not():
    edges = (*((i, (i + 1) % 8) for i in range(8)), (0, 3), (0, 5), (2, 6))
    topology, x = Listed(edges, one_way=True), normal(8, 10)
    rule = PushSum()
    end, state = last(rounds_of(rule, topology, x, 300, state={"weight": torch.ones(8, 1, dtype=torch.float64)}))
    assert float((end - x.mean(0)).abs().max()) < 1e-12
    assert float(state["weight"].sum()) == pytest.approx(8) and bool((state["weight"] > 0).all())
    weights = torch.from_numpy(rule.weights(topology, 8, 0, 0, 0))
    plain = torch.linalg.matrix_power(weights, 300) @ x
    assert float((plain - x.mean(0)).abs().max()) > 0.05


# ---- refused combinations


@pytest.mark.parametrize(
    ("rule", "topology", "codec", "said"),
    [
        (AdaptThenCombine(), Ring(), E3M0(), "leave the codec at Identity"),
        (PushSum(), Ring(), TopK(0.1), "leave the codec at Identity"),
        (Tracking(), Ring(), E3M0(), "leave the codec at Identity"),
        (Choco(), OnePeerExponential(), E3M0(), "must be the same in every round"),
        (Choco(), Exponential(), RandomK(0.1), "contractive"),
        (NoLoCo(0.9, 0.7), RandomPairs(), Identity(), "1.098"),
        (GASLoC(), Ring(), E3M0(), "leave the codec at Identity"),
        (NoLoCo(0.0, 0.7, 2.0), RandomPairs(), Identity(), "they diverge"),  # a radius of 1
    ],
    ids=str,
)
def test_invalid_combinations_of_rule_topology_and_codec_are_refused(rule, topology, codec, said):
    with pytest.raises(ConfigurationError, match=said):
        rule.check(topology, codec)


@pytest.mark.parametrize("step", [0.0, 1.0001, -0.1, math.nan])
def test_invalid_steps_of_choco_are_refused(step):
    with pytest.raises(ConfigurationError, match="above 0 and at most 1"):
        Choco(step)


ONES, ZEROS = [1.0] * 3, [0.0] * 3


@pytest.mark.parametrize(
    ("rule", "flags", "state"),
    [
        (AdaptThenCombine(), "repeats sends_weights", {}),
        (CombineThenAdapt(), "repeats", {}),
        (NoLoCo(0.0), "", {"momentum": ZEROS}),
        (Choco(1.0), "", {"public": ONES, "neighbours": ONES}),
        (PushSum(), "repeats", {"weight": [1.0]}),
        (Tracking(), "tracks sends_weights", {"direction": ZEROS, "gradient": ZEROS}),
        (MGS(PushSum()), "", {"weight": [1.0]}),
        (GASLoC(0.7, 0.0), "", {"before": ONES}),
    ],
    ids=str,
)
def test_each_rule_says_what_it_does_and_begins_at_the_weights(rule, flags, state):
    names = ("tracks", "repeats", "sends_weights", "needs_losses")
    assert " ".join(name for name in names if getattr(rule, name, False) is not False) == flags
    assert rule.steps == (4 if isinstance(rule, MGS) else 1) and rule.meets == Mean()
    x = torch.ones(3, dtype=torch.float64)
    first = rule.init(x)
    assert {name: kept.tolist() for name, kept in first.items()} == state
    assert all(kept.dtype == x.dtype and kept is not x for kept in first.values())
    assert [numel for _, numel in rule.vectors(Identity(), 3)] == [len(vector) for vector in rule.says(x, x, first)]
    assert rule.conserved(x + x, first).tolist() == [2.0] * 3


# ---- several gossip steps


@pytest.mark.parametrize(
    ("topology", "size", "published"),
    [(Ring(), 16, (0.949, 0.812)), (Ring(), 100, (0.9987, 0.9947)), (Mesh(10), 100, (0.9795, 0.9204))],
    ids=str,
)
def test_four_gossip_steps_contract_as_in_the_published_table(topology, size, published):
    """Four rounds without training equal one round with four steps: the slowest direction shrinks by λ⁴."""
    weights = mixing(topology, size)
    value, vectors = np.linalg.eigh(weights)
    slowest = torch.from_numpy(vectors[:, [-2]])
    assert float(value[-2]) == pytest.approx(published[0], abs=1e-3 if size == 16 else 1e-4)
    after, _ = last(rounds_of(AdaptThenCombine(), topology, slowest, 4))
    assert float(after.norm() / slowest.norm()) == pytest.approx(published[1], abs=1e-3 if size == 16 else 1e-4)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: MGS(NoLoCo()), "whole weights is needed"),
        (lambda: MGS(Choco()), "whole weights is needed"),
        (lambda: MGS(MGS()), "whole weights is needed"),
        (lambda: MGS(AdaptThenCombine), "whole weights is needed"),
        (lambda: MGS(steps=0), "1 to 8 gossip steps"),
        (lambda: MGS(steps=9), "1 to 8 gossip steps"),
        (lambda: MGS().check(MoshpitGrid(), Identity()), "take their mean at once"),
        (lambda: MGS().check(Ring(), E3M0()), "choose choco"),
    ],
)
def test_invalid_gossip_steps_are_refused(made, said):
    assert [MGS(steps=steps).steps for steps in (1, 8)] == [1, 8] and MGS() == MGS(AdaptThenCombine(), 4)
    with pytest.raises(ConfigurationError, match=said):
        made()
