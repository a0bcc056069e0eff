"""The protocol of Plexus in virtual time: up to 100 peers of which most may be offline, single peers, and its messages."""

from __future__ import annotations

import queue
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from thinwire.comm import run_threads
from thinwire.drivers.attached import TAG
from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.lab.robust.coordinates import mean_of
from thinwire.lab.samples.host import PeerHost
from thinwire.lab.samples.messages import Kind, PeerMessage, SampleMessages
from thinwire.lab.samples.peer import SampledPeer
from thinwire.lab.samples.peer_view import PeerEntry, PeerView
from thinwire.lab.samples.rules import SampleRules, Send, Train, Wake
from thinwire.lab.simulate.sampled import Network
from thinwire.packet import said_nbytes

QUICK = SampleRules(patience=20.0)


def node(own=0, peers=6, **rules):
    view = PeerView({peer: PeerEntry(1, 1, joined=True) for peer in range(peers)})
    return SampledPeer(own, SampleRules(**{"sample": 3} | rules), view, lambda m: sum(m) / len(m))


def sent(made, kind):
    return [one for one in made.take() if isinstance(one, Send) and one.message.kind == kind]


def trained(sender, round_, sample=(1, 2, 3), model=1.0, **more):
    return PeerMessage(Kind.TRAINED, sender, round_, sample=sample, view=PeerView.of(range(6)), model=model, **more)


# ---- 100 peers


@pytest.mark.parametrize(("offline", "asked"), [(0.0, 10.0), (0.2, 12.6), (0.5, 20.0), (0.8, 49.8)])
def test_a_hundred_peers_train_and_ping_in_proportion_to_the_offline_share(offline, asked):
    """A sample of s takes s/(1 − p) pings where a share p is offline. The same seed gives the same bits of the model."""
    runs = [Network(100, QUICK, offline, away=1e9, seed=3) for _ in range(2)]
    told = [run.run(rounds=25) for run in runs]
    assert told[0] == told[1] and np.array_equal(runs[0].newest.model, runs[1].newest.model)
    share = sum(runs[0].there) / 100
    assert told[0].rounds == 25 and told[0].found == 10.0
    assert told[0].asked == pytest.approx(10 / share, rel=0.12)
    assert 10 / share == pytest.approx(asked, rel=0.25)  # the offline peers are drawn once
    assert told[0].apart < 0.2


def test_no_round_is_lost_while_peers_leave_and_return():
    run = Network(100, QUICK, offline=0.5, away=400.0, seed=1)
    told = run.run(rounds=40, seconds=20_000.0)
    assert told.rounds == 40 and told.apart < 0.15
    back = [node for node in run.members if node.counter > 1]
    assert len(back) > 20  # returned peers are sampled again: a join has a larger counter than the leave before it
    assert any(run.taken[one.own] and one.view.entries[one.own].joined for one in back)


def test_losing_an_aggregator_in_every_round_stops_no_run_and_a_second_one_saves_the_wait():
    """The first peer of each round's order answers pings, but drops models and sends no mean."""
    order, lost = PeerView.of(range(30)), set()

    def dies(peer, message):
        if message.kind not in (Kind.TRAINED, Kind.MEAN):
            return False
        round_ = message.round + (message.kind == Kind.TRAINED)
        if peer != order.order(round_, 10**6)[0] or (message.kind == Kind.MEAN and peer != message.sender):
            return False
        lost.add(round_)
        return True

    told = [
        Network(30, SampleRules(sample=5, aggregators=a, patience=20.0), offline=0.0, seed=2, drops=dies).run(
            20, 5000.0
        )
        for a in (1, 2)
    ]
    assert len(lost) == 20 and all(one.rounds == 20 and one.apart < 0.2 for one in told)
    assert told[0].seconds > 20 * 2 * 20.0 > 4 * told[1].seconds


# ---- one peer


