"""Exchanges alone, on threads: estimates against a plain mean, bytes, memory, and bad input."""

from __future__ import annotations

import pytest
import torch
from pieces import CODECS, EXCHANGES, MATRICES, over
from strategies import METHODS

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import shards
from thinwire.packet import REFUSED
from thinwire.rng import Key
from thinwire.testing import exchanges as laws
from thinwire.testing.exchanges import Went, deltas, fits, group_fits, rounds
from thinwire.testing.toy import Shuffled, adamw, journey, same_bits, toy

SIZES = [0, 1, 2, 3, 7, 64, 203]


# A `Choice` picks one of the others.
CARRY = [row.piece for row in EXCHANGES if not isinstance(row.piece, tw.lab.fastest.Fastest)]
FITTING = [(exchange, row.piece) for exchange in CARRY for row in CODECS if fits(exchange, row.piece)]
KINDS = (
    tw.codecs.Identity(),
    tw.codecs.E3M0(32),
    tw.codecs.Sign(),
    tw.codecs.TopK(0.3),
    tw.lab.codecs.LowRank(1, shapes=MATRICES),
    tw.codecs.RandomK(0.25, tw.codecs.Identity()),
    tw.lab.codecs.Entropy(tw.codecs.E3M0()),
    tw.lab.codecs.Entropy(tw.codecs.ChunkedTopK(60, 7)),
)
SOME = [(exchange, codec) for exchange, codec in FITTING if codec in KINDS]
REST = [pytest.param(*pair, marks=pytest.mark.slow) for pair in FITTING if pair not in SOME]


@pytest.mark.parametrize(("exchange", "codec"), SOME + REST, ids=str)
def test_all_replicas_agree_on_every_element(exchange, codec, small):
    laws.all_agree(exchange, codec)


@pytest.mark.parametrize("row", EXCHANGES, ids=str)
@over("size", [1, 2, 3, 4, 5])
@over("numel", SIZES)
def test_exact_values_give_the_mean_in_rank_order(row, size, numel, small):
    if group_fits(row.piece, size):
        laws.exact_values_give_the_mean(row.piece, size, numel, "rank order" in row.claims)


@pytest.mark.parametrize(("exchange", "codec"), SOME, ids=str)
def test_arrival_order_changes_no_bit(exchange, codec, small):
    laws.any_order_of_arrival(exchange, codec)


@pytest.mark.parametrize(("exchange", "codec"), SOME + REST, ids=str)
def test_law_5_predicted_is_counted(exchange, codec, small):
    laws.predicted_is_counted(exchange, codec)


@pytest.mark.parametrize(("exchange", "codec"), SOME, ids=str)
def test_a_value_that_is_not_finite_is_refused_by_name(exchange, codec, small):
    laws.refuses_by_name(exchange, codec)


@pytest.mark.parametrize(
    "codec", [tw.codecs.Sign(), tw.codecs.Sign("l2", 16), tw.codecs.E3M0(2), tw.codecs.TopK(0.3)], ids=str
)
@pytest.mark.parametrize("size", [2, 3])
def test_two_sides_telescope(codec, size, small):
    """The two sides of 1-bit Adam: Σ sent + e = Σ Δ at each replica; Σ estimates + the owners' e = Σ of the means of what was sent."""
    count, numel, exchange, feedback = (
        12,
        100,
        tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
        tw.pieces.feedback.Feedback(),
    )
    x = deltas(size, numel, count)

    def replica(group):
        air, rank = SendContext(group), group.rank
        memory, held = exchange.init(codec, numel, rank, size), feedback.init(numel)
        sent, estimates = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for number in range(count):
            signal = feedback.signal(x[number, rank], held)
            went = Went(air, exchange, codec, signal, memory, number)
            after = feedback.init(numel)
            feedback.settle(x[number, rank], went.sent, went.estimate, held, after)
            held, memory = after, went.state
            sent += went.sent
            estimates += went.estimate
        air.close()
        return sent, held["residual"], estimates, memory["residual"]

    seen = tw.run_threads(size, replica)
    for rank, (sent, residual, *_) in enumerate(seen):
        torch.testing.assert_close(sent + residual, x[:, rank].double().sum(0), rtol=0, atol=1e-4)
        assert residual.abs().max() > 0.01
    said = torch.stack([sent for sent, *_ in seen]).mean(0)
    held_by_owners = torch.cat([memory for *_, memory in seen])
    torch.testing.assert_close(seen[0][2] + held_by_owners, said, rtol=0, atol=1e-4)
    assert held_by_owners.abs().max() > 0.01


