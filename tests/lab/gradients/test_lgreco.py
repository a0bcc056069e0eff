"""L-GreCo, which chooses a codec per matrix: its search against all choices, its use in a run, and its refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from strategies import METHODS

import thinwire as tw
from thinwire.lab.gradients.lgreco import LGreCo, choose
from thinwire.rng import Key
from thinwire.testing.toy import journey, toy, weighs
from thinwire.testing.values import encoded, roundtrip


def random_table(seed, layers=5, options=5):
    """Errors that fall and sizes that grow with the index of the option. The middle option comes first: it is the default."""
    rng = random.Random(seed)
    scales = [10 ** rng.uniform(-2, 2) for _ in range(layers)]
    errors = [sorted((scale * rng.random() for _ in range(options)), reverse=True) for scale in scales]
    sizes = [sorted(rng.randrange(10, 1000) for _ in range(options)) for _ in scales]
    middle = options // 2
    order = [middle, *(i for i in range(options) if i != middle)]
    return [[of[i] for i in order] for of in errors], [[of[i] for i in order] for of in sizes]


def cost(table, choice):
    return sum(of[i] for of, i in zip(table, choice))


def best_of_all(errors, sizes, most):
    """The smallest size with an error of at most `most`, over all choices."""
    choices = itertools.product(*(range(len(of)) for of in errors))
    return min((cost(sizes, c) for c in choices if cost(errors, c) <= most), default=None)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_the_choice_is_feasible_and_close_to_the_best_of_all_choices(alpha):
    """It is never larger than the uniform choice."""
    gaps = []
    for seed in range(40):
        errors, sizes = random_table(seed)
        uniform = [0] * len(errors)
        most = alpha * cost(errors, uniform)
        choice = choose(errors, sizes, most)
        assert cost(sizes, choice) <= cost(sizes, uniform)
        assert choice == uniform or cost(errors, choice) <= most
        due = min(best_of_all(errors, sizes, most) or 10**9, cost(sizes, uniform))
        gaps.append(cost(sizes, choice) / due - 1)
    assert min(gaps) >= 0 and sum(gaps) / len(gaps) < 0.002 and max(gaps) < 0.1


def test_a_larger_error_budget_never_takes_more_bytes():
    for seed in range(20):
        errors, sizes = random_table(seed, layers=8)
        found = [
            cost(sizes, choose(errors, sizes, alpha * cost(errors, [0] * 8)))
            for alpha in (0.3, 0.6, 1.0, 1.5, 3.0, 9.0)
        ]
        assert found == sorted(found, reverse=True)


def test_rounded_errors_make_no_choice_larger_than_the_uniform_one():
    """The errors of thirty equal layers, rounded up to whole steps, exceed the budget: the uniform choice stays."""
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
        ([[1.0, 2.0]], [[10, 5]], float("inf")),
        ([[5.0, 1.0]], [[10, 10]], 5.0),
    ],
)
def test_the_uniform_choice_stays_where_nothing_better_is_feasible(errors, sizes, most):
    assert choose(errors, sizes, most) == [0] * len(errors)


def test_an_option_may_take_the_whole_budget():
    assert choose([[1.0, 2.0]], [[10, 5]], 2.0) == choose([[0.5, 0.5]], [[10, 5]], 0.5) == [1]


def test_one_layer_keeps_the_default():
    """No smaller option has as little error."""
    errors, sizes = random_table(3, layers=1)
    assert choose(errors, sizes, errors[0][0]) == [0]


# ---- the policy on real tensors


def stack(*energies):
    """Flat matrices of 64 × 64 with different spectra and scales, and their shapes."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, energy in enumerate(energies):
        left, right = torch.randn(64, 64, generator=draw), torch.randn(64, 64, generator=draw)
        spectrum = torch.arange(1, 65).float() ** -(0.2 + 0.5 * number)
        made.append(energy * (left * spectrum) @ right)
    return torch.cat([m.reshape(-1) for m in made]), tuple((64, 64) for _ in energies)


@pytest.mark.parametrize(
    "codec",
    [tw.codecs.TopK(0.05), tw.lab.codecs.LowRank(4), tw.codecs.Int(4, 64), tw.codecs.ChunkedTopK(64, 4)],
    ids=str,
)
def test_the_choice_has_fewer_bytes_and_no_more_error_than_one_codec_for_all(codec):
    """Measured on encoded and decoded values, for each kind of codec."""
    x, shapes = stack(1.0, 0.01, 3.0, 0.1, 0.3, 0.03)
    each, policy = tw.lab.codecs.Each(codec).fitted(shapes), LGreCo()
    told = policy.decide(each, lambda begin, end: x[begin:end], x.numel(), Key())
    chosen = policy.at(each, x.numel(), 1, policy.told(each, told))
    assert chosen.nbytes(x.numel()) < each.nbytes(x.numel()) and chosen != each

    def lost(codec):
        return sum(float((a - b).norm()) for a, b in zip(each.split(x), each.split(roundtrip(codec, x))))

    assert lost(chosen) <= lost(each) * (1 + 1e-6)


