"""Neighbours that meet two at a time: the papers' constants and numbers, what is conserved at every event, and the same bits on any carrier."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_processes import run_world

import thinwire as tw
from thinwire.codecs import E3M0, Identity, RandomK
from thinwire.comm import CountedGroup, Ledger, ThreadGroup, run_threads
from thinwire.decoupled.pair_composition import Mixing
from thinwire.decoupled.pairs import AcceleratedPairs, Pairs, a2cid2, ad_psgd
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.pieces.partition import BySize
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.topology import Clocks, Complete, Exponential, Listed, RandomPairs, Ring, meeting_rates, resistances


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_of(x):
    return float((x - x.mean(0)).square().sum(1).mean())


class Play:
    """All replicas in one place, in fp64, by the driver's own `Mixing` and `Clocks`: x, x̃ and when each flowed last."""

    def __init__(self, mixing, x):
        self.mixing, self.x, self.ahead, self.at = mixing, x.clone(), x.clone(), [0.0] * len(x)
        self.start, self.common = x[0].clone(), {}

    def flow(self, one, at):
        if self.mixing.eta:
            self.x[one], self.ahead[one] = self.mixing.flowed(self.x[one], self.ahead[one], at - self.at[one])
        self.at[one] = at

    def meet(self, one, other, at, coded=None):
        """With `coded` each says what that makes of the difference to what both know, which begins with replica 0's start."""
        self.flow(one, at)
        self.flow(other, at)
        said = [self.x[one].clone(), self.x[other].clone()]
        if coded:
            known = self.common.setdefault((one, other), self.start.clone())
            said = [coded(x - known, rank) for x, rank in zip(said, (one, other))]
            known.add_(said[0] + said[1], alpha=0.5)
        for rank, own, theirs in ((one, *said), (other, *said[::-1])):
            self.x[rank], self.ahead[rank] = self.mixing.met(self.x[rank], self.ahead[rank], own, theirs)

    def step(self, one, at, update):
        self.flow(one, at)
        self.x[one] += update
        self.ahead[one] += update

    @property
    def kept(self):
        return (self.x if not self.mixing.eta else (self.x + self.ahead) / 2).sum(0)


def by(codec, key):
    """What arrives of a vector."""

    def coded(x, rank):
        packet, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.zeros_like(x)
        codec.encode(x, packet, replace(key, sender=rank))
        codec.decode_add(packet, out, replace(key, sender=rank))
        return out

    return coded


# ---- constants


def test_constants_are_the_papers():
    """§a.2: rings of 16 and 64 with one meeting a replica and step; on the complete graph χ₁ = χ₂, and nothing to gain."""
    for size, due in ((16, (13.137, 0.9375, 0.1425, 1.872)), (64, (207.67, 0.984, 0.0350, 7.262))):
        chi1, chi2 = resistances(meeting_rates(Ring(), size, 1.0))
        mixing = a2cid2().mixing(size)
        assert (chi1, chi2, mixing.eta, mixing.pull) == tuple(pytest.approx(one, rel=2e-3) for one in due)
    chi1, chi2 = resistances(meeting_rates(Complete(), 8, 1.0))
    assert chi1 == pytest.approx(7 / 8) and chi2 == pytest.approx(chi1)
    assert a2cid2(topology=Complete()).mixing(8).pull == pytest.approx(0.5)
    assert ad_psgd().mixing(8) == Mixing(eta=0.0, pull=0.5)
    barbell = Listed(((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3)))
    even, fitted = (a2cid2(topology=barbell, rates=rates) for rates in ("even", "fitted"))
    assert fitted.clocks(6).rates.sum() == pytest.approx(even.clocks(6).rates.sum())
    assert fitted.mixing(6).eta > 1.2 * even.mixing(6).eta
    # Half of the meetings, half of the speed: η follows, α̃ does not.
    assert a2cid2(every=2).mixing(16) == Mixing(pytest.approx(0.14247 / 2, rel=1e-3), pytest.approx(1.8717, rel=1e-3))


def test_clocks_are_poisson_and_anyone_can_read_them():
    """As often as their rates say, with the variance of Poisson's law; a unit is the same whoever asks, and other seeds and fragments differ."""
    clocks = Clocks(meeting_rates(Listed(((0, 1), (1, 2), (2, 3), (3, 0), (0, 2))), 4, 1.0), fragments=2, seed=3)
    units = [clocks.within(unit) for unit in range(2000)]
    counts = np.array([len(unit) for unit in units])
    assert counts.mean() == pytest.approx(4.0, rel=0.05) and counts.var() == pytest.approx(4.0, rel=0.1)
    edges = [(one.one, one.other) for unit in units for one in unit]
    assert {edge: round(edges.count(edge) / len(edges), 1) for edge in set(edges)} == dict.fromkeys(
        [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)], 0.2
    )
    for number, unit in enumerate(units):
        assert [one.at for one in unit] == sorted(one.at for one in unit)
        assert all(number <= one.at < number + 1 for one in unit)
    assert Clocks(clocks.rates, 2, 3).within(7) == units[7] != Clocks(clocks.rates, 2, 4).within(7)
    assert {one.fragment for unit in units for one in unit} == {0, 1}


