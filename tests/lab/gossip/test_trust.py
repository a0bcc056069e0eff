"""Gossip rules that trust no neighbour (Bristle, SybilWall): published weights, sketches, records, and runs with liars."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from thinwire.catalogue.methods import RECIPES
from thinwire.codecs import E3M0, Identity
from thinwire.errors import ConfigurationError
from thinwire.lab.gossip.rules import CombineThenAdapt
from thinwire.lab.gossip.trust import Bristle, Heard, SybilWall, qualities, sketch, trust, weighed
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacked import AttackedGossip, with_liars
from thinwire.lab.robust.attacks import LabelFlip, Replay, Sybils
from thinwire.lab.robust.coordinates import Median
from thinwire.lab.topology import Complete, RandomPairs, Ring
from thinwire.rng import Key
from thinwire.testing.toy import batch, inner_step, journey, same_bits, sgd, toy, weights

WIDTH = 64


def no_losses(weights):
    raise AssertionError("this rule needs no losses")


# ---- Bristle


@pytest.mark.parametrize(
    ("own", "of_peer"),
    [
        (0.5, {0.3: 0.437, 0.5: 1.0, 0.7: 1.283, 0.9: 3.824, 1.0: 5.424}),
        (0.9, {0.5: 0.0, 0.7: 0.259, 0.9: 1.0, 1.0: 1.025}),
    ],
)
def test_bristle_weights_match_the_published_table(own, of_peer):
    """The table has a certainty of 1. With one class the certainty is the peer's own value, hence the division."""
    for theirs, due in of_peer.items():
        assert trust([own], [theirs]) / theirs == pytest.approx(due, abs=6e-4), theirs


def test_trust_depends_on_all_classes_of_a_peer():
    assert trust([0.5, 0.5], [0.0, 0.0]) == 0.0
    edge = 40.5 ** (1 / 4.5) / 10  # the score of −40.5 on one class
    assert trust([0.5], [0.5 - edge - 0.005]) == 0.0 < trust([0.5], [0.5 - edge + 0.005])
    assert trust([0.7, 0.7], [0.7, 0.7]) == pytest.approx(0.7), "a peer that is equal: its certainty"
    assert trust([0.5, 0.5], [0.4, 0.6]) < trust([0.5, 0.5], [0.5, 0.5]), (
        "damped by what it varies (population deviation)"
    )
    assert trust([0.5, 0.5], [0.4, 0.6]) == pytest.approx(0.4 * (10 / (1 + math.exp(0.0)) - 4), rel=1e-6)
    assert qualities([1.0, 1.0, 1.0], [1.0 + math.log(2), 0.3, math.inf]) == (
        [0.5] * 3,
        pytest.approx([0.25, 1.0, 0.0]),
    )
    for pairs in (trust, qualities):
        with pytest.raises(ValueError, match="zip"):  # another number of batches the second time
            pairs([1.0], [1.0, 2.0])


def test_the_weighted_mean_is_normalised():
    own, others = torch.tensor([1.0, 2.0]), {1: torch.tensor([4.0, 5.0]), 7: torch.tensor([1e30, 1e30])}
    assert weighed(own, others, {1: 0.5, 7: 0.0}).tolist() == [2.0, 3.0]
    assert same_bits(weighed(own, others, {}), own)


# ---- sketches


def test_a_sketch_keeps_cosines_within_one_percent_and_short_vectors_exactly():
    width, numel = 1 << 14, 100_003
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(numel, generator=generator)
    errors = []
    for share in (0.0, 0.3, 0.9, 0.999):
        for column in (torch.randn(numel, generator=generator), torch.ones(numel)):  # noise and structure
            x, y = common, share * common + (1 - share**2) ** 0.5 * column
            a, b = sketch(x, width, 5), sketch(y, width, 5)
            exact, found = torch.cosine_similarity(x, y, 0), torch.cosine_similarity(a, b, 0)
            errors.append(abs(float(exact - found)))
    assert max(errors) < 0.025 and sum(errors) / len(errors) < 0.01
    assert same_bits(sketch(common, width, 5), sketch(common, width, 5))
    assert not same_bits(sketch(common, width, 5), sketch(common, width, 6))
    for numel in (100, 128):
        assert same_bits(sketch(common[:numel], 128, 5), common[:numel])
    # as recorded: replicas of all versions compare sketches
    due = "155 81 -159 81 -163 -81 167 169 -81 -173 -175 17 -115 17 119 17 123 254 -113 17 -131 17 -17 137 -17 17 17 -17 81 81 81 -81 "
    due += "-91 93 -95 81 -99 101 -103 -105 -81 109 -81 113 115 81 119 121 81 81 -81 129 81 133 135 81 81 -81 81 145 147 149 -151 -81"
    assert sketch(torch.arange(1.0, 131.0), 64, 7).tolist() == [float(word) for word in due.split()]
    assert sketch(torch.arange(1.0, 259.0), 128, 7)[:8].tolist() == [
        367.0,
        -113.0,
        -243.0,
        241.0,
        241.0,
        -241.0,
        241.0,
        -241.0,
    ]


