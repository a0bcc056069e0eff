"""HALoS, saved and resumed: every inner step is in the global model once. Replica m moves coordinate m alone, so the model counts its steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from thinwire.codecs import Identity
from thinwire.comm import run_threads
from thinwire.errors import CheckpointError
from thinwire.lab.sites.host import SiteHost
from thinwire.lab.sites.method import halos
from thinwire.pieces.outer import Average
from thinwire.pieces.staleness import Alike

SIZE = 4  # two sites of two replicas
PLAIN = {
    "codec": Identity(),
    "down": Identity(),
    "feedback": None,
    "weigh": Alike(),
    "outer": Average(),
    "above": Average(),
}
TIMES = {
    "real": {},
    "virtual": {"slow": (1.0, 2.0, 4.0, 4.0)},
    "virtual, a slow link": {"slow": (1.0, 2.0, 4.0, 4.0), "delay": 3},
}


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(SIZE))


def method(**settings):
    return replace(halos(every=4, apart=2, **settings), patience=600.0, **PLAIN)


def begun(group, of, saved=None, told=None):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    observe = (lambda event, _, **fields: told.append((event, fields))) if told is not None else (lambda *_, **__: None)
    attached = of.attach(model, optimizer, group, observer=observe)
    if saved:
        tensors, facts, x = saved
        with torch.no_grad():
            model.x.copy_(x)
        attached.load_state(tensors, facts)
    return attached, optimizer


def train(attached, optimizer, until, stop=None):
    while attached.progress < until and not attached.stopping:
        optimizer.zero_grad()
        attached.model.x[attached.group.rank].backward()
        optimizer.step()
        if attached.step == stop:
            attached.request_stop()


def saved_of(attached):
    tensors, facts = attached.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    return kept, json.loads(json.dumps(facts)), attached.model.x.detach().clone()


def counted(final):
    """How often the model has each replica's inner steps."""
    return [float(step) for step in -final * SIZE / 0.125]


@pytest.mark.parametrize(("time", "asks"), [("real", 0), ("virtual", 3), ("virtual, a slow link", 0)])
def test_a_run_that_was_stopped_and_resumed_counts_every_step_once(time, asks, monkeypatch):
    of, order, begin_at, told = method(**TIMES[time]), [], SiteHost.begin_at, [[] for _ in range(SIZE)]

    def in_order(host, *steps):
        begin_at(host, *steps)
        order.append("begun")

    monkeypatch.setattr(SiteHost, "begin_at", in_order)

    def first(group):
        attached, optimizer = begun(group, of)
        train(attached, optimizer, 10**9, stop=13 if group.rank == asks else None)
        kept = saved_of(attached)
        attached.close()
        return kept

    kept = run_threads(SIZE, first, timeout=600.0)
    most = max(facts["step"] for _, facts, _ in kept)

    def then(group):
        attached, optimizer = begun(group, of, kept[group.rank], told[group.rank])
        order.append("resumed")
        again = attached.step
        train(attached, optimizer, most + 30)
        attached.finish()
        return attached.model.x.detach().clone(), attached.step, again

    found = run_threads(SIZE, then, timeout=600.0)
    assert order == ["begun"] * 2 + ["resumed"] * SIZE  # both servers before any replica
    assert not [fields for heard in told for event, fields in heard if event == "warning"]
    assert [again for *_, again in found] == [facts["step"] for _, facts, _ in kept]
    assert all(torch.equal(found[0][0], final) for final, *_ in found)
    assert counted(found[0][0]) == pytest.approx([steps for _, steps, _ in found], abs=1e-2)


@pytest.mark.parametrize("at", [(12, 30, 30, 12), (30, 12, 12, 30)], ids=["an old global server", "an old site"])
def test_checkpoints_of_different_moments_count_nothing_twice(at):
    """After a kill. A replica that is older than its server goes on after what was counted; what is newer than its server is lost, and said."""
    of, told = method(slow=(1.0,) * SIZE), [[] for _ in range(SIZE)]

    def first(group):
        attached, optimizer = begun(group, of)
        train(attached, optimizer, at[group.rank])
        kept = saved_of(attached)
        train(attached, optimizer, 40)
        attached.finish()
        return kept

    kept = run_threads(SIZE, first, timeout=600.0)

    def then(group):
        attached, optimizer = begun(group, of, kept[group.rank], told[group.rank])
        again = attached.step
        train(attached, optimizer, 60)
        attached.finish()
        return attached.model.x.detach().clone(), attached.step, again

    found = run_threads(SIZE, then, timeout=600.0)
    count, steps, again = counted(found[0][0]), [steps for _, steps, _ in found], [again for *_, again in found]
    warned = [" ".join(fields["message"] for event, fields in heard if event == "warning") for heard in told]
    assert all(torch.equal(found[0][0], final) for final, *_ in found)
    # Updates of 8 steps of each replica.
    updates = next((number for site, _, number, _ in kept[0][1]["global"]["counted"] if site), 0)
    if at[0] == 12:
        assert again == [12, 30, 30, 28]  # the syncer had counted 28 steps of the last
        lost = 24 - 8 * updates
        assert count == pytest.approx([steps[0], steps[1] - 16, steps[2] - lost, steps[3] - lost], abs=1e-2)
        assert "6 rounds" in warned[1] and f"{3 - updates} updates of this site" in warned[2]
    else:
        assert again == [30, 28, 12, 30]
        due = [steps[0], steps[1], 8 * updates + steps[2] - 12, 8 * updates + steps[3] - 30]
        assert count == pytest.approx(due, abs=1e-2)
        assert "begins at the global model" in warned[2]


def test_checkpoints_without_servers_are_refused():
    def body(group):
        attached, _ = begun(group, method())
        tensors, facts, _ = saved_of(attached)
        with pytest.raises(CheckpointError, match="does not hold its servers"):
            attached.load_state(tensors, {name: fact for name, fact in facts.items() if name != "site"})
        attached.finish()

    run_threads(2, body, timeout=600.0)