def test_a_tensor_of_small_values_gets_fewer_bytes():
    x, shapes = stack(1.0, 1e-4)
    each, policy = tw.lab.codecs.Each(tw.codecs.TopK(0.05)).fitted(shapes), LGreCo()
    told = policy.decide(each, lambda begin, end: x[begin:end], x.numel(), Key())
    first, second = policy.at(each, x.numel(), 1, policy.told(each, told)).chosen
    assert second.density == 0.0125 and first.density > 0.05


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 3e38])
def test_signals_of_any_size_give_a_decision(value):
    each, policy = tw.lab.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8))), LGreCo()
    told = policy.decide(each, lambda begin, end: torch.full((128,), value)[begin:end], 128, Key())
    policy.told(each, told)
    assert value == 3e38 or not told.any()


def test_a_fragment_without_matrices_sends_no_decision():
    each, policy = tw.lab.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8,), ())), LGreCo()
    assert policy.tells(each, 0) == 0 and policy.at(each, 9, 5, policy.init(each)) == each
    assert policy.decide(each, lambda begin, end: torch.ones(9)[begin:end], 9, Key()).shape == (0,)


def test_a_single_candidate_is_chosen_where_it_loses_no_more():
    """The errors of the second matrix are the least. The signal stays as it is, and every tenth round decides."""
    x, shapes = stack(1.0, 1e-4)
    each, policy = (
        tw.lab.codecs.Each(tw.codecs.Int(8, 64)).fitted(shapes),
        LGreCo((tw.codecs.Int(4, 64),), 1.01),
    )
    before = x.clone()
    told = policy.decide(each, lambda begin, end: x[begin:end], x.numel(), Key())
    assert told.tolist() == [0.0, 1.0] and told.dtype == torch.float32 and torch.equal(x, before)
    chosen = policy.at(each, x.numel(), 1, policy.told(each, told))
    assert chosen.chosen == tuple(option.fitted(((64, 64),)) for option in (tw.codecs.Int(8, 64), tw.codecs.Int(4, 64)))
    assert [policy.tells(each, number) for number in (0, 1, 5, 10, 11, 20)] == [2, 0, 0, 2, 0, 2]
    assert [replace(policy, window=1).tells(each, number) for number in (0, 1, 2)] == [2, 2, 2]


@pytest.mark.parametrize("told", [[11.0, 0.0], [-1.0, 0.0], [0.5, 0.0], [float("nan"), 0.0]])
def test_an_invalid_decision_of_a_peer_is_refused(told):
    each = tw.lab.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8)))
    assert LGreCo().told(each, torch.tensor([10.0, 0.0]))["chosen"].tolist() == [10.0, 0.0]
    with pytest.raises(tw.PacketError, match="whole numbers below 11 are needed"):
        LGreCo().told(each, torch.tensor(told))


# ---- in a run


BITS = tw.Strategy(
    signal=tw.strategy.Gradients(),
    codec=tw.lab.codecs.Each(tw.codecs.Int(4, 8), least=8),
    policy=LGreCo(alpha=1.5, window=3),
)
RANKS = tw.Strategy(
    schedule=tw.pieces.schedule.Every(2),
    partition=tw.pieces.partition.Strided(2),
    codec=tw.lab.codecs.Each(tw.lab.codecs.LowRank(1), tw.codecs.Cast()),
    policy=LGreCo((tw.lab.codecs.LowRank(2), tw.codecs.Sign(), tw.codecs.Identity()), alpha=0.7, window=2),
    feedback=tw.pieces.feedback.Feedback(),
)


@pytest.mark.parametrize(
    "strategy", [METHODS["codecs by matrix, in the air"], METHODS["l_greco"], BITS, RANKS], ids=str
)
def test_all_replicas_use_the_choices_of_replica_0(strategy):
    """The choices change during a run, are equal on all replicas and give the bytes of each departure."""
    journeys = journey(strategy, 3)
    fragments = strategy.partition.fragments(toy())
    known = [[e["known"]["chosen"].tolist() for e in one.heard("depart")] for one in journeys]
    assert known[0] == known[1] == known[2] and len({tuple(k) for k in known[0]}) > 1
    for e in journeys[0].heard("depart"):
        fragment = fragments[e["fragment"]]
        assert e["nbytes"] == weighs(strategy, e, fragment, 3, 0) <= strategy.nbytes_per_period([fragment.shapes], 3)


