"""Pairwise averaging (AD-PSGD, A2CiD2) on replicas: equal bits over threads and gloo, bytes, stops, and refusals."""

from __future__ import annotations

import pytest
import torch
from core_processes import run_world
from pairwise_reference import ReferenceRun, coded_by

import thinwire as tw
from thinwire.codecs import E3M0, Identity, RandomK
from thinwire.comm import CountedGroup, Ledger, ThreadGroup, run_threads
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.lab.pairs.method import AcceleratedPairs, Pairs, a2cid2, ad_psgd
from thinwire.lab.topology import Clocks, Exponential, Listed, PairEvent, RandomPairs, Ring
from thinwire.pieces.partition import BySize
from thinwire.rng import Key
from thinwire.testing.toy import same_bits


class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.y = torch.nn.Parameter(torch.full((3,), 0.5))


def center(rank):
    return torch.randn(9, generator=torch.Generator().manual_seed(rank))


def train(replica, until, each=lambda replica: None):
    """Train with SGD towards this replica's own centre until the mean progress of all replicas is `until` inner steps."""
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
    """The body of a replica. It returns its weights before `finish`, its weights after it, and its number of steps."""

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
def test_replicas_have_the_bits_of_a_reference_loop_over_all_events(name):
    """Unequal speeds, two fragments. The reference takes each gradient at the weights before the meetings, as a replica does."""
    method, size, until = UNEQUAL[name], 4, 12
    ours = run_threads(size, run(method, until), timeout=600.0)
    times = [method.step_time(rank, size) for rank in range(size)]
    assert sum(1 / one for one in times) / size == pytest.approx(1)
    numels = [fragment.numel for fragment in method.partition.fragments(Vector())]
    spans = [slice(sum(numels[:place]), sum(numels[: place + 1])) for place in range(len(numels))]
    order = [name for fragment in method.partition.fragments(Vector()) for name, _ in fragment.parameters]
    there = torch.tensor([i for name in order for i in (range(6) if name == "x" else range(6, 9))])
    start = torch.cat([torch.linspace(-1, 1, 6), torch.full((3,), 0.5)])[there]
    references = [ReferenceRun(method.mixing(size), start[span].expand(size, -1).float()) for span in spans]
    begun, trained = torch.cat([reference.kept for reference in references]), torch.zeros(9)
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
                coded = coded_by(method.codec, key) if method.codec != Identity() else None
                references[what.fragment].meet(what.one, what.other, at, coded)
            elif there_still and ends not in missed:  # its momentum flowed before it learned that the other has ended
                references[what.fragment].flow(*there_still, at)
                missed.add(ends)
        else:
            rank, _ = what
            for reference, span in zip(references, spans):
                reference.flow(rank, at)
                before = reference.x[rank].clone()
                reference.x[rank] = before.add(gradients[rank][span], alpha=-0.1)
                reference.ahead[rank] += reference.x[rank] - before
            trained -= 0.1 * gradients[rank]
            gradients[rank] = torch.cat([reference.x[rank] for reference in references]) - center(rank)[there]
    for rank, (own, final, _) in enumerate(ours):
        assert same_bits(own[there], torch.cat([reference.x[rank] for reference in references])), rank
        assert same_bits(final, ours[0][1])
    # The final sum is the initial sum plus all gradient steps.
    torch.testing.assert_close(ours[0][1][there] * size, begun + trained, atol=5e-5, rtol=0)


def _over_gloo(rank):
    group = tw.TorchGroup.from_world(replicas=4, timeout=600.0)
    return [run(method)(group) for method in UNEQUAL.values()]


@pytest.mark.slow
def test_processes_over_gloo_have_the_bits_of_threads(tmp_path):
    told = run_world(_over_gloo, tmp_path, machines=({},) * 4)
    for place, method in enumerate(UNEQUAL.values()):
        threads = run_threads(4, run(method), timeout=600.0)
        for ours, theirs in zip(threads, told):
            assert all(same_bits(one, other) for one, other in zip(ours[:2], theirs[place][:2]))


def test_predicted_bytes_equal_sent_bytes():
    """A meeting sends a header of 48 bytes and the coded x in each direction. The end sends a packet to each neighbour and the mean."""
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


def test_a_stop_reaches_all_and_a_resumed_run_has_the_bits_of_an_uninterrupted_one():
    """All replicas stop after the same step. The state holds x̃, the common values of pairs and the next meetings."""
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


def test_a_step_that_is_not_finite_is_undone_with_a_warning():
    """The other replicas are not affected. Weights that the user sets to NaN end the run."""

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


def test_one_replica_trains_as_its_inner_optimizer_alone():
    ((own, final, steps),) = run_threads(1, run(a2cid2()), timeout=600.0)
    model = Vector()
    x = torch.cat([model.x, model.y]).detach()
    for _ in range(12):
        x = x - 0.1 * (x - center(0))
    assert steps == 12 and same_bits(own, final)
    torch.testing.assert_close(own, x)


def test_a_meeting_at_the_very_end_of_an_inner_step_is_held_once(monkeypatch):
    """Where k·slow + slow and (k + 1)·slow are not the same number, no meeting between them may count twice, or not at all."""
    method, flights = Pairs(slow=(1.0, 3.0)), []
    took = method.step_time(0, 2)
    step = next(k for k in range(99) if k * took + took != (k + 1) * took)
    at = max(step * took + took, (step + 1) * took)
    meeting = PairEvent(at, int(at), 0, 0, 0, 1)
    monkeypatch.setattr(Clocks, "within", lambda _, unit: [meeting] if unit == meeting.unit else [])

    def body(group):
        replica = attached(method, group, observer=lambda event, *_, **__: flights.append((group.rank, event)))
        train(replica, at + 4)
        replica.finish()

    monkeypatch.setattr("thinwire.lab.pairs.driver.Pairing._spread", lambda self, unit: unit + 1)
    run_threads(2, body, timeout=600.0)
    assert [flights.count((rank, "flight")) for rank in range(2)] == [1, 1]


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
        (lambda: ad_psgd(topology="ring"), 4, "a Topology is needed"),
        (lambda: ad_psgd(rates="best"), 4, "even or fitted is needed"),
        (lambda: a2cid2(codec=RandomK(0.1)), 4, "a contractive codec of fixed size"),
    ],
    ids=range(9),
)
def test_invalid_settings_are_refused_before_training(make, size, said):
    with pytest.raises(ConfigurationError, match=said):
        attached(make(), ThreadGroup.create(size)[0])
