"""Exchanges alone: estimates on threads, against the mean written down plainly; bytes, memory, bad input."""

from __future__ import annotations

import pytest
import torch
from pieces import CODECS, EXCHANGES, Shuffled, same_bits

import thinwire as tw
from thinwire.exchange import Air, Round
from thinwire.exchange import messages as cutting
from thinwire.group import CountedGroup, Ledger
from thinwire.packet import REFUSED
from thinwire.seeds import Key

SIZES = [0, 1, 2, 3, 7, 64, 1000]


def fits(exchange, codec) -> bool:
    try:
        exchange.check(codec, None)
    except tw.ConfigurationError:
        return False
    return True


FITTING = [(e.piece, c.piece) for e in EXCHANGES for c in CODECS if fits(e.piece, c.piece)]
SOME = [(e, c) for e, c in FITTING if c in (tw.Identity(), tw.E3M0(2), tw.Sign(), tw.TopK(0.3), tw.LowRank(1))]


@pytest.fixture
def small(monkeypatch):
    """Messages of 64 bytes and pieces of 8 elements, so that a toy is cut as a large model is."""
    monkeypatch.setattr(cutting, "MESSAGE_NBYTES", 64)
    monkeypatch.setattr(cutting, "PIECE_NUMEL", 8)
    cutting._cut.cache_clear()
    yield
    cutting._cut.cache_clear()


class Went:
    """One round as one replica saw it."""

    def __init__(self, air, exchange, codec, delta, state, number=0, seed=0, flags=0):
        key = Key(seed, 0, number, air.group.rank)
        self.estimate, self.sent = torch.full_like(delta, torch.nan), torch.full_like(delta, torch.nan)
        self.covered = torch.zeros(delta.numel(), dtype=torch.int)
        round_ = Round(air, codec, delta.numel(), key, lambda begin, end: delta[begin:end], flags, (number,))

        def settle(begin, mean, sent):
            end = begin + mean.numel()
            self.covered[begin:end] += 1
            self.estimate[begin:end] = mean
            self.sent[begin:end] = sent()

        arrival = exchange.arrive(exchange.depart(round_, state), settle)
        self.flags, self.state, self.void = arrival.flags, arrival.state, arrival.void
        self.refused = self.void or any(f & REFUSED for f in self.flags)


def deltas(size, numel, rounds=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rounds, size, numel, generator=generator)


def rounds(exchange, codec, x, wrap=lambda group: group):
    """`x` is [rounds, replicas, numel]; for each replica what it saw of each round."""
    count, size, numel = x.shape

    def replica(group):
        air, seen = Air(wrap(group)), []
        state = exchange.init(codec, numel, group.rank, size)
        for number in range(count):
            seen.append(Went(air, exchange, codec, x[number, group.rank], state, number))
            state = seen[-1].state
        air.close()
        return seen

    return tw.run_threads(size, replica, timeout=20.0)


@pytest.mark.parametrize(("exchange", "codec"), FITTING, ids=str)
def test_all_agree_on_every_element(exchange, codec, small):
    for size, numel in [(1, 7), (2, 100), (3, 1), (3, 1000), (4, 3), (4, 500), (5, 0), (5, 997)]:
        if not group_fits(exchange, size):
            continue
        x = deltas(size, numel, 2)
        seen = rounds(exchange, codec, x)
        for number in range(2):
            first = seen[0][number]
            assert not first.refused and torch.isfinite(first.estimate).all()
            for one in seen:
                assert same_bits(one[number].estimate, first.estimate)
                assert bool((one[number].covered == 1).all())


def group_fits(exchange, size) -> bool:
    try:
        exchange.init(tw.Identity(), 10, 0, size)
    except tw.ConfigurationError:
        return False
    return True


@pytest.mark.parametrize("exchange", [row.piece for row in EXCHANGES], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", SIZES)
def test_exact_values_give_the_mean_in_rank_order(exchange, size, numel, small):
    if not group_fits(exchange, size):
        pytest.skip("for another group")
    x = deltas(size, numel)
    due = torch.zeros(numel)
    for row in x[0]:
        due += row
    due /= size
    for rank, (went,) in enumerate(rounds(exchange, tw.Identity(), x)):
        torch.testing.assert_close(went.estimate, due, rtol=1e-6, atol=1e-6)
        if "rank order" in next(row.claims for row in EXCHANGES if row.piece == exchange):
            assert same_bits(went.estimate, due)
            assert same_bits(went.sent, x[0, rank])


@pytest.mark.parametrize(("exchange", "codec"), SOME, ids=str)
def test_any_order_of_arrival(exchange, codec, small):
    size = next(size for size in (3, 4, 5) if group_fits(exchange, size))
    x = deltas(size, 500, 3)
    calm = rounds(exchange, codec, x)
    for seed in range(2):
        stormy = rounds(exchange, codec, x, lambda group, seed=seed: Shuffled(group, seed))
        for a, b in zip(calm, stormy):
            assert all(same_bits(p.estimate, q.estimate) and same_bits(p.sent, q.sent) for p, q in zip(a, b))


@pytest.mark.parametrize(("exchange", "codec"), FITTING, ids=str)
def test_law_5_predicted_is_counted(exchange, codec, small):
    for size, numel in [(1, 100), (2, 33), (3, 1000), (4, 1), (4, 99), (5, 0), (5, 2)]:
        if not group_fits(exchange, size):
            continue
        ledgers = [Ledger() for _ in range(size)]
        rounds(exchange, codec, deltas(size, numel), lambda group, of=ledgers: CountedGroup(group, of[group.rank]))
        predicted = [exchange.nbytes_sent(codec, numel, size, rank) for rank in range(size)]
        assert [ledger.sent("packet") for ledger in ledgers] == predicted
        assert exchange.nbytes_sent(codec, numel, size) == max(predicted)
        assert sum(ledger.received() for ledger in ledgers) == sum(ledger.sent() for ledger in ledgers)


@pytest.mark.parametrize(("exchange", "codec"), SOME, ids=str)
def test_a_value_that_is_not_finite_is_refused_by_name(exchange, codec, small):
    """Wherever it stands, on all replicas, and the exchange's memory is as it was."""
    size = next(size for size in (3, 4, 5) if group_fits(exchange, size))
    for at in (0, 250, 499):
        x = deltas(size, 500, 2)
        x[1, 1, at] = torch.nan
        for seen in rounds(exchange, codec, x):
            first, second = seen
            assert not first.refused and second.refused
            assert [bool(f & REFUSED) for f in second.flags] == [rank == 1 for rank in range(size)]