def test_sites_telescope(small):
    """Σ estimates + what the owners hold back = Σ means, where a site weighs as many as it has replicas."""
    exchange, codec, count, numel = (
        tw.exchange.Hierarchy((1, 1, 3), tw.pieces.feedback.Feedback()),
        tw.codecs.Sign(),
        10,
        100,
    )
    x = deltas(5, numel, count)
    seen = rounds(exchange, codec, x)
    estimates = sum(one.estimate.double() for one in seen[0])
    held = seen[0][-1].state["residual"] / 5 + seen[1][-1].state["residual"] / 5 + seen[2][-1].state["residual"] * 3 / 5
    torch.testing.assert_close(estimates + held, x.double().mean(1).sum(0), rtol=0, atol=1e-4)
    assert held.abs().max() > 0.01 and not seen[3][-1].state and not seen[4][-1].state


def test_power_sgd_equals_one_replica_with_the_mean_delta():
    """M replicas compute what one replica would with their mean delta (Vogels et al., §4.1), and keep the error locally."""
    codec = tw.lab.codecs.LowRank(2, shapes=((20, 30), (40,)))
    x = deltas(4, 640)
    seen = rounds(tw.exchange.AllReduce(), codec, x)
    ((alone,),) = rounds(tw.exchange.AllReduce(), codec, x.mean(1, keepdim=True))
    for (went,) in seen:
        torch.testing.assert_close(went.estimate, alone.estimate, rtol=1e-4, atol=1e-5)
        assert torch.linalg.matrix_rank(went.estimate[:600].view(20, 30), rtol=1e-4) == 2
        assert same_bits(went.state["last"], seen[0][0].state["last"]) and went.state["last"].any()
    torch.testing.assert_close(
        torch.stack([went.sent for (went,) in seen]).mean(0), alone.estimate, rtol=1e-4, atol=1e-5
    )
    again = x.repeat(3, 1, 1)
    again[1, 2, 5] = torch.nan
    for first, refused, third in rounds(tw.exchange.AllReduce(), codec, again):
        assert refused.flags == (0, 0, REFUSED, 0) and same_bits(refused.state["last"], first.state["last"])
        errors = [(went.estimate - x[0].mean(0)).norm() for went in (first, third)]
        assert errors[1] < errors[0]  # a round starts from the last one that was not refused


def test_an_aggregate_remembers_what_it_aggregates(small):
    """All values with `Direct`, those of the own shard with `TwoShot`."""
    codec, rule, x = tw.codecs.Identity(), tw.lab.robust.direction_weights.FoolsGold(), deltas(3, 97)[0]
    for exchange, parts in ((tw.exchange.Direct(), [(0, 97)] * 3), (tw.exchange.TwoShot(), shards(codec, 97, 3))):

        def replica(group, exchange=exchange):
            rank, context = group.rank, SendContext(group)
            round_ = Round(context, codec, 97, Key(sender=rank), lambda begin, end: x[rank, begin:end])
            round_.aggregate, round_.remembered = rule, rule.init(exchange.owns(codec, 97, rank, 3), 3)
            assert list(exchange.arrive(exchange.depart(round_, {})))
            round_.close()
            context.close()
            return round_.after

        for (first, last), after in zip(parts, tw.run_threads(3, replica, timeout=600.0)):
            assert all(same_bits(after[f"history{rank}"], x[rank, first:last]) for rank in range(3))