# ---- numbers


@pytest.mark.parametrize(
    ("size", "until", "plain", "accelerated"), [(16, 200, 2.6e-6, 2.2e-16), (64, 400, 0.22, 1.4e-9)]
)
def test_momentum_brings_a_ring_together(size, until, plain, accelerated):
    """§a.2, pure gossip from a variance of 45; to a factor of 30, for one draw. Σx, and Σ(x + x̃), at every event."""
    x = normal(size, 8) * math.sqrt(45 / 8)
    ends = []
    for method in (ad_psgd(), a2cid2()):
        clocks, play = method.clocks(size), Play(method.mixing(size), x)
        begun = play.kept
        for unit in range(until):
            for meeting in clocks.within(unit):
                play.meet(meeting.one, meeting.other, meeting.at)
                assert float((play.kept - begun).abs().max()) < 1e-11
        for one in range(size):
            play.flow(one, float(until))
        ends.append(spread_of(play.x))
    assert plain / 30 < ends[0] < plain * 30
    assert ends[1] < accelerated * 30


def test_momentum_is_worth_twice_the_meetings():
    """§a.2: unlike quadratics on a ring of 16, lr 0.01: 0.146 without, 0.0427 with momentum, 0.0462 with twice the meetings. What
    the gradients added is conserved to rounding.
    """
    size, lr = 16, 0.01
    centers = normal(size, 10, seed=1) * 3

    def stationary(mixing, rate, until=800):
        clocks, play, seen = Clocks(meeting_rates(Ring(), size, rate)), Play(mixing, torch.zeros_like(centers)), []
        total = torch.zeros(10, dtype=torch.float64)
        for unit in range(until):
            for meeting in clocks.within(unit):
                play.meet(meeting.one, meeting.other, meeting.at)
            for one in range(size):
                play.flow(one, unit + 1.0)
                update = -lr * (play.x[one] - centers[one])
                play.step(one, unit + 1.0, update)
                total += update
            if unit > until // 2:
                seen.append(spread_of(play.x))
        assert float((play.kept - total).abs().max()) < 1e-10
        assert float((play.x.mean(0) - centers.mean(0)).norm()) < 0.05
        return float(np.mean(seen))

    plain, accelerated, twice = (
        stationary(ad_psgd().mixing(size), 1.0),
        stationary(a2cid2().mixing(size), 1.0),
        stationary(ad_psgd().mixing(size), 2.0),
    )
    assert accelerated / plain == pytest.approx(0.0427 / 0.146, rel=0.2)
    assert twice / plain == pytest.approx(0.0462 / 0.146, rel=0.2)


@pytest.mark.parametrize("method", [ad_psgd(), a2cid2()], ids=["ad_psgd", "a2cid2"])
def test_differences_in_four_bits_bring_a_ring_together_as_whole_weights_do(method):
    """To what both said before: the distance shrinks as without a codec. Four bits of x itself stall. Σx stays, whatever is lost."""
    size, until, codec = 8, 60, E3M0()
    meetings = [one for unit in range(until) for one in method.clocks(size).within(unit)]

    def gossip(how):
        play = Play(method.mixing(size), normal(size, 32).float())
        begun = play.kept
        for number, at in enumerate(meetings):
            if how == "itself":
                play.start, play.common = torch.zeros(32), {}
            play.meet(at.one, at.other, at.at, None if how == "whole" else by(codec, Key(round=number)))
        torch.testing.assert_close(play.kept, begun, atol=2e-5, rtol=0)
        return spread_of(play.x)

    whole, difference, itself = (gossip(how) for how in ("whole", "difference", "itself"))
    assert difference < max(10 * whole, 1e-9) and itself > 1e-2 > 100 * difference


# ---- on replicas


class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.y = torch.nn.Parameter(torch.full((3,), 0.5))


def center(rank):
    return torch.randn(9, generator=torch.Generator().manual_seed(rank))


