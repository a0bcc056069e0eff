"""Laws 1, 2, 5 and 7 (numbered as in docs/design.md) over the table of pieces. Laws 3, 4, 6 and 8 are in other files."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from pieces import CODECS, PARTITIONS
from strategies import METHODS, each

import thinwire as tw
from thinwire.drivers.monitor import _LAYOUT
from thinwire.packet import HEADER_NBYTES
from thinwire.pieces.policy import Deciding
from thinwire.testing import strategies
from thinwire.testing.strategies import all_agree
from thinwire.testing.toy import Shuffled, adamw, batch, inner_step, journey, same_bits, sgd, toy, weighs, weights

methods = pytest.mark.parametrize("name", each(METHODS))


@cache
def counted(name, replicas):
    """Returns a run of a method with its bytes counted, which several laws use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "thinwire.drivers.monitor.PATIENCE", 600.0
        )  # no replica asks where another one is, under any load
        return strategies.counted(METHODS[name], replicas)


def momentum_sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.01)


# ---- law 1: anchors and outer state are bit-identical on all replicas


@methods
@pytest.mark.parametrize("replicas", [1, 3])
def test_law_1_same_anchors(name, replicas):
    """Two replicas agree where the bytes of a period are counted."""
    journeys, _ = counted(name, replicas)
    all_agree(journeys)
    for one in journeys:
        assert torch.isfinite(one.final).all() and not same_bits(one.final, weights(toy()))
    if replicas > 1 and name != "keep local":
        anchors = [t for n, t in journeys[0].agreed[-1].items() if n.endswith(".now")]
        assert any(
            not same_bits(a, b)
            for a, b in zip(anchors, [t for n, t in journeys[0].agreed[0].items() if n.endswith(".now")])
        )


@pytest.mark.parametrize(
    ("codec", "partition"),
    [(row.piece, tw.pieces.partition.Strided(2)) for row in CODECS]
    + [(tw.codecs.E3M0(4), row.piece) for row in PARTITIONS],
    ids=str,
)
def test_law_1_any_codec_and_partition(codec, partition):
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(3, 1),
        partition=partition,
        codec=codec,
        outer=tw.pieces.outer.Nesterov(),
        merge=tw.pieces.merge.Mix(0.5),
    )
    journeys = journey(strategy, 3, steps=6)
    all_agree(journeys)
    mixed = [j.weights[-1] for j in journeys]
    assert not same_bits(mixed[0], mixed[1]), "replicas that merge half train apart"


@methods
def test_finish_leaves_the_anchors_in_the_model(name):
    for one in counted(name, 3)[0]:
        anchors = torch.cat([one.final_agreed[f"{i}.now"] for i in range(len(one.final_fragments))])
        assert same_bits(torch.cat(one.final_fragments), anchors)


# ---- law 2: known special cases


@pytest.mark.parametrize("optimizer", [adamw, momentum_sgd, sgd])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize(
    "schedule", [tw.pieces.schedule.Every(1), tw.pieces.schedule.Every(3), tw.pieces.schedule.Staggered(4)], ids=str
)
def test_law_2_one_replica_is_the_inner_optimizer_alone(optimizer, alpha, schedule):
    """M = 1, delay 0, Average: equal at every step and after finishing, bit for bit."""
    strategy = tw.Strategy(
        schedule=schedule, partition=tw.pieces.partition.Strided(2), merge=tw.pieces.merge.Mix(alpha)
    )
    (one,) = journey(strategy, 1, optimizer=optimizer)
    model = toy()
    alone = optimizer(model)
    for step, got in enumerate(one.weights, 1):
        inner_step(model, alone, *batch(0, 0, step))
        assert same_bits(got, weights(model)), step
    assert same_bits(one.final, weights(model))


def test_law_2_one_replica_exchanging_gradients_is_the_inner_optimizer_alone():
    (one,) = journey(tw.data_parallel(), 1)
    model = toy()
    alone = adamw(model)
    for step, got in enumerate(one.weights, 1):
        inner_step(model, alone, *batch(0, 0, step))
        assert same_bits(got, weights(model)), step


