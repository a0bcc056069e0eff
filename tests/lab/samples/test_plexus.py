"""Plexus in training: equal to its equations over threads and gloo, with outer momentum, and with a killed process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from core_processes import run_world

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger, run_threads
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.lab.samples.method import Plexus, plexus
from thinwire.lab.samples.peer_view import PeerView
from thinwire.pieces.outer import Nesterov
from thinwire.testing.toy import batch, same_bits, toy, weights

EVERY, STEPS, SIZE = 4, 24, 6


def trainable(model):
    return [one for one in model.parameters() if one.requires_grad]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def inner(model, optimizer, rank, step):
    optimizer.zero_grad()
    x, y = batch(0, rank, step)
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()


def on_toy(method, steps=STEPS, before=lambda rank, step: None):
    """The body of a replica. It returns its final weights, the steps that it trained and its warnings."""

    def body(group):
        model, told, own = toy(), [], []
        optimizer = sgd(model)
        observe = lambda event, step, **fields: told.append(fields.get("message"))  # noqa: E731
        trained = method.attach(model, optimizer, group, observer=observe)
        try:
            while trained.progress < steps and not trained.stopping:
                if trained.idle:
                    trained.skip()
                    continue
                before(group.rank, trained.step + 1)
                own.append(trained.step + 1)
                inner(model, optimizer, group.rank, trained.step + 1)
            trained.finish()
        finally:
            trained.close()
        return weights(model), own, [one for one in told if one]

    return body


def reference_anchor(method, size, steps=STEPS):
    """The final anchor of a reference in one thread: each round takes the outer step on the mean delta of its sample."""
    model, outer, view = toy(), Nesterov(method.outer_lr, method.outer_momentum), PeerView.of(range(size))
    anchor = weights(model).double()
    state = outer.init(anchor)
    for k in range(steps // method.every):
        deltas = []
        for rank in view.order(k + 1, 10**6)[: method.sample]:
            torch.nn.utils.vector_to_parameters(anchor.float(), trainable(model))
            optimizer = sgd(model)
            for step in range(k * method.every, (k + 1) * method.every):
                inner(model, optimizer, rank, step + 1)
            deltas.append(anchor - weights(model).double())
        anchor, state = outer.step(anchor, torch.stack(deltas).mean(0), state)
    return anchor


@pytest.mark.parametrize(
    "method",
    [
        plexus(every=EVERY, sample=3, outer_lr=0.7, outer_momentum=0.5, patience=600.0, ping_timeout=600.0),
        plexus(every=EVERY, sample=2, aggregators=2, outer_momentum=0.0, patience=600.0, ping_timeout=600.0),
    ],
    ids=["momentum", "two aggregators"],
)
def test_all_replicas_end_with_the_anchor_of_the_reference(method):
    ledgers = [Ledger() for _ in range(SIZE)]
    told = run_threads(SIZE, lambda group: on_toy(method)(CountedGroup(group, ledgers[group.rank])), timeout=600.0)
    assert all(same_bits(one[0], told[0][0]) for one in told)
    torch.testing.assert_close(told[0][0].double(), reference_anchor(method, SIZE), rtol=1e-5, atol=1e-6)
    assert sum(len(one[1]) for one in told) == method.sample * STEPS
    again = run_threads(SIZE, on_toy(method), timeout=600.0)
    assert same_bits(again[0][0], told[0][0])


def test_a_run_of_one_replica_may_end_within_a_round():
    method = plexus(every=EVERY, sample=1)
    ((final, own, _),) = run_threads(1, on_toy(method, EVERY + 1), timeout=600.0)
    assert own == list(range(1, EVERY + 2)) and bool(torch.isfinite(final).all())


METHOD = plexus(every=EVERY, sample=3, outer_momentum=0.5, patience=600.0, ping_timeout=600.0)


VICTIM = PeerView.of(range(SIZE)).order(3, 10**6)[0]


def _in_processes(rank):
    """A complete run, then a run in which the first participant of round 3 is killed during that round."""

    def die(own, step):
        if own == VICTIM and step == 2 * EVERY + 2:
            torch.save(whole, folder / f"{rank}.pt")
            os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(os.environ["PLEXUS_FOLDER"])
    group = tw.TorchGroup.from_world(replicas=SIZE, timeout=600.0)
    whole = on_toy(METHOD)(group)
    return whole, on_toy(METHOD, before=die)(group)


@pytest.mark.slow
def test_processes_over_gloo_have_the_bits_of_threads_and_survive_a_killed_one(tmp_path):
    threads = run_threads(SIZE, on_toy(METHOD), timeout=600.0)
    told = run_world(_in_processes, tmp_path, machines=({"PLEXUS_FOLDER": str(tmp_path)},) * SIZE)
    whole = [one if rank == VICTIM else one[0] for rank, one in enumerate(told)]
    assert all(same_bits(one[0], threads[0][0]) for one in whole)
    left = [one[1] for rank, one in enumerate(told) if rank != VICTIM]
    assert all(same_bits(one[0], left[0][0]) for one in left) and bool(torch.isfinite(left[0][0]).all())
    assert sum(len(one[1]) for one in left) >= 3 * STEPS - 3 * EVERY
    assert any(f"replica {VICTIM} was lost" in message for one in left for message in one[2])


def test_invalid_settings_and_resumes_are_refused():
    for wrong in ({"every": 0}, {"sample": 0}, {"aggregators": 0}, {"patience": 0.0}, {"outer_lr": 0.0}):
        with pytest.raises(ConfigurationError, match="needed"):
            plexus(**wrong)

    def too_many(group):
        model = toy()
        with pytest.raises(ConfigurationError, match="sample=2 of 1"):
            Plexus().attach(model, sgd(model), group)
        trained = Plexus(sample=1).attach(model, sgd(model), group)
        with pytest.raises(CheckpointError, match="cannot be resumed"):
            trained.load_state(*trained.state())
        trained.finish()

    run_threads(1, too_many, timeout=600.0)

    def too_few(group):
        model = toy()
        with pytest.raises(ConfigurationError, match=r"sample=1 of 2 peers: .* at least 2"):
            Plexus(sample=1).attach(model, sgd(model), group)

    run_threads(2, too_few, timeout=600.0)
