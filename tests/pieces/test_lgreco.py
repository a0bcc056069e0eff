"""Codecs chosen by matrix: the table against all choices there are, never worse than uniform, agreed, saved, and what is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from pieces import METHODS

import thinwire as tw
from thinwire.pieces.lgreco import choose
from thinwire.rng import Key
from thinwire.testing.toy import journey, toy, weighs
from thinwire.testing.values import encoded, roundtrip


def drawn(seed, layers=5, options=5):
    """Errors that fall and sizes that grow with the option's index, but for the first, which is in the middle."""
    rng = random.Random(seed)
    scales = [10 ** rng.uniform(-2, 2) for _ in range(layers)]
    errors = [sorted((scale * rng.random() for _ in range(options)), reverse=True) for scale in scales]
    sizes = [sorted(rng.randrange(10, 1000) for _ in range(options)) for _ in scales]
    middle = options // 2
    order = [middle, *(i for i in range(options) if i != middle)]
    return [[of[i] for i in order] for of in errors], [[of[i] for i in order] for of in sizes]


def cost(table, choice):
    return sum(of[i] for of, i in zip(table, choice))


def best(errors, sizes, most):
    """By trying all."""
    choices = itertools.product(*(range(len(of)) for of in errors))
    return min((cost(sizes, c) for c in choices if cost(errors, c) <= most), default=None)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_the_table_against_all_choices(alpha):
    """Feasible, never larger than one option for all (where that is feasible), and hardly larger than the best there is."""
    gaps = []
    for seed in range(40):
        errors, sizes = drawn(seed)
        uniform = [0] * len(errors)
        most = alpha * cost(errors, uniform)
        choice = choose(errors, sizes, most)
        assert cost(sizes, choice) <= cost(sizes, uniform)
        assert choice == uniform or cost(errors, choice) <= most
        due = min(best(errors, sizes, most) or 10**9, cost(sizes, uniform))
        gaps.append(cost(sizes, choice) / due - 1)
    assert min(gaps) >= 0 and sum(gaps) / len(gaps) < 0.002 and max(gaps) < 0.1


def test_more_error_allowed_is_never_more_bytes():
    for seed in range(20):
        errors, sizes = drawn(seed, layers=8)
        found = [
            cost(sizes, choose(errors, sizes, alpha * cost(errors, [0] * 8)))
            for alpha in (0.3, 0.6, 1.0, 1.5, 3.0, 9.0)
        ]
        assert found == sorted(found, reverse=True)


def test_rounding_up_does_not_make_it_worse():
    """Thirty equal layers: the uniform choice itself no longer fits in whole steps; it is kept."""
    errors, sizes = [[1.0, 2.0, 0.5]] * 30, [[3, 2, 9]] * 30
    assert cost(sizes, choose(errors, sizes, 30.0)) <= 90


@pytest.mark.parametrize(
    ("errors", "sizes", "most"),
    [
        ([], [], 1.0),
        ([[1.0, 2.0]], [[10, 5]], 0.0),
        ([[1.0, 2.0]], [[10, 5]], float("nan")),
        ([[float("inf"), float("inf")]], [[10, 5]], float("inf")),
        ([[1.0, float("inf")], [1.0, float("nan")]], [[10, 5], [10, 5]], 2.0),
        ([[5.0, 6.0]], [[10, 5]], 1.0),
        ([[0.0, 0.0]], [[10, 20]], 1.0),
    ],
)
def test_where_nothing_better_is_feasible_all_have_the_same(errors, sizes, most):
    assert choose(errors, sizes, most) == [0] * len(errors)


def test_one_layer_has_the_default():
    """Nothing smaller loses as little; nothing larger is wanted."""
    errors, sizes = drawn(3, layers=1)
    assert choose(errors, sizes, errors[0][0]) == [0]


# ---- the policy on real tensors