def test_an_aggregator_counts_each_sender_once_and_sends_one_mean():
    one = node()
    for message in (trained(1, 4, model=1.0), trained(1, 4, model=9.0), trained(2, 4, model=2.0)):
        one.heard(message)
    assert not sent(one, Kind.PING)
    one.heard(trained(3, 4, model=3.0))
    pings = sent(one, Kind.PING)
    assert {ping.message.round for ping in pings} == {5}  # the sample of the next round
    for ping in pings:
        one.heard(PeerMessage(Kind.PONG, ping.to, 5))
    means = sent(one, Kind.MEAN)
    assert means and all(mean.message.model == 2.0 and mean.message.round == 5 for mean in means)
    one.heard(trained(2, 4, model=7.0))
    assert not one.take()  # no ack before the mean has arrived at a peer
    one.heard(PeerMessage(Kind.GOT, means[0].to, 5))
    assert sorted(ack.to for ack in sent(one, Kind.ACK)) == [1, 2, 3]
    one.heard(trained(3, 4))
    assert [ack.to for ack in sent(one, Kind.ACK)] == [3]


def test_a_newer_round_replaces_training_and_an_old_one_does_not():
    one = node()
    mean = PeerMessage(Kind.MEAN, 1, 7, sample=(0, 2), view=one.view, model=1.0)
    one.heard(mean)
    one.heard(mean)
    assert [action.message.round for action in one.take() if isinstance(action, Train)] == [7]
    one.heard(PeerMessage(Kind.MEAN, 2, 8, sample=(0,), view=one.view, model=2.0))
    one.heard(PeerMessage(Kind.MEAN, 2, 6, sample=(0,), view=one.view, model=0.0))
    assert [action.message.round for action in one.take() if isinstance(action, Train)] == [8]
    one.trained(7, 10, 5.0)
    assert not one.take()  # it is stale
    one.trained(8, 10, 5.0)
    assert {ping.message.round for ping in sent(one, Kind.PING)} <= {9}


def test_a_join_takes_effect_after_the_next_model_is_sent_and_a_leave_at_once():
    one = node()
    one.heard(PeerMessage(Kind.LEAVE, 4, counter=2))
    assert 4 not in one.view.order(1, 50)
    one.heard(PeerMessage(Kind.JOIN, 4, counter=3))
    one.heard(PeerMessage(Kind.JOIN, 7, counter=1))
    assert 4 not in one.view.order(1, 50) and 7 not in one.view.entries
    one.heard(PeerMessage(Kind.MEAN, 1, 2, sample=(0,), view=PeerView({}), model=1.0))
    assert 7 not in one.view.entries
    one.trained(2, 1, 1.0)
    for ping in sent(one, Kind.PING):
        one.heard(PeerMessage(Kind.PONG, ping.to, 3))
    assert {4, 7} <= set(one.view.order(2, 50))
    one.heard(PeerMessage(Kind.LEAVE, 4, counter=2))  # an older leave that arrives late
    assert 4 in one.view.order(2, 50)


def test_a_peer_is_pinged_twice_before_the_next_one():
    one = node(own=9, peers=6)
    one.heard(PeerMessage(Kind.MEAN, 1, 2, sample=(0,), view=PeerView({}), model=1.0))
    one.trained(2, 1, 1.0)
    asked = []
    for _ in range(2):
        actions = one.take()
        asked += [action.to for action in actions if isinstance(action, Send) and action.message.kind == Kind.PING]
        (timer,) = [action for action in actions if isinstance(action, Wake) and action.key[0] == "ping"]
        one.woken(timer.key)
    order = one.view.order(3, 50)
    assert asked == [order[0]] * 2
    (ping,) = sent(one, Kind.PING)
    assert ping.to == order[1]
    one.heard(PeerMessage(Kind.PONG, order[1], 3))
    (model,) = [action for action in one.take() if isinstance(action, Send)]
    assert (model.to, model.message.kind) == (order[1], Kind.TRAINED)
    one.lost(order[1])  # no ack has come: the model goes to another peer
    (ping,) = sent(one, Kind.PING)
    assert ping.to != order[1]