@pytest.mark.parametrize("exchange", [row.piece for row in EXCHANGES], ids=str)
def test_bytes_on_each_link_are_as_promised(exchange):
    """For a packet that is large against its headers, each link carries what the exchange promises."""
    codec, numel = tw.codecs.E3M0(128), 1 << 20
    if not fits(exchange, codec):
        codec = tw.codecs.Cast()
    size = next(size for size in (4, 3, 5) if group_fits(exchange, size))
    packet, sent = codec.nbytes(numel), [exchange.nbytes_sent(codec, numel, size, rank) for rank in range(size)]
    if isinstance(exchange, tw.exchange.Direct):
        due = [(size - 1) * packet] * size
    elif isinstance(exchange, tw.exchange.Hierarchy):
        due = []
        least = min(map(len, exchange.ranks))
        for rank in range(size):
            owns = exchange.site_of(rank).index(rank) < least
            due.append((len(exchange.ranks) - 1) * packet / least if owns else 0)
            site = len(exchange.site_of(rank))
            shard = 1 / least if owns else 0
            inside = 4 * numel * (1 - shard) + shard * len(exchange.ranks) * (site - 1) * packet if site > 1 else 0
            assert exchange.nbytes_inside(codec, numel, size, rank) == pytest.approx(inside, rel=0.01)
    elif isinstance(exchange, tw.lab.star.exchange.Star):
        due = [(size - 1) * packet if rank == exchange.center else packet for rank in range(size)]
    else:
        due = [2 * (size - 1) / size * packet] * size
    assert sent == pytest.approx(due, rel=0.01)


def test_bytes_inside_a_site_are_counted_apart(small):
    exchange = tw.exchange.Hierarchy((2, 3))
    for codec, numel in [
        (tw.codecs.E3M0(2), 333),
        (tw.codecs.TopK(0.3), 50),
        (tw.codecs.Identity(), 1),
        (tw.codecs.Cast(), 0),
    ]:
        ledgers = [Ledger() for _ in range(5)]
        rounds(exchange, codec, deltas(5, numel), lambda group, of=ledgers: CountedGroup(group, of[group.rank]))
        for rank, ledger in enumerate(ledgers):
            assert ledger.sent("packet") == exchange.nbytes_sent(codec, numel, 5, rank)
            assert ledger.sent("site") == exchange.nbytes_inside(codec, numel, 5, rank)
            assert ledger.sent() == ledger.sent("packet") + ledger.sent("site")
            inside = {str(mate) for mate in exchange.site_of(rank)}
            assert set(ledger.as_dict()["sent"].get("site", {})) <= inside
            assert not set(ledger.as_dict()["sent"].get("packet", {})) & inside


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot()], ids=str)
def test_grain_changes_no_value(exchange, request):
    """A packet in one message or in many gives the same values and the same payload, and one header for each message."""
    codec, x = tw.codecs.E3M0(8), deltas(3, 1000)
    ((whole,), *_) = rounds(exchange, codec, x)
    assert exchange.nbytes_sent(codec, 1000, 3) < 6000
    request.getfixturevalue("small")
    ((cut,), *_) = rounds(exchange, codec, x)
    assert same_bits(cut.estimate, whole.estimate) and same_bits(cut.sent, whole.sent)


def test_an_overflowing_mean_voids_the_round_and_names_nobody(small):
    """Deltas are finite, but their mean is not: the round is void on all replicas, and no replica is named."""
    x = torch.full((1, 3, 100), 3e38)
    for exchange in (tw.exchange.TwoShot(), tw.exchange.AllReduce(), tw.exchange.Hierarchy((2, 1))):
        for (went,) in rounds(exchange, tw.codecs.Identity(), x):
            assert went.flags == (0, 0, 0)
            assert went.void or not bool(torch.isfinite(went.estimate).all())