# ---- SybilWall


def judged(rule, moves, size=None, state=None, number=0, rank=0, records=None):
    """The weights and the state of a replica at 0 whose neighbours have moved by `moves`."""
    size = size or len(moves) + 1
    key = Key(round=number, sender=rank)
    numel = len(next(iter(moves.values())))
    state = rule.begins(torch.zeros(numel), key, size) if state is None else state
    heard = Heard(key, size, torch.zeros(numel), moves, records or {}, no_losses)
    return rule.judges(heard, state)


def known(state):
    """The remembered records: replica → (round, distance, source)."""
    table = zip(*(state[name].tolist() for name in ("round", "distance", "source")))
    return {rank: row for rank, row in enumerate(table) if row[1]}


def test_sybil_wall_has_the_limits_of_foolsgold():
    """Sybils get weight 0 where data differ. Where data are alike the honest replicas do; docs/robust.md warns of this."""
    generator = torch.Generator().manual_seed(0)
    unlike = {rank: torch.randn(2000, generator=generator) for rank in range(1, 9)}
    one = torch.randn(2000, generator=generator)
    sybils = {rank: one + 1e-3 * torch.randn(2000, generator=generator) for rank in (9, 10, 11)}
    found, _ = judged(SybilWall(), unlike | sybils)
    assert list(found.values()) == [1.0] * 8 + [0.0] * 3
    common = torch.randn(2000, generator=generator)
    alike = {rank: common + 0.33 * unlike[rank] for rank in unlike}  # cosines of 0.9
    found, _ = judged(SybilWall(), alike | {9: one})
    assert list(found.values()) == [0.0] * 8 + [1.0]
    assert judged(SybilWall(), {1: one})[0] == {1: 1.0}, "a lone neighbour keeps its weight, also a liar"
    by_hand = {1: torch.tensor([0.0, 1.0]), 2: torch.tensor([1.0, 0.0]), 3: torch.tensor([1.0, -1.0])}
    assert judged(SybilWall(), by_hand)[0] == {1: 1.0, 2: 0.0, 3: 0.0}


def test_a_history_begins_at_the_common_start_and_a_record_has_its_length():
    """With a reach of one hop no records are sent. Neither rule needs what only the other needs."""
    rule, start, moved = SybilWall(WIDTH), torch.arange(8.0) + 1, torch.randn(8)
    state = rule.begins(start, Key(), 2)
    _, after = judged(rule, {1: start + moved}, state=state)
    torch.testing.assert_close(after["histories"].view(2, 8)[1], moved)
    for reach, numel, vectors in ((1, 8, [8]), (2, 8, [8, 3 + 8]), (2, 100, [100, 3 + WIDTH])):
        assert [count for _, count in SybilWall(WIDTH, reach).vectors(Identity(), numel)] == vectors
    assert SybilWall(WIDTH).needs_losses is False and Bristle().needs_losses