def plain_diloco(replicas, every, rounds, outer_lr, outer_momentum):
    """Returns the anchors of DiLoCo (arXiv 2311.08105, Algorithm 1) after each round, written plainly."""
    anchor = toy()
    outer = torch.optim.SGD(anchor.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    models = [toy() for _ in range(replicas)]
    inner = [adamw(model) for model in models]
    for round_ in range(rounds):
        for rank, (model, optimizer) in enumerate(zip(models, inner)):
            for step in range(round_ * every + 1, (round_ + 1) * every + 1):
                inner_step(model, optimizer, *batch(0, rank, step))
        for parameters in zip(anchor.parameters(), *(model.parameters() for model in models)):
            start, *own = (p.data for p in parameters)
            parameters[0].grad = sum((start - p for p in own), torch.zeros_like(start)) / replicas
        outer.step()
        for model in models:
            model.load_state_dict(anchor.state_dict())
        yield weights(anchor)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 4])
def test_law_2_one_fragment_is_diloco(lr, momentum, replicas, every):
    """Equal bit for bit if the outer step is the plain one; with Nesterov, within the rounding of another order of operations."""
    strategy = tw.diloco(every=every, outer_lr=lr, outer_momentum=momentum)
    journeys = journey(strategy, replicas, steps=3 * every)
    for round_, due in enumerate(plain_diloco(replicas, every, 3, lr, momentum), 1):
        for one in journeys:
            got = one.weights[round_ * every - 1]
            if momentum == 0:
                assert same_bits(got, due)
            torch.testing.assert_close(got, due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_law_2_every_step_with_sgd_is_data_parallel(replicas):
    """`every=1`, inner SGD, Average equals data-parallel SGD on the mean gradient within rounding. So does exchanging gradients."""
    average = journey(tw.local_sgd(every=1), replicas, optimizer=sgd)
    exchanged = journey(tw.data_parallel(), replicas, optimizer=sgd)
    model = toy()
    alone = sgd(model)
    for step in range(1, 15):
        batches = [batch(0, rank, step) for rank in range(replicas)]
        inner_step(model, alone, *(torch.cat(part) for part in zip(*batches)))
        for journeys in (average, exchanged):
            for one in journeys:
                torch.testing.assert_close(one.weights[step - 1], weights(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 3])
def test_data_parallel_is_one_big_batch(replicas):
    """AdamW takes fourteen steps. Its first step is a sign, so gradients near zero would reveal any other mean at once."""
    journeys = journey(tw.data_parallel(), replicas)
    model = toy()
    alone = adamw(model)
    for step in range(1, 15):
        batches = [batch(0, rank, step) for rank in range(replicas)]
        inner_step(model, alone, *(torch.cat(part) for part in zip(*batches)))
        for one in journeys:
            torch.testing.assert_close(one.weights[step - 1], weights(model), rtol=1e-4, atol=1e-5)
            assert same_bits(one.weights[step - 1], journeys[0].weights[step - 1]), (
                "parameters stay equal by themselves"
            )


def test_merge_one_keeps_replicas_apart():
    """With α = 1 the weights equal those of independent runs while training lasts, though the anchors move (spec invariant 4)."""
    journeys = journey(METHODS["keep local"], 2)
    for rank, one in enumerate(journeys):
        model = toy()
        alone = adamw(model)
        for step, got in enumerate(one.weights, 1):
            inner_step(model, alone, *batch(0, rank, step))
            assert same_bits(got, weights(model))
    assert not same_bits(journeys[0].agreed[0]["0.anchor"], journeys[0].agreed[-1]["0.anchor"])


# ---- law 5: predicted bytes are counted bytes


def tells(strategy, fragment, number):
    """Returns how many numbers replica 0 sends to the others."""
    deciding = isinstance(strategy.policy, Deciding)
    return strategy.policy.tells(strategy.codec.fitted(fragment.shapes), number) if deciding else 0


@methods
@pytest.mark.parametrize("replicas", [1, 3])
def test_law_5_predicted_is_counted(name, replicas):
    strategy, (journeys, ledgers) = METHODS[name], counted(name, replicas)
    fragments = strategy.partition.fragments(toy())
    for rank, (one, ledger) in enumerate(zip(journeys, ledgers)):
        departures = one.heard("depart")
        predicted = sum(weighs(strategy, e, fragments[e["fragment"]], replicas, rank) for e in departures)
        peers = ledger.as_dict()["sent"].get("packet", {})
        assert predicted == sum(e["nbytes"] for e in departures)
        assert sum(e["nbytes"] for e in one.heard("flight")) == ledger.sent("packet")
        less = strategy.codec.varies and replicas > 1
        assert ledger.sent("packet") < predicted if less else ledger.sent("packet") == predicted
        assert sorted(peers) == [str(peer) for peer in range(replicas) if peer != rank]
        if strategy.exchange == tw.exchange.Direct():
            assert ledger.sent("packet") == ledger.received("packet")
            assert all(at["messages"] == len(departures) for at in peers.values())
        told = [tells(strategy, fragments[e["fragment"]], e["round"]) for e in departures if rank == 0]
        assert ledger.sent("policy") == sum(HEADER_NBYTES + 4 * count for count in told if count) * (replicas - 1)
        assert ledger.sent("monitor") == ledger.received("monitor") == _LAYOUT.size * (replicas - 1)
        products = strategy.exchange.nbytes_products(replicas) if strategy.aggregate.needs_products else 0
        assert ledger.sent("products") == products * len(departures)
        assert ledger.sent("buffers") == 40 * (replicas - 1)  # two digests, and their length
        # at a sample; and at the end at all values
        looks = sum(e["fragment"] == 0 and e["round"] < 3 for e in departures)
        assert ledger.sent("frozen parameters") == (24 + 8 * looks) * (replicas - 1)
        between = max(1, 32 // strategy.schedule.every)  # rounds of a fragment; and at the end those of all fragments
        compared = sum(e["round"] > 0 and (e["round"] + e["fragment"]) % between == 0 for e in departures)
        anchors = 0 if isinstance(strategy.signal, tw.strategy.Gradients) else 16 * compared + 8 + 16 * len(fragments)
        assert ledger.sent("anchors") == anchors * (replicas - 1)
        named = (
            "packet",
            "introduction",
            "start",
            "buffers",
            "policy",
            "products",
            "comparison",
            "monitor",
            "frozen parameters",
            "anchors",
        )
        assert ledger.sent() == sum(ledger.sent(purpose) for purpose in named)
    assert sum(ledger.sent() for ledger in ledgers) == sum(ledger.received() for ledger in ledgers)


@methods
def test_law_5_bytes_of_a_period(name):
    """In a steady period every fragment is sent once, so the count equals `nbytes_per_period`; the header's 48 bytes are separate."""
    strategy = METHODS[name]
    every = strategy.schedule.every
    one, other = journey(strategy, 2, steps=3 * every)
    all_agree([one, other])
    fragments = strategy.partition.fragments(toy())
    shapes = [fragment.shapes for fragment in fragments]
    last = [e for e in one.heard("depart") if e["step"] > 2 * every or (every == 1 and e["step"] == 2)]
    steady = [e for e in last if e["step"] <= 3 * every][: len(fragments)]  # without the last round, of finishing
    assert sorted(e["fragment"] for e in steady) == list(range(len(fragments)))
    if isinstance(strategy.policy, Deciding):
        assert sum(e["nbytes"] for e in steady) <= strategy.nbytes_per_period(shapes, 2)
        return
    numbers = {e["fragment"]: e["round"] for e in steady}
    predicted = sum(strategy.nbytes_per_period([of], 2, numbers[p]) for p, of in enumerate(shapes))
    assert sum(e["nbytes"] for e in steady) == predicted
    if strategy.exchange == tw.exchange.Direct():
        coded = [strategy.coded(of, numbers[p]) for p, of in enumerate(shapes)]
        assert predicted == sum(HEADER_NBYTES + codec.nbytes(numel) for codec, numel in coded)
    assert f"{strategy.nbytes_per_period(shapes, 2):,} bytes" in strategy.describe(toy(), 2)


# ---- law 7: the same seed gives the same bytes, in any arrival order


@methods
def test_law_7_arrival_order(name):
    calm, _ = counted(name, 3)
    stormy = journey(METHODS[name], 3, wrap=lambda group: Shuffled(group, 0))
    all_agree(stormy)
    for a, b in zip(calm, stormy):
        for left, right in itertools.chain(zip(a.weights, b.weights, strict=True), [(a.final, b.final)]):
            assert same_bits(left, right)


def test_law_7_another_seed_is_another_run():
    """So the equality above is not true for every run."""
    a, b = (journey(METHODS["streaming_diloco"], 2, steps=8, seed=seed)[0] for seed in (0, 1))
    assert not same_bits(a.final, b.final)


def test_law_7_another_seed_draws_otherwise():
    """Only the strategy's seed differs, not the batches. Random draws of the codecs follow it in every round."""

    def final(seed):
        codec = tw.codecs.RandomK(0.5, tw.codecs.Identity())
        return journey(tw.Strategy(schedule=tw.pieces.schedule.Every(3), codec=codec, seed=seed), 2, steps=6)[0].final

    assert same_bits(final(1), final(1)) and not same_bits(final(1), final(2))