@dataclass(frozen=True)
class RecordingLGreCo(tw.lab.gradients.lgreco.LGreCo):
    """L-GreCo that records the signals on which it decides."""

    heard: list[torch.Tensor] = field(default_factory=list)

    def decide(self, codec, signal, numel, key):
        self.heard.append(signal(0, numel).clone())
        return super().decide(codec, signal, numel, key)


def test_decisions_use_the_delta_plus_the_residual():
    """With feedback the signal of the second round contains the error of the first round's codec."""
    policy = RecordingLGreCo(window=1)
    journey(
        tw.Strategy(
            codec=tw.lab.codecs.Each(tw.codecs.TopK(0.1)), policy=policy, feedback=tw.pieces.feedback.Feedback()
        ),
        1,
        steps=3,
    )
    each = tw.lab.codecs.Each(tw.codecs.TopK(0.1)).fitted(tw.pieces.partition.Whole().fragments(toy())[0].shapes)
    left = policy.heard[0] - roundtrip(each, policy.heard[0])
    assert float(left.norm()) > 0
    assert float(policy.heard[1] @ left) > 0.5 * float(left @ left)


def test_a_refused_round_changes_no_choice():
    """The first round is refused: all replicas keep their choices and decide again at the next due round."""

    def before_step(replica, step):
        if step == 1 and replica.group.rank == 1:
            next(iter(replica.model.parameters())).grad.fill_(float("nan"))

    for one in journey(RANKS, 2, before_step=before_step):
        chosen = [e["round"] for e in one.heard("depart") if bool(e["known"]["chosen"].any())]
        assert one.heard("refused") and min(chosen) == 3
    calm = journey(RANKS, 2)[0]
    assert min(e["round"] for e in calm.heard("depart") if bool(e["known"]["chosen"].any())) == 1


def test_chosen_codecs_are_part_of_the_packet_identity():
    """So a replica with other choices is detected by its packets."""
    from thinwire.packet import identity

    each = tw.lab.codecs.Each(tw.codecs.TopK(0.1)).fitted(((8, 8), (8, 8)))
    chosen = replace(each, chosen=(tw.codecs.TopK(0.2), tw.codecs.TopK(0.1)))
    assert identity(each) != identity(chosen)
    assert encoded(replace(each, chosen=(tw.codecs.TopK(0.1),) * 2), torch.arange(128.0)) == encoded(
        each, torch.arange(128.0)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LGreCo(alpha=0.0), "alpha > 0"),
        (lambda: LGreCo(alpha=float("inf")), "alpha > 0"),
        (lambda: LGreCo(window=0), "a window of at least 1 round"),
        (lambda: LGreCo(window=1.5), "a window of at least 1 round"),
        (lambda: LGreCo((tw.codecs.Int,)), "codecs are needed"),
        (lambda: LGreCo((3,)), "codecs are needed"),
        (
            lambda: LGreCo().codecs(tw.lab.codecs.Each(tw.codecs.TopK(), shapes=((4, 4),), chosen=(tw.codecs.Sign(),))),
            "a codec for each matrix is needed",
        ),
        (lambda: tw.Strategy(codec=tw.codecs.TopK(), policy=LGreCo()), "such as Each"),
        (lambda: tw.Strategy(codec=tw.lab.codecs.Each(tw.codecs.Sign()), policy=LGreCo()), "name some, as in LGreCo"),
        (lambda: tw.Strategy(codec=tw.lab.codecs.Each(tw.codecs.TopK()), policy=LGreCo(), exchange=tw.exchange.TwoShot()), "TwoShot"),
        (
            lambda: tw.Strategy(
                codec=tw.lab.codecs.Each(tw.codecs.TopK()),
                policy=LGreCo(),
                exchange=tw.exchange.Hierarchy((1, 1)),
            ),
            "choose Direct",
        ),
        (lambda: tw.lab.codecs.Each(tw.lab.codecs.Each(tw.codecs.Sign())), "a codec for one matrix"),
        (lambda: tw.lab.codecs.Each(tw.codecs.Sign), "a codec for one matrix"),
        (lambda: tw.lab.codecs.Each(tw.codecs.Sign(), tw.lab.codecs.LowRank()), "make it the outermost"),
        (lambda: tw.lab.codecs.Each(tw.codecs.Sign(), least=-1), "least=-1"),
        (lambda: tw.lab.codecs.Each(tw.codecs.Sign(), shapes=((4, 4),), chosen=(tw.codecs.Sign(),) * 2), "2 chosen codecs for 1 matrices"),
    ],
)  # fmt: skip
def test_invalid_settings_and_combinations_are_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        make()