def test_records_of_far_replicas_arrive_in_a_run():
    """On a ring of four, each replica learns of the one that is two hops away."""

    def replica(group):
        model = toy()
        optimizer = sgd(model)
        with tw.Replica(tw.lab.recipes.sybil_wall(every=1, width=WIDTH), model, optimizer, group) as one:
            for step in range(3):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            return one.state()[0]["0.exchange.distance"].tolist()

    assert tw.run_threads(4, replica) == [[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]


def record_of(rank, number, distance, moved):
    return torch.cat([torch.tensor([float(rank), float(number), float(distance)]), moved])


def test_a_distant_record_exposes_a_sybil_and_gets_no_weight_itself():
    """One Sybil beside each replica keeps its weight alone and loses it beside the record of its twin.

    The reference implementation does not drop the weights of distant replicas.
    """
    generator = torch.Generator().manual_seed(1)
    honest = {rank: torch.randn(500, generator=generator) for rank in (1, 2)}
    liar = torch.randn(500, generator=generator)
    near = honest | {3: liar}
    rule = SybilWall(width=512)
    alone, state = judged(rule, near, size=6)
    assert alone == {1: 1.0, 2: 1.0, 3: 1.0}
    told, after = judged(rule, near, 6, state, 1, records={1: record_of(4, 0, 1, liar)})
    assert told == {1: 1.0, 2: 1.0, 3: 0.0} and known(after)[4] == (0.0, 2.0, 1.0)
    assert float(weighed(torch.ones(1), {rank: torch.ones(1) for rank in near}, told)) == 1.0


def test_only_valid_and_newer_records_are_kept():
    rule, near = SybilWall(width=WIDTH, reach=3), {1: torch.randn(8), 2: torch.randn(8)}
    moved = torch.arange(8.0)
    _, state = judged(rule, near, 6, number=5, records={1: record_of(4, 3, 1, moved)})
    assert known(state) == {1: (5.0, 1.0, 1.0), 2: (5.0, 1.0, 2.0), 4: (3.0, 2.0, 1.0)}
    _, newer = judged(rule, near, 6, state, 6, records={2: record_of(4, 4, 2, moved + 1)})
    assert known(newer)[4] == (4.0, 3.0, 2.0) and newer["histories"].view(6, 8)[4].tolist() == (moved + 1).tolist()
    refused = [
        *(
            record_of(4, 3, 1, moved),
            record_of(4, 4, 1, moved),
            record_of(4, 9, 1, moved),
            record_of(4, 5, 3, moved),
            record_of(4, 5, 0, moved),
        ),
        *(record_of(0, 5, 1, moved), record_of(1, 5, 1, moved), record_of(2, 5, 1, moved), record_of(6, 5, 1, moved)),
        *(record_of(-1, 5, 1, moved), record_of(4.5, 5, 1, moved), record_of(4, 5, 1, moved * math.nan)),
    ]
    # Old, not newer, future, too far, of itself, the sender, a neighbour or no replica, not finite.
    for record in refused:
        _, same = judged(rule, near, 6, newer, 6, records={1: record})
        assert known(same) | {1: 0, 2: 0} == known(newer) | {1: 0, 2: 0}, record[:3]
    _, last = judged(rule, near, 6, newer, 6, records={1: record_of(4, 6, 1, moved)})
    assert known(last)[4] == (6.0, 2.0, 1.0), "of the round that lands"
    _, first = judged(rule, near, 6, number=5, rank=5, records={1: record_of(0, 0, 1, moved)})
    assert known(first)[0] == (0.0, 2.0, 1.0), "of the first replica in the first round"
    _, silent = judged(rule, {1: near[1]}, 6, newer, 8, records={1: record_of(2, 7, 1, moved)})
    assert known(silent)[2] == (6.0, 1.0, 2.0), "what a neighbour sent itself stays, also in a round without it"
    hidden, _ = judged(rule, near | {2: torch.full((8,), 3e38)}, 6)
    assert set(hidden) == {1, 2}, "finite weights of any size are weighed"


def test_records_are_drawn_by_distance_and_not_sent_back_to_their_source():
    rule, size = SybilWall(width=WIDTH), 7
    state = rule.begins(torch.zeros(4), Key(), size)
    assert rule.tells(state, 1, Key())[0] == -1, "nothing is known yet"
    state["distance"] = torch.tensor([0.0, 1, 1, 2, 3, 4, 2])  # the record of 6 came from neighbour 1
    state["source"] = torch.tensor([0.0, 1, 2, 2, 2, 2, 1])
    state["histories"] = torch.arange(28.0)
    drawn = Counter(int(rule.tells(state, 1, Key(round=number))[0]) for number in range(4000))
    assert set(drawn) == {2, 3, 4, 5}
    due = {2: 1.0, 3: 0.449, 4: 0.202, 5: 0.091}
    for rank, chance in due.items():
        assert drawn[rank] / 4000 == pytest.approx(chance / sum(due.values()), abs=0.03)
    draws = [[int(rule.tells(state, to, Key(round=number))[0]) for number in range(8)] for to in (1, 3)]
    assert draws == [[5, 2, 2, 3, 2, 3, 2, 3], [2, 2, 2, 1, 4, 1, 1, 1]], "as recorded"
    found = rule.tells(state, 1, Key(round=1))
    rank = int(found[0])
    assert found[1:].tolist() == [0.0, float(state["distance"][rank]), *range(4 * rank, 4 * rank + 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"width": 100},
        {"width": 0},
        {"width": 1 << 17},
        {"width": 64.0},
        {"reach": 0},
        {"reach": 1.0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"rate": math.inf},
    ],
)
def test_invalid_settings_are_refused(settings):
    assert [SybilWall(width).width for width in (64, 1 << 16)] == [64, 1 << 16]
    with pytest.raises(ConfigurationError, match=r"is needed|are needed"):
        SybilWall(**settings)


