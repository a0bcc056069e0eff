"""Replicas of unequal speed: they agree on anchors, each inner step counts once, and no replica blocks another."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace

import pytest
import torch
from core_processes import run_world

import thinwire as tw
from thinwire.codecs import E3M0, Identity
from thinwire.comm import CountedGroup, Ledger, ThreadGroup, run_threads
from thinwire.drivers.handshake import digest
from thinwire.drivers.unequal.method import DECOUPLED, Decoupled, async_local_sgd, decoupled_diloco
from thinwire.drivers.unequal.rounds import Quorum
from thinwire.errors import ConfigurationError, DisagreementError, LinkError
from thinwire.pieces.merge import Keep
from thinwire.pieces.outer import Average, Nesterov
from thinwire.pieces.partition import Strided
from thinwire.pieces.schedule import Staggered
from thinwire.pieces.staleness import Alike, ByTokens
from thinwire.testing.toy import adamw, batch, inner_step, journey, same_bits, toy, weights

PLAIN = {"codec": Identity(), "down": Identity(), "feedback": None, "correct": None}


class Vector(torch.nn.Module):
    """A model of eight numbers, for a linear or a quadratic loss."""

    def __init__(self, start=0.0):
        super().__init__()
        self.x = torch.nn.Parameter(torch.full((8,), start))


def gradient_of(rank):
    return torch.randn(8, generator=torch.Generator().manual_seed(rank))


def one_step(model, optimizer, loss):
    optimizer.zero_grad()
    loss(model.x).backward()
    optimizer.step()


def patient(method):
    """The method with a patience that no busy machine exceeds."""
    return replace(method, patience=600.0)


def least_steps(steps, every, size=3):
    """The least sum of inner steps over all replicas in real time.

    A replica estimates each other one at most `every`·`size` steps ahead of its last report.
    """
    return size * steps - (size - 1) * every * size


def on_toy(method, steps, observe=lambda rank, event, step, **fields: None, before=lambda rank, step, model: None):
    """The body of a replica. It returns its final weights, its number of inner steps and the digest of its anchors."""

    def body(group):
        model = toy()
        optimizer = adamw(model)
        attached = patient(method).attach(
            model, optimizer, group, observer=lambda event, step, **fields: observe(group.rank, event, step, **fields)
        )
        try:
            while attached.progress < steps and not attached.stopping:
                optimizer.zero_grad()
                x, y = batch(0, group.rank, attached.step + 1)
                ((model(x) - y) ** 2).mean().backward()
                before(group.rank, attached.step + 1, model)
                optimizer.step()
            attached.finish()
        finally:
            attached.close()
        return weights(model), attached.step, digest(attached.anchors())

    return body


# ---- equal speeds


@pytest.mark.parametrize("delay", [0, 2])
def test_equal_speeds_give_the_bits_of_a_fixed_group(delay):
    """With a full quorum and no grace the rounds are those of `Keep` in a fixed group, at the same steps."""
    pieces = {"partition": Strided(2), "outer": Nesterov()}
    method = Decoupled(every=5, slow=(1, 1, 1), quorum=3, grace=0.0, delay=delay, **pieces, **PLAIN)
    ours = run_threads(3, on_toy(method, 23), timeout=600.0)
    fixed = journey(tw.Strategy(schedule=Staggered(5, delay), merge=Keep(), **pieces), 3, steps=23)
    assert [steps for _, steps, _ in ours] == [23] * 3
    assert all(same_bits(final, fixed[0].final) for final, _, _ in ours)


def test_one_replica_trains_as_its_inner_optimizer_alone():
    """A replica that averages with itself changes nothing when its own delta lands late."""
    method = Decoupled(every=4, slow=(1,), delay=3, **PLAIN)
    ((final, steps, _),) = run_threads(1, on_toy(method, 18), timeout=600.0)
    model = toy()
    optimizer = adamw(model)
    for step in range(1, 19):
        inner_step(model, optimizer, *batch(0, 0, step))
    assert steps == 18 and torch.allclose(final, weights(model), atol=1e-6)


# ---- virtual time


@pytest.mark.parametrize(
    "method",
    [
        decoupled_diloco(every=6, fragments=2, slow=(1, 2, 4)),
        decoupled_diloco(every=6, slow=(1, 2.5, 10), quorum=2, delay=4),
        async_local_sgd(every=6, updates=3, slow=(1, 2, 4)),
    ],
    ids=["fragments", "quorum", "async"],
)
def test_virtual_time_depends_on_speeds_and_seed_alone(method):
    first, again = (run_threads(3, on_toy(method, 40), timeout=600.0) for _ in range(2))
    assert all(same_bits(first[0][0], final) for final, _, _ in (*first, *again))
    taken = [steps for _, steps, _ in first]
    assert sum(taken) in range(118, 121) and taken == sorted(taken, reverse=True)
    assert taken[0] >= taken[1] * method.slow[1] - method.slow[1]


def _over_gloo(rank):
    group = tw.TorchGroup.from_world(replicas=3, timeout=600.0)
    virtual = on_toy(decoupled_diloco(every=6, slow=(1, 2, 4)), 30)(group)
    real = on_toy(decoupled_diloco(every=6, fragments=2), 30)(group)
    body = _dies_after(5) if rank == 2 else on_toy(decoupled_diloco(every=6), 30)
    return virtual, real, body(group)


def _dies_after(steps):
    """The body of a replica whose process ends after `steps` without `finish`."""

    def body(group):
        model = toy()
        optimizer = adamw(model)
        patient(decoupled_diloco(every=6)).attach(model, optimizer, group)
        for step in range(1, steps + 1):
            inner_step(model, optimizer, *batch(0, group.rank, step))

    return body


@pytest.mark.slow
def test_processes_over_gloo_have_the_bits_of_threads_and_survive_a_dead_one(tmp_path):
    """In virtual time the bits are those of threads. In real time all agree, and after a death the remaining two do."""
    threads = run_threads(3, on_toy(decoupled_diloco(every=6, slow=(1, 2, 4)), 30), timeout=600.0)
    told = run_world(_over_gloo, tmp_path, machines=({},) * 3)
    assert [one[0][2] for one in told] == [one[2] for one in threads]
    assert len({one[1][2] for one in told}) == 1
    assert sum(one[1][1] for one in told) >= least_steps(30, 6)
    (_, first, agreed), (_, second, other) = told[0][2], told[1][2]
    assert agreed == other
    assert first + second >= least_steps(30, 6) - 5  # the two take over the steps of the third


# ---- every inner step counts once


@pytest.mark.parametrize("coded", [False, True], ids=["fp32", "4 bits"])
@pytest.mark.parametrize(
    ("quorum", "grace", "delay", "slow"),
    [(1, 0.0, 0, (1, 2, 4)), (1, 0.5, 5, (1, 2, 4)), (3, 0.0, 3, (1, 3, 10)), (2, 0.5, 0, ())],
    ids=["async", "late", "all", "real time"],
)
def test_every_inner_step_counts_once(quorum, grace, delay, slow, coded):
    """Each replica has a constant gradient and equal weight: the anchor moves by all steps of all, less what codecs hold back."""
    pieces = {"codec": E3M0(4), "down": E3M0(4), "correct": None} if coded else PLAIN
    method = patient(
        Decoupled(every=7, outer=Average(), weigh=Alike(), quorum=quorum, grace=grace, delay=delay, slow=slow, **pieces)
    )
    departures = []

    def body(group):
        model = Vector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

        def observe(event, step, **fields):
            if event in ("depart", "refused", "warning"):
                departures.append((group.rank, event))

        attached = method.attach(model, optimizer, group, observer=observe)
        mine = gradient_of(group.rank)
        while attached.progress < 50:
            one_step(model, optimizer, lambda x: (x * mine).sum())
        attached.finish()
        held = attached._states[0].feedback.get("residual", torch.zeros(8))
        syncer = attached._host and attached._host.syncer.agreed[0].residual
        return attached.anchors()[0], attached.step, held, torch.zeros(8) if syncer is None else syncer

    told = run_threads(3, body, timeout=600.0)
    due = sum(0.125 * steps * gradient_of(rank) for rank, (_, steps, _, _) in enumerate(told)) / 3
    held = sum(one[2] for one in told) / 3 + told[0][3]
    assert torch.allclose(-told[0][0] + held, due, atol=1e-3), (told[0][0], due)
    assert bool(held.any()) == coded and {kind for _, kind in departures} <= {"depart"}
    assert len(departures) >= (12 if slow else 0)  # in real time so short a run may be over before the first round
    assert len({digest([one[0]]) for one in told}) == 1


def test_late_deltas_on_quadratics_reach_the_predicted_fixed_point():
    """Replica m descends towards c_m and contracts by ρ = 1 − lr·h per step.

    At the fixed point its delta, which lands τ of H steps late, is (a − c_m)·q with q = (1 − ρ^H)/(1 − ρ^H + ρ^(H−τ)),
    and the anchor is a = Σ w·q·c / Σ w·q.
    """
    method = Decoupled(every=14, delay=7, slow=(1, 2, 4), outer=Average(), weigh=ByTokens(0.0), quorum=3, **PLAIN)
    assert method.timeline(1).every == [24, 12, 6] and method.timeline(1).latency == 12
    rates, lr = (0.5, 1.0, 3.0), 0.05

    def body(group):
        model = Vector(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        attached = method.attach(model, optimizer, group)
        centre = gradient_of(group.rank)
        for _ in range(attached.strategy.timeline(1).every[group.rank] * 40):
            one_step(model, optimizer, lambda x: rates[group.rank] / 2 * (x - centre).square().sum())
        anchor = attached.anchors()[0]
        attached.finish()
        return anchor

    found = run_threads(3, body, timeout=600.0)
    due, total = torch.zeros(8), 0.0
    for rank, steps in enumerate((24, 12, 6)):
        rho = 1 - lr * rates[rank]
        q = (1 - rho**steps) / (1 - rho**steps + rho ** (steps - steps // 2))
        due += steps * q * gradient_of(rank)
        total += steps * q
    assert torch.allclose(found[0], due / total, atol=1e-4), (found[0], due / total)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ---- frozen and faulty replicas


def test_a_frozen_replica_blocks_no_other_and_has_the_agreed_weights_when_it_thaws(monkeypatch):
    """In real time, replica 2 freezes after 3 inner steps until the others have finished. Only it counts as late."""
    finished, warnings = threading.Semaphore(0), []
    monkeypatch.setattr(Quorum, "overdue", lambda _, rank, since: since + (0.0 if rank == 2 else 600.0))

    def freeze(rank, step, model):
        if rank == 2 and step == 4:
            finished.acquire()
            finished.acquire()

    def observe(rank, event, step, **fields):
        if event == "warning":
            warnings.append((rank, fields["message"]))

    def body(group):
        told = on_toy(decoupled_diloco(every=5), 30, observe, freeze)(group)
        finished.release()
        return told

    first, second, frozen = run_threads(3, body, timeout=600.0)
    assert first[2] == second[2] == frozen[2] and frozen[1] <= 5
    assert first[1] + second[1] >= least_steps(30, 5) - 5
    ((rank, message),) = warnings
    assert rank == 0 and message.startswith("replica 2 was lost, the others continue")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("slow", [(1, 2, 4), ()], ids=["virtual", "real"])
def test_a_delta_that_is_not_finite_is_refused(slow, rank):
    refused = []

    def poison(own, step, model):
        if own == rank and step == 4:
            next(model.parameters()).grad.fill_(math.nan)

    def observe(own, event, step, **fields):
        if event == "refused":
            refused.append((own, fields["by"]))

    told = run_threads(3, on_toy(decoupled_diloco(every=6, slow=slow), 30, observe, poison), timeout=600.0)
    assert all(torch.isfinite(final).all() for final, _, _ in told) and len({one[2] for one in told}) == 1
    assert refused == [(0, [rank])]


def test_a_stop_request_on_one_replica_stops_all():
    def ask(rank, step, model):
        if rank == 1 and step == 8:
            asked[rank].request_stop()

    asked = {}

    def body(group):
        model = toy()
        optimizer = adamw(model)
        asked[group.rank] = attached = patient(decoupled_diloco(every=5)).attach(model, optimizer, group)
        while not attached.stopping:
            ask(group.rank, attached.step + 1, model)
            inner_step(model, optimizer, *batch(0, group.rank, attached.step + 1))
        attached.close()
        return attached.step

    assert min(run_threads(3, body, timeout=600.0)) > 0


def test_the_loss_of_the_syncers_replica_is_an_error():
    """The other replica raises a link error instead of waiting."""

    def body(group):
        if group.rank == 0:
            model = toy()
            patient(decoupled_diloco(every=5)).attach(model, adamw(model), group).close()
            return None
        with pytest.raises(LinkError, match="syncer on replica 0"):
            on_toy(decoupled_diloco(every=5), 1000)(group)
        return None

    run_threads(2, body, timeout=600.0)


# ---- on the wire


def test_predicted_bytes_equal_sent_bytes():
    """Law 5 in both directions: 4 bits up, 4 bits down, and notes."""
    method, ledgers = decoupled_diloco(every=6, slow=(1, 1, 1)), [Ledger() for _ in range(3)]
    run_threads(3, lambda group: on_toy(method, 24)(CountedGroup(group, ledgers[group.rank])), timeout=600.0)
    numel = sum(p.numel() for p in toy().parameters() if p.requires_grad)
    up, down = (method.nbytes_per_period(numel, 3, rank) for rank in (1, 0))
    assert up == 48 + 32 + E3M0().nbytes(numel)
    ends = 2 * 2 * (48 + 8 + 3 * 17)  # to each of the two others: a replica has finished, and the run is over
    assert ledgers[1].sent("packet") == 4 * up + 48 + 32
    assert ledgers[0].sent("packet") == 4 * down + ends


def test_different_strategies_are_refused():
    def body(group):
        with pytest.raises(DisagreementError, match="strategy"):
            decoupled_diloco(every=5 + group.rank).attach(model := toy(), adamw(model), group)

    run_threads(2, body, timeout=600.0)
    group = ThreadGroup.create(2)[0]
    with pytest.raises(ConfigurationError, match="one factor for each"):
        DECOUPLED["decoupled_diloco"](slow=(1.0,)).attach(model := toy(), adamw(model), group)


# ---- checkpoints


@pytest.mark.parametrize("slow", [(1, 2, 4), ()], ids=["virtual", "real"])
@pytest.mark.parametrize("delay", [0, 5])
def test_a_resumed_run_counts_each_step_once(slow, delay):
    """The checkpoints are taken at different times with deltas in flight. Anchors and each replica's own steps continue."""
    method = Decoupled(
        every=7, outer=Average(), weigh=Alike(), slow=slow, delay=delay if slow else 0, feedback=None,
        correct=None, codec=Identity(), down=Identity(),
    )  # fmt: skip

    def train(attached, model, optimizer, steps):
        mine = gradient_of(attached.group.rank)
        while attached.progress < steps:
            one_step(model, optimizer, lambda x: (x * mine).sum())

    def begin(group):
        model = Vector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        attached = method.attach(model, optimizer, group)
        train(attached, model, optimizer, 30)
        tensors, facts = attached.state()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
        saved = model.x.detach().clone(), attached.step
        attached.finish()
        return *kept, *saved

    begun = run_threads(3, begin, timeout=600.0)

    def go_on(group):
        tensors, facts, x, _ = begun[group.rank]
        model = Vector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        attached = method.attach(model, optimizer, group)
        with torch.no_grad():
            model.x.copy_(x)
        attached.load_state(tensors, facts)
        train(attached, model, optimizer, 60)
        attached.finish()
        return attached.anchors()[0], attached.step

    told = run_threads(3, go_on, timeout=600.0)
    assert len({digest([anchor]) for anchor, _ in told}) == 1
    assert sum(steps for _, steps in told) in (range(170, 200) if slow else range(least_steps(60, 7), 10**9))
    due = sum(0.125 * steps * gradient_of(rank) for rank, (_, steps) in enumerate(told)) / 3
    if slow:  # in real time the syncer may have counted steps that the checkpoint of another replica does not have yet
        assert torch.allclose(-told[0][0], due, atol=1e-3), (told[0][0], due)
