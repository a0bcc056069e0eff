"""HALoS: two levels of servers take the steps of a recurrence that numpy takes, and all replicas end with the global model."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_processes import run_world

import thinwire as tw
from thinwire.codecs import E3M0, Identity
from thinwire.comm import CountedGroup, Ledger, run_threads
from thinwire.comm.group import WrappedGroup
from thinwire.drivers.unequal.messages import UP
from thinwire.errors import ConfigurationError, LinkError
from thinwire.lab.sites import driver as sites_driver
from thinwire.lab.sites.driver import SiteReplica
from thinwire.lab.sites.method import halos
from thinwire.pieces.partition import BySize
from thinwire.pieces.staleness import Alike

EXACT = {"codec": Identity(), "down": Identity(), "feedback": None, "weigh": Alike()}
TARGETS = np.random.default_rng(0).normal(size=(5, 8))
RATE = 0.1


class Quadratic(torch.nn.Module):
    """½·|x − target of the replica|²."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(8))


class Two(torch.nn.Module):
    """The same with two parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))

    @property
    def x(self):
        return torch.cat([self.first, self.second])


def trained(method, steps, ledgers=None, told=None, model=Quadratic, stop=None, leave=False):
    """The body of a replica, which returns its final weights and number of inner steps. Replica `stop` requests a stop after ten."""

    def body(group):
        if ledgers is not None:
            group = CountedGroup(group, ledgers[group.rank])
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        observe = (
            (lambda *_, **fields: None) if told is None else (lambda *said, **fields: told(group.rank, *said, **fields))
        )
        attached = replace(method, patience=600.0).attach(net, optimizer, group, observer=observe)
        target = torch.tensor(TARGETS[group.rank], dtype=torch.float32)
        try:
            while attached.progress < steps and not attached.stopping:
                optimizer.zero_grad()
                (0.5 * (net.x - target).square().sum()).backward()
                optimizer.step()
                if group.rank == stop and attached.step == 10:
                    attached.request_stop()
            if not leave:
                attached.finish()
        finally:
            attached.close()
        return net.x.detach().clone(), attached.step

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


def test_coded_fragments_depend_on_speeds_and_seed_alone():
    """4 bits at both levels, two fragments, a slow link: two runs have the same bits, and the global model descends."""
    method = halos(sites=(2, 1), every=4, apart=2, updates=2, slow=(1.0, 3.0, 2.0), delay=2)
    method = replace(method, partition=BySize(2))
    first, again = (run_threads(3, trained(method, 40, model=Two), timeout=600.0) for _ in range(2))
    assert all(torch.equal(first[0][0], final) for final, _ in (*first, *again))
    assert [steps for _, steps in first] == [steps for _, steps in again]
    share = np.array([6.0, 2.0, 3.0]) / 11  # of the tokens
    assert np.abs(first[0][0].numpy() - share @ TARGETS[:3]).max() < 0.3 < np.abs(share @ TARGETS[:3]).max()


# ---- in real time


def test_replicas_and_sites_wait_for_nobody_in_real_time():
    """All end with the same weights, and a stop that one replica requests stops those of the other site, too."""
    found = run_threads(4, trained(halos(every=4, apart=2), 30), timeout=600.0)
    assert all(torch.equal(found[0][0], final) for final, _ in found)
    asked = run_threads(4, trained(halos(every=4, apart=2), 10**9, stop=3), timeout=600.0)
    assert all(torch.equal(asked[0][0], final) for final, _ in asked)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_lost_site_does_not_stop_the_other_and_a_lost_global_server_does(gone):
    """The first replica of a site leaves: its site ends; and so do all if it had the global server."""
    warnings = []

    def told(rank, event, step, **fields):
        if event == "warning":
            warnings.append((rank, fields["message"]))

    def body(group):
        if group.rank == gone:
            return trained(halos(every=3, apart=1), 0, leave=True)(group)
        if gone == 0 or group.rank > gone:
            says = (
                "global server on replica 0 is lost, so all"
                if group.rank < 2
                else "^this site ends: the global server is lost: .*replica 0"
                if group.rank == 2
                else "this site on replica 2 is lost, so the site ends, or has ended the run without this replica: "
            )
            with pytest.raises(LinkError, match=says):
                trained(halos(every=3, apart=1), 10**9)(group)
            return None
        return trained(halos(every=3, apart=1), 30, told=told)(group)

    found = run_threads(4, body, timeout=600.0)
    if gone:
        assert torch.equal(found[0][0], found[1][0])
        assert any(rank == 0 and message.startswith("site 1 was lost") for rank, message in warnings)


class Damaging(WrappedGroup):
    """The messages of `rank` to its server are damaged on their way."""

    def __init__(self, group, rank):
        super().__init__(group)
        self.damages = group.rank == rank

    def post(self, tag, send, recv, purpose="packet", sized=None):
        if self.damages and send and (tag, purpose) == (UP, "packet"):
            send = {peer: message.clone() for peer, message in send.items()}
            for message in send.values():
                message[-1] ^= 1
        return self.group.post(tag, send, recv, purpose, sized)


@pytest.mark.parametrize(("rank", "tells", "who"), [(2, 0, "site 1"), (3, 2, "replica 3")])
def test_a_message_that_cannot_be_read_names_its_site_or_its_replica_in_the_run(rank, tells, who):
    """Both are number 1 where it arrives: of the servers, and of the second site."""
    warnings = []

    def told(rank, event, step, **fields):
        if event == "warning":
            warnings.append((rank, fields["message"]))

    def body(group):
        with suppress(LinkError):
            trained(halos(every=3, apart=1), 30, told=told)(Damaging(group, rank))

    run_threads(4, body, timeout=600.0)
    said = f"{who} was lost, the others continue: the packet of {who} is damaged"
    assert [message.startswith(said) for where, message in warnings if where == tells] == [True]


def test_a_lost_replica_has_its_number_in_the_run_and_not_in_its_site():
    warnings = []

    def told(rank, event, step, **fields):
        if event == "warning":
            warnings.append((rank, fields["message"]))

    def body(group):
        steps, leave = (0, True) if group.rank == 3 else (30, False)
        return trained(halos(every=3, apart=1), steps, told=told, leave=leave)(group)

    run_threads(4, body, timeout=600.0)
    assert [(rank, message.startswith("replica 3 was lost, the others continue")) for rank, message in warnings] == [
        (2, True)
    ]


@pytest.mark.parametrize("gone", [1, 2])
def test_a_replica_that_is_lost_before_it_has_the_final_model_keeps_it_from_no_other_site(gone, monkeypatch):
    """Replica 1, of the first site, or 2, the server of the second, leaves after its last message."""
    left, give, take, warnings = threading.Event(), sites_driver.give, SiteReplica._take, []

    def given(*what):
        assert left.wait()
        return give(*what)

    def taken(self, peer):
        if self.group.rank == gone:
            self.group.close()
            left.set()
        return take(self, peer)

    def told(rank, event, step, **fields):
        if event == "warning":
            warnings.append((rank, fields["message"]))

    def body(group):
        if group.rank == gone or (gone, group.rank) == (2, 3):
            with pytest.raises(LinkError, match="0 did not give the global model" if group.rank == gone else None):
                trained(halos(every=3, apart=1), 30)(group)
            return None
        return trained(halos(every=3, apart=1), 30, told=told)(group)[0]

    monkeypatch.setattr(sites_driver, "give", given)
    monkeypatch.setattr(SiteReplica, "_take", taken)
    found = [final for final in run_threads(4, body, timeout=600.0) if final is not None]
    assert len(found) == 4 - gone and all(torch.equal(found[0], final) for final in found)
    assert [(rank, message.startswith(f"replica {gone} was lost before")) for rank, message in warnings] == [(0, True)]


# ---- on the wire


def test_predicted_bytes_cross_between_the_sites():
    """At equal speeds the deltas of a site are one round. An update and its reply cross once in K rounds, and at the end the model."""
    method, ledgers = halos(every=3, apart=2, slow=(1.0,) * 4), [Ledger() for _ in range(4)]
    run_threads(4, trained(method, 24, ledgers), timeout=600.0)
    up, down = 80 + E3M0().nbytes(8), 56 + 17 * 2 + E3M0().nbytes(8)
    assert up + down == method.nbytes_between(8, size=4)
    assert ledgers[2].sent("packet", 0) == 4 * up + up + 80  # and the rest, and the end
    # A site has ended; all have. One message if the first is heard as the last ends.
    ends = ledgers[0].sent("packet", 2) - 4 * down
    assert ends in (down - E3M0().nbytes(8), 2 * (down - E3M0().nbytes(8)))
    assert method.nbytes_per_period(8, 4) == method.nbytes_per_period(8, 4, rank=1)
    assert ledgers[1].sent("packet", 0) == 8 * method.nbytes_per_period(8, 4, rank=1) + 80
    # A round to the other replica for each of two deltas, and for the reply that lands, once in two; and an update or its reply.
    near = 3 * (56 + 17 * 3 + E3M0().nbytes(8))
    assert [method.nbytes_per_period(8, 4, rank=rank) for rank in (0, 2)] == [near + down, near + up]
    crossed = {(rank, peer) for rank in range(4) for peer in range(4) if ledgers[rank].sent("packet", peer)}
    assert crossed == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0)}


def _over_gloo(rank):
    group = tw.TorchGroup.from_world(replicas=3, timeout=600.0)
    virtual = trained(halos(sites=(2, 1), every=4, apart=2, slow=(1.0, 3.0, 2.0)), 30)(group)
    return virtual, trained(halos(sites=(2, 1), every=4, apart=2), 30)(group)


@pytest.mark.slow
def test_processes_over_gloo_take_the_steps_of_threads(tmp_path):
    found = run_world(_over_gloo, tmp_path, machines=({},) * 3)
    (due, _), *_ = run_threads(
        3, trained(halos(sites=(2, 1), every=4, apart=2, slow=(1.0, 3.0, 2.0)), 30), timeout=600.0
    )
    assert all(torch.equal(virtual, due) for (virtual, _), _ in found)
    assert all(torch.equal(real, found[0][1][0]) for _, (real, _) in found)


# ---- settings


def test_the_defaults_are_those_of_the_measured_runs():
    assert halos() == halos(
        sites=2, every=30, apart=4, updates=2, outer_lr=0.7, outer_momentum=0.5, global_lr=0.7, global_momentum=0.5,
        global_updates=2, merge=0.75, codec=E3M0(), slow=(), delay=0,
    )  # fmt: skip
    assert halos().optimizer(Quadratic(), 0.1).defaults["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sites": 0}, "the number of sites"),
        ({"sites": (2, 0)}, "the number of replicas of each"),
        ({"apart": 0}, "at least 1 round"),
        ({"merge": 1.0}, "0 <= merge < 1"),
        ({"global_momentum": 1.0}, "0 <= momentum < 1"),
        ({"every": 5, "delay": 5, "slow": (1.0,)}, "0 <= delay < every"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        halos(**settings)


def test_groups_that_do_not_fit_are_refused():
    def body(group):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for method, says in (
            (halos(sites=3), "at least one replica at each site"),
            (halos(sites=(2, 2)), "each replica at one site"),
            (halos(slow=(1.0,)), "one factor for each"),
            (replace(halos(), quorum=2), "the smallest site has 1 replicas"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                method.attach(model, optimizer, group)

    run_threads(2, body, timeout=600.0)