@pytest.mark.parametrize(
    ("codec", "sites"),
    [
        pytest.param(codec, sites, marks=[pytest.mark.slow] * (codec != one))
        for one, sites in (
            (tw.codecs.E3M0(4), (2, 1)),
            (tw.codecs.TopK(0.2), ((3, 0), (2, 1))),
            (tw.lab.codecs.LowRank(1), (1, 1, 3)),
            (tw.codecs.E3M0(4), (4,)),
        )
        for codec in (tw.codecs.E3M0(4), tw.codecs.TopK(0.2), tw.lab.codecs.LowRank(1))
    ],
    ids=str,
)
def test_training_in_sites_satisfies_laws_1_5_6_and_7(codec, sites):
    """Laws 1, 5, 6 and 7 for a whole strategy: equal anchors after every step in any order of arrival; predicted bytes are counted."""
    exchange = tw.exchange.Hierarchy(sites, tw.pieces.feedback.Feedback())
    size = sum(map(len, exchange.ranks))
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(4, 2),
        partition=tw.pieces.partition.Strided(2),
        codec=codec,
        exchange=exchange,
        outer=tw.pieces.outer.Nesterov(),
        merge=tw.pieces.merge.Mix(0.5),
    )
    ledgers = [Ledger() for _ in range(size)]
    calm = journey(strategy, size, steps=10, wrap=lambda group: CountedGroup(group, ledgers[group.rank]))
    stormy = journey(strategy, size, steps=10, wrap=lambda group: Shuffled(group, 1))
    for rank, (one, other) in enumerate(zip(calm, stormy)):
        assert sum(e["nbytes"] for e in one.heard("depart")) == ledgers[rank].sent("packet")
        assert same_bits(one.final, other.final)
        for a, b, first in zip(one.agreed, other.agreed, calm[0].agreed):
            assert all(same_bits(a[name], b[name]) and same_bits(a[name], first[name]) for name in a)


def test_a_refused_round_leaves_the_exchange_as_it_was():
    """Law 3 for what the owners hold back; law 6: it is saved."""
    strategy = METHODS["1-bit, both sides"]
    memories: list[dict[int, torch.Tensor]] = [{}, {}]

    def look(replica, step):
        (memory,) = (t for name, t in replica.state()[0].items() if name.endswith("exchange.residual"))
        memories[replica.group.rank][step] = memory.clone()  # before the update of this step
        if step == 5 and replica.group.rank == 1:
            next(p for p in replica.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan

    journeys = journey(strategy, 2, steps=14, before_step=look)
    assert [e["step"] for e in journeys[0].heard("refused")] == [7]
    for memory in memories:
        assert memory[5].any() and same_bits(memory[6], memory[9]) and not same_bits(memory[9], memory[12])


def test_peers_with_different_exchanges_are_refused():
    def replica(group):
        model = toy()
        exchange = tw.exchange.TwoShot() if group.rank else tw.exchange.Direct()
        try:
            tw.Replica(tw.Strategy(exchange=exchange), model, adamw(model), group)
        except tw.DisagreementError as error:
            return str(error)

    for said in tw.run_threads(2, replica):
        assert (
            said.startswith("replica 1 does not fit replica 0: strategy: ")
            and "exchange=TwoShot(feedback=None)" in said
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chosen", [False, True])
def test_sites_of_another_group_are_refused(chosen, size):
    sites = tw.exchange.Hierarchy((2, 1))
    strategy = tw.Strategy(exchange=tw.lab.fastest.Fastest("1mbit", (sites,)) if chosen else sites)
    said = f"is for 3 replicas, the group has {size}; give the sites of this group"

    def replica(group):
        model = toy()
        with pytest.raises(tw.ConfigurationError, match=said):
            tw.Replica(strategy, model, adamw(model), group)

    tw.run_threads(size, replica)
    with pytest.raises(tw.ConfigurationError, match=said):
        strategy.describe(toy(), size)