def stack(*energies):
    """Matrices of 64 × 64 with unlike spectra and sizes of values, flat; and their shapes."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, energy in enumerate(energies):
        left, right = torch.randn(64, 64, generator=draw), torch.randn(64, 64, generator=draw)
        spectrum = torch.arange(1, 65).float() ** -(0.2 + 0.5 * number)
        made.append(energy * (left * spectrum) @ right)
    return torch.cat([m.reshape(-1) for m in made]), tuple((64, 64) for _ in energies)


@pytest.mark.parametrize(
    "codec", [tw.codecs.TopK(0.05), tw.codecs.LowRank(4), tw.codecs.Int(4, 64), tw.codecs.ChunkedTopK(64, 4)], ids=str
)
def test_never_worse_than_one_codec_for_all(codec):
    """By what is really encoded: fewer bytes, and no more error, for each kind of codec."""
    x, shapes = stack(1.0, 0.01, 3.0, 0.1, 0.3, 0.03)
    each, policy = tw.codecs.Each(codec).fitted(shapes), tw.pieces.lgreco.LGreCo()
    told = policy.decide(each, lambda begin, end: x[begin:end], x.numel(), Key())
    chosen = policy.at(each, x.numel(), 1, policy.told(each, told))
    assert chosen.nbytes(x.numel()) < each.nbytes(x.numel()) and chosen != each

    def lost(codec):
        return sum(float((a - b).norm()) for a, b in zip(each.split(x), each.split(roundtrip(codec, x))))

    assert lost(chosen) <= lost(each) * (1 + 1e-6)


def test_a_tensor_that_matters_less_is_compressed_harder():
    x, shapes = stack(1.0, 1e-4)
    each, policy = tw.codecs.Each(tw.codecs.TopK(0.05)).fitted(shapes), tw.pieces.lgreco.LGreCo()
    told = policy.decide(each, lambda begin, end: x[begin:end], x.numel(), Key())
    first, second = policy.at(each, x.numel(), 1, policy.told(each, told)).chosen
    assert second.density == 0.0125 and first.density > 0.05


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 3e38])
def test_signals_of_any_size_decide_something(value):
    each, policy = tw.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8))), tw.pieces.lgreco.LGreCo()
    told = policy.decide(each, lambda begin, end: torch.full((128,), value)[begin:end], 128, Key())
    policy.told(each, told)
    assert value == 3e38 or not told.any()


def test_without_matrices_there_is_nothing_to_decide():
    each, policy = tw.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8,), ())), tw.pieces.lgreco.LGreCo()
    assert policy.tells(each, 0) == 0 and policy.at(each, 9, 5, policy.init(each)) == each


@pytest.mark.parametrize("told", [[11.0, 0.0], [-1.0, 0.0], [0.5, 0.0], [float("nan"), 0.0]])
def test_what_a_peer_tells_is_not_believed(told):
    each = tw.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8)))
    with pytest.raises(tw.PacketError, match="whole numbers below 11 are needed"):
        tw.pieces.lgreco.LGreCo().told(each, torch.tensor(told))


# ---- in a run


BITS = tw.Strategy(
    signal=tw.strategy.Gradients(),
    codec=tw.codecs.Each(tw.codecs.Int(4, 8), least=8),
    policy=tw.pieces.lgreco.LGreCo(alpha=1.5, window=3),
)
RANKS = tw.Strategy(
    schedule=tw.pieces.schedule.Every(2),
    partition=tw.pieces.partition.Strided(2),
    codec=tw.codecs.Each(tw.codecs.LowRank(1), tw.codecs.Cast()),
    policy=tw.pieces.lgreco.LGreCo((tw.codecs.LowRank(2), tw.codecs.Sign(), tw.codecs.Identity()), alpha=0.7, window=2),
    feedback=tw.pieces.feedback.Feedback(),
)


@pytest.mark.parametrize(
    "strategy", [METHODS["codecs by matrix, in the air"], METHODS["l_greco"], BITS, RANKS], ids=str
)
def test_all_replicas_go_by_replica_0(strategy):
    """The choices change in a run, are the same on all replicas, and each departure weighs what they say."""
    journeys = journey(strategy, 3)
    fragments = strategy.partition.fragments(toy())
    known = [[e["known"]["chosen"].tolist() for e in one.heard("depart")] for one in journeys]
    assert known[0] == known[1] == known[2] and len({tuple(k) for k in known[0]}) > 1
    for e in journeys[0].heard("depart"):
        fragment = fragments[e["fragment"]]
        assert e["nbytes"] == weighs(strategy, e, fragment, 3, 0) <= strategy.nbytes_per_period([fragment.shapes], 3)


@dataclass(frozen=True)
class Listening(tw.pieces.lgreco.LGreCo):
    """Keeps what it decides on."""

    heard: list[torch.Tensor] = field(default_factory=list)

    def decide(self, codec, signal, numel, key):
        self.heard.append(signal(0, numel).clone())
        return super().decide(codec, signal, numel, key)


def test_it_is_decided_on_what_is_encoded():
    """On delta + residual: with feedback the second round's signal holds what the first round's codec has left."""
    policy = Listening(window=1)
    journey(
        tw.Strategy(codec=tw.codecs.Each(tw.codecs.TopK(0.1)), policy=policy, feedback=tw.pieces.feedback.Feedback()),
        1,
        steps=3,
    )
    each = tw.codecs.Each(tw.codecs.TopK(0.1)).fitted(tw.pieces.partition.Whole().fragments(toy())[0].shapes)
    left = policy.heard[0] - roundtrip(each, policy.heard[0])
    assert float(left.norm()) > 0
    assert float(policy.heard[1] @ left) > 0.5 * float(left @ left)


def test_a_dropped_round_decides_nothing():
    """The first round of a run is dropped: all keep what they knew, and decide again when it is due."""

    def before_step(replica, step):
        if step == 1 and replica.group.rank == 1:
            next(iter(replica.model.parameters())).grad.fill_(float("nan"))

    for one in journey(RANKS, 2, before_step=before_step):
        chosen = [e["round"] for e in one.heard("depart") if bool(e["known"]["chosen"].any())]
        assert one.heard("refused") and min(chosen) == 3
    calm = journey(RANKS, 2)[0]
    assert min(e["round"] for e in calm.heard("depart") if bool(e["known"]["chosen"].any())) == 1


def test_a_choice_names_its_packets():
    """Replicas that went by other choices would be found out: the chosen codecs are part of the codec's name on the wire."""
    from thinwire.packet import identity

    each = tw.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8)))
    chosen = replace(each, chosen=(tw.codecs.TopK(0.2), tw.codecs.TopK(0.1)))
    assert identity(each) != identity(chosen)
    assert encoded(replace(each, chosen=(tw.codecs.TopK(0.1),) * 2), torch.arange(128.0)) == encoded(
        each, torch.arange(128.0)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.pieces.lgreco.LGreCo(alpha=0.0), "alpha > 0"),
        (lambda: tw.pieces.lgreco.LGreCo(alpha=float("inf")), "alpha > 0"),
        (lambda: tw.pieces.lgreco.LGreCo(window=0), "a window of at least 1 round"),
        (lambda: tw.pieces.lgreco.LGreCo((tw.codecs.Int,)), "codecs are needed"),
        (lambda: tw.Strategy(codec=tw.codecs.TopK(), policy=tw.pieces.lgreco.LGreCo()), "such as Each"),
        (lambda: tw.Strategy(codec=tw.codecs.Each(tw.codecs.Sign()), policy=tw.pieces.lgreco.LGreCo()), "name some, as in LGreCo"),
        (lambda: tw.Strategy(codec=tw.codecs.Each(tw.codecs.TopK()), policy=tw.pieces.lgreco.LGreCo(), exchange=tw.exchange.TwoShot()), "TwoShot"),
        (
            lambda: tw.Strategy(
                codec=tw.codecs.Each(tw.codecs.TopK()),
                policy=tw.pieces.lgreco.LGreCo(),
                exchange=tw.exchange.Hierarchy((1, 1)),
            ),
            "choose Direct",
        ),
        (lambda: tw.codecs.Each(tw.codecs.Each(tw.codecs.Sign())), "a codec for one matrix"),
        (lambda: tw.codecs.Each(tw.codecs.Sign), "a codec for one matrix"),
        (lambda: tw.codecs.Each(tw.codecs.Sign(), tw.codecs.LowRank()), "make it the outermost"),
        (lambda: tw.codecs.Each(tw.codecs.Sign(), least=-1), "least=-1"),
        (lambda: tw.codecs.Each(tw.codecs.Sign(), shapes=((4, 4),), chosen=(tw.codecs.Sign(),) * 2), "2 chosen codecs for 1 matrices"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        make()