def test_sybil_wall_needs_a_fixed_topology_and_whole_weights_that_end_in_a_median():
    for rule in (SybilWall(), Bristle()):
        with pytest.raises(ConfigurationError, match="leave the codec at Identity"):
            rule.check(Ring(), E3M0())
        assert rule.meets == Median() and rule.sends_weights is True and not rule.repeats
    with pytest.raises(ConfigurationError, match="must be the same in every round"):
        SybilWall().check(RandomPairs(), Identity())


# ---- among liars


def liars(recipe, attack, count=1, **settings):
    strategy = RECIPES[recipe](every=2, topology=Complete(), **settings)
    return replace(strategy, exchange=with_liars(strategy.exchange, attack, count))


def test_bristle_gives_a_noisy_or_infinite_neighbour_no_weight():
    """The noise moves all replicas of d_psgd."""
    honest = journey(tw.lab.recipes.bristle(every=2, topology=Complete()), 4, steps=8)
    assert not any(one.heard("refused") for one in honest)
    for attack in ("notfinite", "Gaussian(100.0)"):
        runs = journey(liars("bristle", attack_of(attack)), 4, steps=8)
        for one in runs[:3]:
            told = [event["weights"] for event in one.heard("weighed")]
            assert len(told) == 4 and all(
                weights.get("3", 0.0) == 0.0 < weights["1" if one is runs[0] else "0"] for weights in told
            )
        assert all(same_bits(runs[0].final, other.final) for other in runs)
        assert (
            float((runs[0].final - honest[0].final).norm())
            < 0.1 * float((honest[0].final - weights(toy())).norm()) + 0.1
        )
    moved = journey(liars("d_psgd", attack_of("Gaussian(100.0)")), 4, steps=8)
    assert float((moved[0].weights[-1] - honest[0].weights[-1]).norm()) > 10


def test_sybils_that_send_the_same_lose_their_weight():
    strategy = liars("sybil_wall", Sybils(attack_of("Gaussian(1.0)")), 2, width=WIDTH)
    for one in journey(strategy, 5, steps=4)[:3]:
        (*_, told) = [event["weights"] for event in one.heard("weighed")]
        assert told["3"] == told["4"] == 0.0 < sum(told.values())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: AttackedGossip(Ring(), CombineThenAdapt()), "choose d_psgd, bristle"),
        (lambda: AttackedGossip(Ring(), Bristle(), Replay()), "keeps no first delta"),
        (lambda: AttackedGossip(Ring(), Bristle(), LabelFlip(), 0), "1 or more"),
        (lambda: AttackedGossip(Ring(), Bristle(), LabelFlip(), 4).check_size(4), "at least one must be honest"),
    ],
)
def test_invalid_attacks_on_gossip_are_refused(made, said):
    with pytest.raises(ConfigurationError, match=said):
        made()


def test_bristle_compares_losses_in_evaluation_mode_and_leaves_frozen_modules_in_it():
    """The losses of neighbours are taken in evaluation mode; then the model is as the loop left it: its weights, and each module's mode."""

    def replica(group):
        model, modes = toy(group.rank), []
        model.head.eval()

        def losses():
            modes.append([one.training for one in model.modules()])
            return [float((model.head.weight - group.rank).square().sum())]

        optimizer = sgd(model)
        with tw.Replica(
            tw.lab.recipes.bristle(every=1, topology=Complete()), model, optimizer, group, validation=losses
        ):
            inner_step(model, optimizer, *batch(0, group.rank, 1))
        assert len(modes) == 2 and not any(map(any, modes)), "once for the own weights, once for the neighbour's"
        return [name for name, one in model.named_modules() if not one.training]

    assert tw.run_threads(2, replica) == [["head"], ["head"]]


def test_bristle_needs_validation_losses():
    def replica(group):
        model = toy()
        with pytest.raises(ConfigurationError, match=r"give Replica\(validation=...\)"):
            tw.Replica(tw.lab.recipes.bristle(), model, torch.optim.SGD(model.parameters(), lr=0.1), group)

    tw.run_threads(1, replica)