def test_invalid_settings_are_refused():
    for wrong in (
        {"sample": 0},
        {"aggregators": 0},
        {"sample": 2, "fraction": 0.4},
        {"fraction": 1.5},
        {"window": 0},
        {"patience": 0.0},
        {"patience": np.nan},
    ):
        with pytest.raises(ConfigurationError, match="needed"):
            SampleRules(**wrong)
    for peers, sample, said in ((5, 6, "sample=6 of 5"), (5, 1, "at least 2"), (10**20, 2, "1 to 4,096 peers")):
        with pytest.raises(ConfigurationError, match=said):
            Network(peers, SampleRules(sample=sample), 0.0)
    for wrong in ({"rounds": 0}, {"rounds": 1, "seconds": np.nan}):
        with pytest.raises(ConfigurationError, match="at least 1 round, and a time above 0"):
            Network(5, SampleRules(sample=2), 0.0).run(**wrong)


def test_a_run_of_too_many_events_is_refused(monkeypatch):
    """Without an end: peers come and go many times between two messages."""
    monkeypatch.setattr("thinwire.lab.simulate.sampled.EVENTS", 2000)
    with pytest.raises(ConfigurationError, match=r"0 rounds in .* were 2,000 messages and timers"):
        Network(10, SampleRules(sample=3), 0.5, away=1e-9).run(rounds=5)


def test_a_replica_that_knows_of_an_impossible_round_is_lost_by_name():
    """Otherwise every later model would count as old, and all replicas would wait for ever."""
    wire, told = SampleMessages(2, 4), queue.Queue()

    def body(group):
        if group.rank == 0:
            peer = SampledPeer(0, SampleRules(sample=2), PeerView.of(range(2)), mean_of)
            host = PeerHost(group, wire, peer, time.monotonic, told.put)
            host.start()
            first = told.get()
            host.close()
            return first
        ping, answer = PeerMessage(Kind.PING, 1, 5, known=(1 << 31) - 1), wire.buffer()
        group.post(TAG, {0: wire.write(ping)}, {}).wait()
        with suppress(LinkError):  # replica 0 has left
            group.post(TAG, {}, {0: answer}, sized=said_nbytes).wait()
            told.put(wire.read(answer, 0))
        return None

    first, _ = run_threads(2, body, timeout=600.0)
    assert first == (
        "replica 1 was lost, the others continue: replica 1 knows of round 2147483647, and this one of round 0; check that replica."
    )


# ---- bytes


def test_messages_are_read_as_written_and_invalid_ones_are_refused():
    wire = SampleMessages(6, 4)
    view = PeerView.of(range(6)).with_entry(3, PeerEntry(8, 2, joined=False))
    model = torch.arange(4.0)
    whole = PeerMessage(Kind.TRAINED, 2, 9, 3, 8, 40, True, (1, 2, 5), view, model)
    packet = wire.write(whole)
    assert packet.numel() == wire.nbytes(Kind.TRAINED, 3, 6)
    room = wire.buffer()
    room[: packet.numel()] = packet
    read = wire.read(room, 2)
    assert torch.equal(read.model, model)
    assert (read.round, read.counter, read.known, read.step, read.stop) == (9, 3, 8, 40, True)
    assert (read.kind, read.sender, read.sample, read.view) == (Kind.TRAINED, 2, (1, 2, 5), view)
    ping = PeerMessage(Kind.PING, 2, 5, counter=2, known=4)
    assert wire.read(wire.write(ping), 2) == ping

    for wrong in (
        PeerMessage(Kind.MEAN, 2, 9, view=view, model=torch.tensor([0.0, 1.0, float("nan"), 2.0])),
        PeerMessage(Kind.MEAN, 2, 9, view=PeerView.of(range(7)), model=model),
        PeerMessage(Kind.MEAN, 2, 9, sample=(6,), view=view, model=model),
        PeerMessage(Kind.MEAN, 2, 9, sample=(1, 1), view=view, model=model),
        PeerMessage(Kind.PING, 2, 9, counter=0),
        PeerMessage(Kind.PING, 2, 1 << 31),
        PeerMessage(Kind.PING, 3, 9),
    ):
        with pytest.raises(PacketError):
            wire.read(wire.write(wrong), 2)
    for at in range(packet.numel()):
        damaged = packet.clone()
        damaged[at] ^= 1
        with pytest.raises(PacketError):
            wire.read(damaged, 2)
