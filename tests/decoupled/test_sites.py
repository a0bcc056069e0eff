"""HALoS: two levels of servers take the steps of a recurrence that numpy takes, and all replicas end with the global model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import E3M0, Identity
from thinwire.comm import CountedGroup, Ledger, run_threads
from thinwire.decoupled.sites import halos
from thinwire.errors import CheckpointError, ConfigurationError, LinkError
from thinwire.pieces.staleness import Alike

EXACT = {"codec": Identity(), "down": Identity(), "feedback": None, "weigh": Alike()}
TARGETS = np.random.default_rng(0).normal(size=(5, 8))
RATE = 0.1


class Quadratic(torch.nn.Module):
    """½·|x − target of the replica|²."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(8))


def trained(method, steps, ledgers=None, told=None):
    """The body of a replica. It returns its final weights and its number of inner steps."""

    def body(group):
        if ledgers is not None:
            group = CountedGroup(group, ledgers[group.rank])
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        observe = (
            (lambda *_, **fields: None) if told is None else (lambda *said, **fields: told(group.rank, *said, **fields))
        )
        attached = replace(method, patience=600.0).attach(model, optimizer, group, observer=observe)
        target = torch.tensor(TARGETS[group.rank], dtype=torch.float32)
        try:
            while attached.progress < steps and not attached.stopping:
                optimizer.zero_grad()
                (0.5 * (model.x - target).square().sum()).backward()
                optimizer.step()
            attached.finish()
        finally:
            attached.close()
        return model.x.detach().clone(), attached.step

    return body


class Delayed:
    """Delayed Nesterov in numpy."""

    def __init__(self, lr, momentum, updates):
        self.lr, self.momentum, self.updates = lr, momentum, updates
        self.v, self.sum, self.count = np.zeros(8), np.zeros(8), 0

    def step(self, x, delta):
        self.sum, self.count = self.sum + delta, self.count + 1
        if self.count < self.updates:
            return x - self.lr * delta
        self.v = self.momentum * self.v + self.sum
        self.sum, self.count = np.zeros(8), 0
        return x - self.lr * (delta + self.momentum * self.v)


class Site:
    def __init__(self, ranks, every, slow, outer):
        self.ranks, self.outer, self.a, self.b = ranks, outer, np.zeros(8), np.zeros(8)
        self.rounds, self.reply, self.back = 0, None, math.inf
        fast = sum(1 / slow[rank] for rank in ranks)
        self.every = {rank: max(1, round(every * len(ranks) / slow[rank] / fast)) for rank in ranks}


def by_hand(ranks, slow, *, every, apart, merge, local, above, steps, trip):
    """The same run in numpy: all events in the order of virtual time. `trip` is the time of an update and its reply."""
    size = len(slow)
    sites = [Site(own, every, slow, Delayed(*local)) for own in ranks]
    of = {rank: site for site in sites for rank in site.ranks}
    model, top = np.zeros(8), Delayed(*above)
    x, known, taken = np.zeros((size, 8)), np.zeros((size, 8)), [0] * size

    def goes_on(rank):
        ahead = (taken[rank] + 1) * slow[rank]
        return (
            sum(taken[rank] if one == rank else math.ceil(ahead / slow[one]) - 1 for one in range(size)) // size < steps
        )

    def land(rank):  # what a replica's server did since the replica's last step ended
        x[rank] += of[rank].a - known[rank]
        known[rank] = of[rank].a

    def merged(site):
        z = (1 - merge) * (site.b - site.reply)
        site.b, site.back = site.b - z, math.inf
        site.a = site.a - z

    while any(map(goes_on, range(size))):
        steps_end = [(taken[r] + 1) * slow[r] for r in range(size) if goes_on(r)]
        now = min(steps_end + [site.back for site in sites])
        ending = [r for r in range(size) if goes_on(r) and (taken[r] + 1) * slow[r] == now]
        for rank in ending:
            x[rank] -= RATE * (x[rank] - TARGETS[rank])
            taken[rank] += 1
            land(rank)
        for site in sites:
            due = [r for r in site.ranks if r in ending and taken[r] % site.every[r] == 0]
            if due:
                site.a = site.outer.step(site.a, sum(known[r] - x[r] for r in due) / len(site.ranks))
                site.rounds += 1
                for rank in due:
                    x[rank] = known[rank].copy()  # its training is in the server's model now
            if due and site.rounds >= apart and site.back == math.inf:
                model = top.step(model, (site.b - site.a) / len(sites))
                site.b, site.rounds, site.reply, site.back = site.a, 0, model, now + trip
            if site.back <= now:
                merged(site)
        for rank in ending:
            land(rank)
    rests = []
    for site in sites:  # the end: plain averages
        left = sum(known[rank] - x[rank] for rank in site.ranks) / len(site.ranks)
        rests.append(site.b - (site.a - left))
    return model - sum(rests) / len(sites), taken


CASES = {
    "two sites": {"ranks": ((0, 1), (2, 3)), "slow": (1.0, 2.0, 4.0, 4.0), "apart": 3, "merge": 0.75, "trip": 0},
    "a slow link": {"ranks": ((0, 1), (2, 3)), "slow": (1.0, 2.0, 4.0, 4.0), "apart": 3, "merge": 0.5, "trip": 3},
    "unlike sites": {"ranks": ((0, 1, 2), (3,), (4,)), "slow": (1.0, 2.0, 1.0, 3.0, 2.0), "apart": 2, "merge": 0.0, "trip": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_takes_the_steps_of_a_recurrence_in_numpy(name):
    """Every delta, update, reply and merge, and the end, by deterministic order in virtual time."""
    case = CASES[name]
    slow, ranks = case["slow"], case["ranks"]
    method = halos(
        sites=tuple(map(len, ranks)), every=4, apart=case["apart"], updates=3, outer_lr=0.6, outer_momentum=0.5,
        global_lr=0.9, global_momentum=0.25, global_updates=2, merge=case["merge"], slow=slow, delay=case["trip"],
    )  # fmt: skip
    found = run_threads(len(slow), trained(replace(method, **EXACT), 23), timeout=600.0)
    trip = case["trip"] * len(slow) / math.fsum(1 / one for one in slow)
    local, above = (0.6, 0.5, 3), (0.9, 0.25, 2)
    due, taken = by_hand(ranks, slow, every=4, apart=case["apart"], merge=case["merge"], local=local, above=above, steps=23, trip=trip)  # fmt: skip
    assert [steps for _, steps in found] == taken
    assert all(torch.equal(found[0][0], final) for final, _ in found)
    assert np.abs(found[0][0].numpy() - due).max() < 1e-6 < 0.1 < np.abs(due).max()
