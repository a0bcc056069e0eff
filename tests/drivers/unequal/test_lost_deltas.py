"""Deltas of replicas of unequal speed that a round leaves out, that wait for a slow uplink, or that never come."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest
import torch

from thinwire.codecs import Identity, TopK
from thinwire.comm import run_threads
from thinwire.comm.group import WrappedGroup
from thinwire.drivers.unequal import peer_streams
from thinwire.drivers.unequal.messages import DOWN, END, UP
from thinwire.drivers.unequal.method import Decoupled
from thinwire.drivers.unequal.syncer import Syncer
from thinwire.drivers.unequal.syncer_channel import SyncerChannel
from thinwire.errors import LinkError, NonFiniteError
from thinwire.lab.samples.method import plexus
from thinwire.lab.sites.method import Halos, halos
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Average
from thinwire.pieces.partition import BySize, Strided
from thinwire.pieces.staleness import Alike
from thinwire.testing.toy import weights

EXACT = {
    "codec": Identity(),
    "down": Identity(),
    "feedback": None,
    "outer": Average(),
    "weigh": Alike(),
    "patience": 600.0,
}
PLAIN = Decoupled(correct=None, **EXACT)


def begin(group, method, layers=1, observer=lambda event, step, **fields: None):
    """A model of zeros whose gradients are 1 on replica 0, 2 on replica 1 and so on, its optimizer, and the method's loop."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 1) for _ in range(layers)))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
        parameter.grad = torch.arange(1.0, 1 + parameter.numel()).view_as(parameter) * (group.rank + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    return model, optimizer, method.attach(model, optimizer, group, observer=observer)


def test_the_others_hold_their_rounds_in_virtual_time_after_a_death():
    landed = []

    def body(group):
        method = replace(PLAIN, every=6, slow=(1, 1, 1))
        model, optimizer, attached = begin(
            group, method, observer=lambda event, step, **_: event == "land" and landed.append((group.rank, step))
        )
        while attached.progress < 30:
            optimizer.step()
            if group.rank == 2 and attached.step == 9:
                return attached.close()
        attached.finish()
        return weights(model)

    first, second, _ = run_threads(3, body, timeout=600.0)
    assert torch.equal(first, second) and first.any()
    assert [step for rank, step in landed if rank == 0] == [6, 12, 18, 24, 30]


@pytest.mark.parametrize("delay", [0, 3])
def test_a_delta_that_was_left_out_is_in_the_next_one_once(delay, monkeypatch):
    """The first round is dropped: its deltas depart again, with their steps and what feedback had added to them."""
    take, moved, sent, dropped = Syncer.take, Syncer._moved, [], []
    method = replace(PLAIN, every=7, delay=delay, quorum=2, grace=0.0, slow=(1, 1))
    method = replace(method, codec=TopK(0.25, values=Identity()), feedback=Feedback())

    def drop_first(self, said, total):
        if not dropped:
            dropped.append(said)
            raise NonFiniteError("the anchor would not be finite")
        return moved(self, said, total)

    def body(group):
        model, optimizer, attached = begin(group, method)
        attached.tokens, mine = 8.0, torch.cat([p.grad.flatten() for p in model.parameters()])
        while attached.progress < 42:
            optimizer.step()
        attached.finish()
        return attached.anchors()[0], 0.125 * 42 * mine, attached._states[0].feedback["residual"]

    monkeypatch.setattr(Syncer, "take", lambda self, up: sent.append(up) or take(self, up))
    monkeypatch.setattr(Syncer, "_moved", drop_first)
    (anchor, one, held), (_, other, held_too) = run_threads(2, body, timeout=600.0)
    assert torch.allclose(held + held_too - 2 * anchor, one + other, atol=1e-4)
    assert [(up.steps, up.tokens) for up in sent if up.sender == 1][:3] == [(7, 56.0), (14, 112.0), (7, 56.0)]


def test_the_last_deltas_of_many_fragments_all_wait_for_a_slow_uplink(monkeypatch):
    """Replica 1's messages leave only when its last one is queued."""
    queued, send, fragments, warnings = threading.Event(), SyncerChannel.send, 100, []

    class HeldUntilTold(WrappedGroup):
        def post(self, tag, send, recv, *more, **named):
            assert not send or tag != UP or more or queued.wait()  # those at the start say what they are for
            return self.group.post(tag, send, recv, *more, **named)

    def sent(self, up):
        send(self, up)
        if up.kind == END and up.sender == 1:
            queued.set()

    def body(group):
        method = replace(PLAIN, every=1000, partition=Strided(fragments))
        model, optimizer, attached = begin(
            HeldUntilTold(group), method, fragments, lambda event, step, **_: warnings.append(event)
        )
        optimizer.step()
        due = -0.125 * torch.cat([p.grad.flatten() for p in model.parameters()]) * 1.5 / (group.rank + 1)
        attached.finish()
        return torch.allclose(weights(model), due)

    monkeypatch.setattr(SyncerChannel, "send", sent)
    assert run_threads(2, body, timeout=600.0) == [True, True]
    assert "warning" not in warnings


def test_a_replica_trains_for_two_periods_without_an_answer_and_then_waits(monkeypatch):
    """With a quorum of two, replica 1's delta waits for replica 0, which begins when replica 1 waits."""
    receive, begun, waited = SyncerChannel.receive, threading.Event(), []

    def received(self):
        if self is channels[1] and self.empty:
            waited.append(attached[1].step)
            begun.set()
        return receive(self)

    def body(group):
        model, optimizer, attached[group.rank] = begin(group, replace(PLAIN, every=5, quorum=2, grace=0.0))
        one, channels[group.rank] = attached[group.rank], attached[group.rank]._syncer
        while one.step < (10 if group.rank == 0 else 40):
            assert group.rank or begun.wait()
            optimizer.step()
        begun.set()
        one.finish()
        return weights(model)

    attached, channels = {}, {}
    monkeypatch.setattr(SyncerChannel, "receive", received)
    first, second = run_threads(2, body, timeout=600.0)
    assert torch.equal(first, second) and waited[0] == 5 + 2 * 5


def test_a_site_trains_for_two_periods_without_an_answer_and_then_waits():
    """Site 1's first update leaves when its server waits. Then its replica waits, too, and every inner step counts once."""
    waits, rounds = threading.Event(), []

    class CutOff(WrappedGroup):
        def post(self, tag, send, recv, purpose="packet", sized=None):
            assert not send or tag != UP or purpose != "packet" or waits.wait()
            return self.group.post(tag, send, recv, purpose, sized)

    class Replies(queue.Queue):
        def get(self):
            if self.empty():
                rounds.append(attached[0]._servers._exchanged[0].rounds)
                waits.set()
            return super().get()

    def body(group):
        method = Halos(sites=(1, 1), every=5, apart=3, above=Average(), **EXACT)
        model, optimizer, one = begin(CutOff(group) if group.rank else group, method)
        if group.rank:
            attached.append(one)
            one._servers._replies = Replies()
            while one.step < 400 and not waits.is_set():
                optimizer.step()
            waits.set()
        assert waits.wait()
        optimizer.step()
        one.finish()
        return weights(model), one.step

    attached = []
    (first, a), (second, b) = run_threads(2, body, timeout=600.0)
    one = -0.125 * torch.tensor([1.0, 2.0, 3.0, 1.0])
    assert torch.equal(first, second) and torch.allclose(first, (a * one + b * 2 * one) / 2) and rounds[0] == 2 * 3


def test_a_replica_that_took_no_messages_hears_that_the_others_continued_without_it(monkeypatch):
    """Replica 1's first message stays in transit until more wait for it than may."""
    dropped, warnings = threading.Event(), []

    class Frozen(WrappedGroup):
        def post(self, tag, send, recv, *more, **named):
            assert not send or tag != DOWN or more or dropped.wait()
            return self.group.post(tag, send, recv, *more, **named)

    def told(event, step, **fields):
        if event == "warning":
            warnings.append(fields["message"])
            dropped.set()

    def body(group):
        _, optimizer, attached = begin(Frozen(group), replace(PLAIN, every=5, grace=0.0), observer=told)
        if group.rank == 0:
            while not dropped.is_set():
                optimizer.step()
            return attached.finish()
        with pytest.raises(LinkError, match=r"^this replica took no messages .* and the others continued without it"):
            while True:
                optimizer.step()
        attached.close()

    monkeypatch.setattr(peer_streams, "MOST_WAITING", 0)
    run_threads(2, body, timeout=600.0)
    assert warnings == ["replica 1 was lost, the others continue: it takes no messages: 2 wait for it"]


@pytest.mark.parametrize("method", [replace(PLAIN, every=5), replace(halos(every=5), patience=600.0)])
def test_a_replica_that_the_hub_has_given_up_is_not_told_that_a_server_is_lost(method):
    words = "the hub has ended the connection: the others were told that b has died; they have stopped, or continue without it"

    class GivenUp(WrappedGroup):
        def post(self, tag, send, recv, purpose="packet", sized=None):
            if self.rank == 1 and tag == DOWN and recv and sized:
                raise LinkError(words)
            return self.group.post(tag, send, recv, purpose, sized)

    def body(group):
        _, optimizer, attached = begin(GivenUp(group), method)
        if group.rank == 0:
            while attached.progress < 40:
                optimizer.step()
            return attached.finish()
        with pytest.raises(LinkError, match=f"^{words}$"):
            while True:
                optimizer.step()
        attached.close()

    run_threads(2, body, timeout=600.0)


@pytest.mark.parametrize("method", [replace(PLAIN, every=5), plexus(every=5, sample=2, ping_timeout=600.0)])
def test_the_warning_of_those_who_continue_has_no_advice_for_those_who_end(method):
    warned, warnings = threading.Event(), []

    class Cut(WrappedGroup):
        def post(self, tag, send, recv, purpose="packet", sized=None):
            if self.rank == 0 and 2 in recv and sized:
                error = LinkError("replica 2 (c) has died. Start all again.")
                error.peer, error.advice = 2, "Start all again."
                raise error
            return self.group.post(tag, send, recv, purpose, sized)

    def told(event, step, **fields):
        if event == "warning":
            warnings.append(fields["message"])
            warned.set()

    def body(group):
        _, _, attached = begin(Cut(group), method, observer=told if group.rank == 0 else lambda event, step, **_: None)
        warned.wait()
        attached.close()

    run_threads(3, body, timeout=600.0)
    assert warnings[0] == "replica 2 was lost, the others continue: replica 2 (c) has died."


@pytest.mark.parametrize(
    "method",
    [replace(PLAIN, every=5, slow=(1, 1)), Halos(sites=2, every=5, apart=1, slow=(1, 1), above=Average(), **EXACT)],
)
def test_a_fragment_without_elements_has_rounds_like_the_others_and_is_not_refused(method):
    told = []

    def body(group):
        model = torch.nn.ParameterList([torch.zeros(4), torch.zeros(0)])
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        attached = replace(method, partition=BySize(2)).attach(
            model, optimizer, group, observer=lambda event, step, **_: told.append(event)
        )
        while attached.progress < 13:
            optimizer.step()
        attached.finish()
        return model[0].tolist(), attached.step, [one.rounds for one in attached._states]

    for values, steps, rounds in run_threads(2, body, timeout=600.0):
        assert (values, steps) == ([-0.125 * 13] * 4, 13) and rounds[0] == rounds[1] > 2
    assert "refused" not in told and "warning" not in told
