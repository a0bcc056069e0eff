"""What gossip refuses, whom it names, and what a rule that judges each neighbour is given, by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.errors import NonFiniteError
from thinwire.exchange import Round, SendContext
from thinwire.exchange.base import Arrival, Arriving
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import AdaptThenCombine, PushSum, Tracking
from thinwire.lab.gossip.trust import Judging
from thinwire.lab.topology import ErdosRenyi, MoshpitGrid, OnePeerExponential, RandomPairs, Ring, parts
from thinwire.lab.topology.base import Topology, Union
from thinwire.packet import STOP
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.merge import Eager
from thinwire.pieces.outer import Nesterov
from thinwire.pieces.schedule import Every
from thinwire.rng import Key
from thinwire.testing.toy import sgd, toy
from thinwire.types import State

NUMEL = 50


def arrived(group: tw.Group, exchange: Gossip, x: torch.Tensor, settle: Callable[..., None], state: State) -> Arrival:
    """One round with the values `x`, in which replica 3 wants to stop. Returns or raises only when all is sent."""
    context = SendContext(group)
    flags = STOP if group.rank == 3 else 0
    round_ = Round(context, Identity(), NUMEL, Key(sender=group.rank), lambda begin, end: x[begin:end], flags)
    try:
        arriving = Arriving(exchange.arrive(exchange.depart(round_, state)))
        for part in arriving:
            settle(*part)
        return arriving.arrival
    finally:
        for one in round_.outgoing:
            one.wait_sent()
        context.close(wait=True)


@pytest.mark.parametrize("topology", [Ring(), MoshpitGrid(3)], ids=str)
def test_a_replica_with_unsound_values_is_named(topology, small):
    def replica(group: tw.Group) -> None:
        x = torch.ones(NUMEL)
        x[-1] = torch.nan if group.rank == 1 else 1.0
        with pytest.raises(NonFiniteError, match="the values of replica 1 in round 0 do not fit its codec"):
            arrived(group, Gossip(topology, AdaptThenCombine()), x, lambda *_: None, {})

    tw.run_threads(3, replica, timeout=600.0)


class Telling(Judging):
    """Tells each neighbour its own second vector of three values."""

    def vectors(self, codec, numel):
        return ((codec, numel), (Identity(), 3))

    def tells(self, state, to, key):
        return torch.tensor([10.0 * key.sender + to, float(state["kept"]), 7.0])

    def judges(self, heard, state):
        raise NotImplementedError


def test_a_judging_rule_gets_each_neighbours_vectors_in_order(small):
    """First the first vectors of all, then the second ones. A neighbour that refused is left out, and refuses no round."""

    def replica(group: tw.Group) -> tuple[list[float], list[float], tuple[int, ...]]:
        x = torch.full((NUMEL,), float(group.rank)) + torch.arange(NUMEL) / 64
        x[20] = torch.nan if group.rank == 1 else x[20]
        heard = torch.full((2 * NUMEL + 6,), -1.0)

        def settle(begin, values, sent):
            assert sent is None  # own values are known
            heard[begin : begin + len(values)] = values

        arrival = arrived(group, Gossip(Ring(), Telling()), x, settle, {"kept": torch.tensor(0.5 * group.rank)})
        return heard[: 2 * NUMEL], heard[2 * NUMEL :].tolist(), arrival.flags

    seen = tw.run_threads(4, replica, timeout=600.0)
    for rank, sources in enumerate(([1, 3], [0, 2], [1, 3], [0, 2])):
        first, second, flags = seen[rank]
        for place, source in enumerate(sources):
            if source != 1:
                due = source + torch.arange(NUMEL) / 64
                assert torch.equal(first[place * NUMEL : (place + 1) * NUMEL], due)
                assert second[3 * place : 3 * place + 3] == [10.0 * source + rank, 0.5 * source, 7.0]
            else:
                assert first[NUMEL - 1] == -1.0 and second[:3] == [-1.0] * 3
        assert flags == (0, 0, 0, STOP if rank == 3 or 3 in sources else 0)


class Joint(Identity):
    joint = True


@pytest.mark.parametrize(
    ("rule", "pieces", "said"),
    [
        (AdaptThenCombine(), {"feedback": Feedback()}, "gossip sends no deltas, so nothing can be held back"),
        (AdaptThenCombine(), {"codec": Joint()}, "it averages over senders, and neighbours have weights"),
        (AdaptThenCombine(), {"outer": Nesterov()}, r"outer=Nesterov\(.* gossip has no agreed anchor"),
        (AdaptThenCombine(), {"merge": Eager()}, r"Mix\(\.\.\.\) or Keep\(\), and Every or Staggered, are needed"),
        (Tracking(), {"schedule": Every(2)}, "needs a round after every step, without delay"),
        (Tracking(), {"schedule": Every(2, delay=1)}, "needs a round after every step, without delay"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pieces_that_gossip_cannot_use_are_refused(rule, pieces, said):
    with pytest.raises(tw.ConfigurationError, match=said):
        tw.Strategy(exchange=Gossip(Ring(), rule), **{"schedule": Every(1)} | pieces)


def test_pieces_that_gossip_can_use_are_accepted():
    free = {"partition": tw.pieces.partition.Strided(2), "merge": tw.pieces.merge.Mix(0.5), "seed": 3}
    assert tw.Strategy(exchange=Gossip(Ring(), AdaptThenCombine()), schedule=Every(4), **free).seed == 3
    assert tw.Strategy(exchange=Gossip(Ring(), Tracking()), schedule=Every(1), **free).seed == 3


class Unlike(Topology):
    """Replica 0 sends to 1, 2, 3, and 1 others in successive rounds; the others to it, or in one round to nobody."""

    one_way = False

    def edges(self, size, number=0, fragment=0, seed=0):
        found = np.zeros((size, size), dtype=bool)
        found[0, 1 : 1 + (1, 2, 3, 1)[number % 4]] = True
        return found if self.one_way and number % 4 == 3 else found | found.T

    def rounds(self, size):
        return 4


class OneWay(Unlike):
    one_way = True


def test_the_most_neighbours_of_any_round_are_found():
    once, twice = (Gossip(Unlike(), rule) for rule in (PushSum(), MGS(PushSum(), 2)))
    assert [once.most_targets(4, rank) for rank in (None, 0, 1, 3)] == [3, 3, 1, 1]
    assert [twice.most_targets(4, rank) for rank in (None, 0, 1, 3)] == [4, 4, 2, 1]  # rounds 2 and 3
    assert Gossip(RandomPairs(), AdaptThenCombine()).most_targets(4) == 1


def test_the_weights_of_every_round_are_checked():
    Gossip(Unlike(), AdaptThenCombine()).check_size(4)
    with pytest.raises(tw.ConfigurationError, match="add up to"):
        Gossip(OneWay(), AdaptThenCombine()).check_size(4)


def test_the_neighbours_of_a_round_are_those_of_its_gossip_steps():
    around = OnePeerExponential()
    once, twice = Gossip(around, AdaptThenCombine()), Gossip(around, MGS(PushSum(), 2))
    assert once.of_rounds == around and twice.of_rounds == Union(around, 2)
    assert [once.sources(Key(round=number, sender=0), 4) for number in range(3)] == [[3], [2], [3]]
    assert [twice.sources(Key(round=number, sender=0), 4) for number in range(3)] == [[3], [3], [3]]
    assert [gossip.most_targets(4) for gossip in (once, twice)] == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_graph_is_checked_for_the_strategys_seed(seed):
    drawn = ErdosRenyi(0.5)
    strategy = replace(tw.lab.recipes.d_psgd(topology=drawn), seed=seed)

    def attach(group: tw.Group) -> None:
        model = toy()
        tw.Replica(strategy, model, sgd(model), group).close()

    one_part = len(parts(drawn.edges(4, seed=seed))) == 1
    with nullcontext() if one_part else pytest.raises(tw.ConfigurationError, match="parts: no path leads"):
        tw.run_threads(4, attach)