def train(replica, until, each=lambda replica: None):
    """Towards a centre of its own, by SGD, until so many inner steps in the mean over all."""
    model = replica.model
    while replica.progress < until and not replica.stopping:
        each(replica)
        apart = torch.cat([model.x, model.y]) - center(replica.group.rank)
        replica.optimizer.zero_grad()
        (apart.square().sum() / 2).backward()
        replica.optimizer.step()
    return torch.cat([model.x, model.y]).detach().clone()


def attached(method, group, **more):
    model = Vector()
    return method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), group, **more)


def run(method, until=12, each=lambda replica: None):
    """Own weights before the end and after, and steps."""

    def body(group):
        replica = attached(method, group)
        own = train(replica, until, each)
        replica.finish()
        return own, torch.cat([replica.model.x, replica.model.y]).detach(), replica.step

    return body


SLOW = (1.0, 2.0, 1.5, 1.0)
UNEQUAL = {
    "ad_psgd": Pairs(partition=BySize(2), slow=SLOW, seed=1),
    "a2cid2": AcceleratedPairs(partition=BySize(2), slow=SLOW, seed=1),
    "a2cid2 in four bits": AcceleratedPairs(partition=BySize(2), slow=SLOW, seed=1, codec=E3M0()),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_replicas_do_what_the_equations_say(name):
    """Unequal speeds, two fragments: bit for bit what one loop over all events makes of it, with gradients from before the meetings."""
    method, size, until = UNEQUAL[name], 4, 12
    ours = run_threads(size, run(method, until), timeout=600.0)
    times = [method.step_time(rank, size) for rank in range(size)]
    assert sum(1 / one for one in times) / size == pytest.approx(1)
    numels = [fragment.numel for fragment in method.partition.fragments(Vector())]
    spans = [slice(sum(numels[:place]), sum(numels[: place + 1])) for place in range(len(numels))]
    order = [name for fragment in method.partition.fragments(Vector()) for name, _ in fragment.parameters]
    there = torch.tensor([i for name in order for i in (range(6) if name == "x" else range(6, 9))])
    start = torch.cat([torch.linspace(-1, 1, 6), torch.full((3,), 0.5)])[there]
    plays = [Play(method.mixing(size), start[span].expand(size, -1).float()) for span in spans]
    begun, trained = torch.cat([play.kept for play in plays]), torch.zeros(9)
    over = [next(k for k in range(99) if method.progress(rank, size, k) >= until) for rank in range(size)]
    assert [steps for _, _, steps in ours] == over and len(set(over)) > 1
    events = [(meeting.at, 0, meeting) for unit in range(99) for meeting in method.clocks(size, 2).within(unit)]
    events += [((k + 1) * times[rank], 1, (rank, k)) for rank in range(size) for k in range(over[rank])]
    gradients = {rank: start - center(rank)[there] for rank in range(size)}
    missed = set()
    for at, kind, what in sorted(events, key=lambda event: event[:2]):
        if kind == 0:
            ends = (what.one, what.other)
            there_still = [rank for rank in ends if at <= over[rank] * times[rank]]
            if len(there_still) == 2:
                key = Key(1, what.fragment, what.unit, 0, what.number)
                coded = by(method.codec, key) if method.codec != Identity() else None
                plays[what.fragment].meet(what.one, what.other, at, coded)
            elif there_still and ends not in missed:  # it flowed before it heard that the other one has ended
                plays[what.fragment].flow(*there_still, at)
                missed.add(ends)
        else:
            rank, _ = what
            for play, span in zip(plays, spans):
                play.flow(rank, at)
                before = play.x[rank].clone()
                play.x[rank] = before.add(gradients[rank][span], alpha=-0.1)
                play.ahead[rank] += play.x[rank] - before
            trained -= 0.1 * gradients[rank]
            gradients[rank] = torch.cat([play.x[rank] for play in plays]) - center(rank)[there]
    for rank, (own, final, _) in enumerate(ours):
        assert same_bits(own[there], torch.cat([play.x[rank] for play in plays])), rank
        assert same_bits(final, ours[0][1])
    # Nothing is lost: all end with the start and what all gradients have added.
    torch.testing.assert_close(ours[0][1][there] * size, begun + trained, atol=5e-5, rtol=0)


def _over_gloo(rank):
    group = tw.TorchGroup.from_world(replicas=4, timeout=600.0)
    return [run(method)(group) for method in UNEQUAL.values()]


@pytest.mark.slow
def test_processes_are_threads(tmp_path):
    told = run_world(_over_gloo, tmp_path, machines=({},) * 4)
    for place, method in enumerate(UNEQUAL.values()):
        threads = run_threads(4, run(method), timeout=600.0)
        for ours, theirs in zip(threads, told):
            assert all(same_bits(one, other) for one, other in zip(ours[:2], theirs[place][:2]))


def test_bytes_are_those_of_the_meetings():
    """48 bytes and x in its codec from each of two that meet, a word to each neighbour and the mean at the end; on average once in H steps."""
    method, size, steps = a2cid2(every=2, codec=E3M0()), 4, 40
    ledgers = [Ledger() for _ in range(size)]

    def body(group):
        return run(method, steps)(CountedGroup(group, ledgers[group.rank]))

    run_threads(size, body, timeout=600.0)
    meetings = [one for unit in range(steps) for one in method.clocks(size).within(unit)]
    for rank, ledger in enumerate(ledgers):
        own = sum(rank in (one.one, one.other) for one in meetings)
        assert ledger.sent("packet") == own * method.nbytes_per_period(9, size) + 2 * 48
    assert 2 * len(meetings) / size == pytest.approx(steps / method.every, rel=0.3)
    assert method.nbytes_per_period(9, size=1) == 0


def test_a_stop_spreads_and_what_is_resumed_was_never_stopped():
    """All stop after the same step; from there, with x̃, what pairs know of each other and the meetings that are due, to the same bits."""
    method, size = AcceleratedPairs(topology=Ring(), seed=5, codec=E3M0()), 6

    def body(group):
        def ask(replica):
            if replica.step == 3 and group.rank == 2:
                replica.request_stop()

        first = attached(method, group)
        train(first, 40, ask)
        first.close()
        tensors, facts = first.state()
        again = attached(method, group)
        again.model.load_state_dict(first.model.state_dict())
        again.load_state(tensors, facts)
        train(again, 40)
        again.finish()
        return first.step, torch.cat([again.model.x, again.model.y]).detach()

    resumed = run_threads(size, body, timeout=600.0)
    whole = run_threads(size, run(method, 40), timeout=600.0)
    assert len({steps for steps, _ in resumed}) == 1 and 3 <= resumed[0][0] < 40
    assert all(same_bits(final, other) for (_, final), (_, other, _) in zip(resumed, whole))


def test_a_step_that_is_not_finite_is_taken_back():
    """The others never hear of it; what a user writes into the weights that is not finite ends the run."""

    def poisoned(method):
        def body(group):
            heard = []
            model = Vector()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if group.rank == 1:
                model.x.register_hook(lambda g: g * torch.nan if replica.step == 4 else g)
            replica = method.attach(
                model, optimizer, group, observer=lambda event, step, **fields: heard.append((event, step))
            )
            own = train(replica, 20)
            replica.finish()
            return own, [step for event, step in heard if event == "warning"]

        return body

    for method in (ad_psgd(), a2cid2()):
        ends = run_threads(4, poisoned(method), timeout=600.0)
        assert all(bool(torch.isfinite(own).all()) for own, _ in ends)
        assert [warned for _, warned in ends] == [[], [5], [], []]
    with pytest.raises(NonFiniteError, match="they must not be sent"):
        run_threads(2, run(ad_psgd(), 20, lambda replica: replica.model.x.data.fill_(torch.nan)), timeout=600.0)


def test_one_replica_is_its_inner_optimizer():
    ((own, final, steps),) = run_threads(1, run(a2cid2()), timeout=600.0)
    model = Vector()
    x = torch.cat([model.x, model.y]).detach()
    for _ in range(12):
        x = x - 0.1 * (x - center(0))
    assert steps == 12 and same_bits(own, final)
    torch.testing.assert_close(own, x)


@pytest.mark.parametrize(
    ("make", "size", "said"),
    [
        (lambda: ad_psgd(every=0), 4, "at least 1 inner step between two meetings"),
        (lambda: ad_psgd(slow=(1.0, 0.0)), 2, "factors above 0"),
        (lambda: ad_psgd(slow=(1.0, 2.0)), 4, "for 4 replicas: one factor for each"),
        (lambda: a2cid2(topology=RandomPairs()), 4, "a graph with the same edges in every round"),
        (lambda: a2cid2(topology=Exponential()), 8, "replica 0 sends to 1, which does not send to 0"),
        (
            lambda: ad_psgd(topology=Listed(((0, 1), (2, 3)))),
            4,
            "in 2 parts: no path leads from replica 0 to replica 2",
        ),
        (lambda: ad_psgd(topology="ring"), 4, "a piece of this kind"),
        (lambda: ad_psgd(rates="best"), 4, "even or fitted is needed"),
        (lambda: a2cid2(codec=RandomK(0.1)), 4, "a contractive codec of fixed size"),
    ],
    ids=range(9),
)
def test_what_cannot_work_is_refused_before_anything_is_trained(make, size, said):
    with pytest.raises(ConfigurationError, match=said):
        attached(make(), ThreadGroup.create(size)[0])
