"""Laws 1, 3, 5 and 7 of an exchange alone: rounds of random values among replicas in threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm import CountedGroup, Group, Ledger, run_threads
from thinwire.errors import ConfigurationError
from thinwire.exchange import Arriving, Exchange, Round, SendContext
from thinwire.exchange.base import fits as fits
from thinwire.packet import REFUSED
from thinwire.rng import Key
from thinwire.testing.codecs import law
from thinwire.testing.toy import Shuffled, same_bits
from thinwire.types import State

Wrap = Callable[[Group], Group]


class Went:
    """One round of one replica."""

    def __init__(
        self, context: SendContext, exchange: Exchange, codec: Codec, delta: Tensor, state: State, number: int = 0
    ) -> None:
        key = Key(0, 0, number, context.group.rank)
        self.estimate, self.sent = torch.full_like(delta, torch.nan), torch.full_like(delta, torch.nan)
        self.covered = torch.zeros(delta.numel(), dtype=torch.int)
        round_ = Round(context, codec, delta.numel(), key, lambda begin, end: delta[begin:end], 0, (number,))

        before = {name: kept.clone() for name, kept in state.items()}
        arriving = Arriving(exchange.arrive(exchange.depart(round_, state)))
        for begin, mean, own in arriving:
            end = begin + mean.numel()
            self.covered[begin:end] += 1
            self.estimate[begin:end] = mean
            law(own is not None, "a round that decodes_own gets no own values")
            self.sent[begin:end] = mean if own is None else own
        round_.close()
        arrival = arriving.arrival
        law(
            all(same_bits(kept, before[name]) for name, kept in state.items()), "a round changes the state it was given"
        )
        self.flags, self.state, self.void = arrival.flags, arrival.state, arrival.void
        self.refused = self.void or any(f & REFUSED for f in self.flags)


def deltas(size: int, numel: int, rounds: int = 1) -> Tensor:
    """Drawn values, [rounds, replicas, numel]."""
    return torch.randn(rounds, size, numel, generator=torch.Generator().manual_seed(0))


def rounds(exchange: Exchange, codec: Codec, x: Tensor, wrap: Wrap = lambda group: group) -> list[list[Went]]:
    """`x` is [rounds, replicas, numel]; for each replica what it saw of each round."""
    count, size, numel = x.shape

    def replica(group: Group) -> list[Went]:
        context, seen = SendContext(wrap(group)), list[Went]()
        state = exchange.init(codec, numel, group.rank, size)
        for number in range(count):
            seen.append(Went(context, exchange, codec, x[number, group.rank], state, number))
            state = seen[-1].state
        context.close()
        return seen

    return run_threads(size, replica, timeout=600.0)


def group_fits(exchange: Exchange, size: int) -> bool:
    """Whether `exchange` is for so many replicas."""
    try:
        exchange.init(Identity(), 10, 0, size)
    except ConfigurationError:
        return False
    return True


def all_agree(exchange: Exchange, codec: Codec) -> None:
    """Law 1: every element is settled once, finite, and the same bits on all replicas."""
    for size, numel in [(1, 7), (2, 50), (3, 1), (3, 70), (4, 3), (4, 60), (5, 0), (5, 47)]:
        if not group_fits(exchange, size):
            continue
        seen = rounds(exchange, codec, deltas(size, numel, 2))
        for number in range(2):
            first = seen[0][number]
            law(
                not first.refused and torch.isfinite(first.estimate).all(), f"{size} replicas: a sound round is refused"
            )
            for one in seen:
                law(
                    same_bits(one[number].estimate, first.estimate),
                    f"{size} replicas, {numel} values: they do not agree",
                )
                law(
                    (one[number].covered == 1).all(),
                    f"{size} replicas, {numel} values: not every value is settled once",
                )


def exact_values_give_the_mean(exchange: Exchange, size: int, numel: int, rank_order: bool = False) -> None:
    """With fp32 the estimate is the mean; with `rank_order` it equals a sum in rank order to the last bit."""
    x = deltas(size, numel)
    due = torch.zeros(numel)
    for row in x[0]:
        due += row
    due /= size
    for rank, (went,) in enumerate(rounds(exchange, Identity(), x)):
        law(torch.allclose(went.estimate, due, rtol=1e-6, atol=1e-6), "exact values do not give their mean")
        if rank_order:
            law(same_bits(went.estimate, due), "the sum is not in rank order")
            law(same_bits(went.sent, x[0, rank]), "what was sent is not what was given")


def any_order_of_arrival(exchange: Exchange, codec: Codec) -> None:
    """Law 7: late messages in any order change no bit."""
    x = deltas(_size(exchange), 70, 2)
    calm = rounds(exchange, codec, x)
    for seed in range(2):

        def shuffled(group: Group, seed: int = seed) -> Group:
            return Shuffled(group, seed)

        for a, b in zip(calm, rounds(exchange, codec, x, shuffled)):
            alike = all(same_bits(p.estimate, q.estimate) and same_bits(p.sent, q.sent) for p, q in zip(a, b))
            law(alike, "the order of arrival changes the estimate")


def predicted_is_counted(exchange: Exchange, codec: Codec) -> None:
    """Law 5: `nbytes_sent` is what the ledger counts, for every replica, or more where the codec `varies`; without a rank, the most of
    them.
    """
    for size, numel in [(1, 10), (2, 33), (3, 70), (4, 1), (4, 50), (5, 0), (5, 2)]:
        if not group_fits(exchange, size):
            continue
        ledgers = [Ledger() for _ in range(size)]

        def counted(group: Group, of: list[Ledger] = ledgers) -> Group:
            return CountedGroup(group, of[group.rank])

        rounds(exchange, codec, deltas(size, numel), counted)
        predicted = [exchange.nbytes_sent(codec, numel, size, rank) for rank in range(size)]
        sent = [ledger.sent("packet") for ledger in ledgers]
        fits = sent == predicted or (codec.varies and all(one <= most for one, most in zip(sent, predicted)))
        law(fits, f"{size} replicas, {numel} values: {sent} bytes are sent, nbytes_sent says {predicted}")
        most = exchange.nbytes_sent(codec, numel, size)
        law(most == max(predicted), f"nbytes_sent without a rank is {most}, the most is {max(predicted)}")
        received = sum(ledger.received() for ledger in ledgers)
        law(received == sum(ledger.sent() for ledger in ledgers), "not all that is sent is received")


def refuses_by_name(exchange: Exchange, codec: Codec) -> None:
    """Law 3: a value that is not finite, wherever it stands, refuses the round on all replicas, by the name of whose it was."""
    size, numel = _size(exchange), 120
    for at in (0, numel // 2, numel - 1):
        x = deltas(size, numel, 2)
        x[1, 1, at] = torch.nan
        for first, second in rounds(exchange, codec, x):
            law(not first.refused and second.refused, "a round with a value that is not finite is not refused by all")
            law(
                all(bool(f & REFUSED) == (rank == 1) for rank, f in enumerate(second.flags)),
                "it is not said whose it was",
            )


def _size(exchange: Exchange) -> int:
    sizes = [size for size in (3, 4, 5, 2, 1) if group_fits(exchange, size)]
    law(sizes, "init refuses groups of 1 to 5 replicas")
    return sizes[0]
