"""A peer that trains in samples, without I/O (MoDeST, Plexus). Inputs: messages, timers and lost peers; outputs: messages, timers and work.

    a participant of round k     trains from the model of round k, and sends its own to the first of the order for k + 1 that answer
    an aggregator                waits for the sample of round k, takes the mean, and sends it to the first that answer for k + 1

No peer leads the run. A peer keeps a model that it sent until it knows that a mean with it has arrived elsewhere, so no single failure
loses a round. A peer that does not answer a ping is left out of this sample only.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from thinwire.lab.samples.messages import Kind, PeerMessage
from thinwire.lab.samples.peer_view import PeerEntry, PeerView
from thinwire.lab.samples.rules import Action, Done, Gathering, SampleRules, Sampling, Send, Train, Wake


class SampledPeer:
    """One peer. `take()` returns the actions that it has ordered since the last call.

    Args:
        own: its number.
        rules: the rules of the run, equal on all peers.
        view: its view of all peers, including itself.
        combine: computes the mean of models, which are in the order of their senders.
        seed: draws the peers to which heartbeats go.
        counter: how often it has joined or left.
    """

    def __init__(
        self, own: int, rules: SampleRules, view: PeerView, combine: Callable[[Sequence[Any]], Any],
        seed: int = 0, counter: int = 1,
    ) -> None:  # fmt: skip
        self.own, self.rules, self.view, self.combine, self.counter = own, rules, view, combine, counter
        self.round = self.known = 0  # the round whose model it has; the newest round whose model has arrived at a peer
        self.asked: list[tuple[int, int]] = []  # for every complete sample of participants: peers asked, peers found
        self.final: PeerMessage | None = None
        self._pending = dict[int, PeerEntry]()
        self._suspected, self._lost, self._byes = set[int](), set[int](), set[int]()
        self._samplings, self._serial = dict[int, Sampling](), 0
        self._gatherings = dict[int, Gathering]()
        self._sample: tuple[int, ...] = ()
        self._mine: PeerMessage | None = None  # its trained model, until a mean with it has arrived elsewhere
        self._sent_to, self._attempt = set[int](), 0
        self._random = random.Random(f"{seed}-{own}")
        self._actions, self._to_self = list[Action](), deque[PeerMessage]()

    def take(self) -> list[Action]:
        """The ordered actions, in this order; messages to itself are handled here."""
        while self._to_self:
            self._handle(self._to_self.popleft())
        actions, self._actions = self._actions, []
        return actions

    # ---- inputs

    def start(self, round_: int, step: int, model: Any) -> None:
        """Begin with a model that all have, so that the participants of the first round are known without pings."""
        self.known = round_
        self._do(Wake(("hello",), self.rules.hello))
        sample = self.view.order(round_, self.rules.window, self.own)[: self.rules.sample]
        if self.own in sample:
            self._adopt(PeerMessage(Kind.MEAN, self.own, round_, step=step, sample=sample, view=self.view, model=model))

    def heard(self, message: PeerMessage) -> None:
        """A message of another peer has arrived."""
        peer, known = message.sender, self.view.entries.get(message.sender)
        self._suspected.discard(peer)
        self.known = max(self.known, message.known)
        if message.kind == Kind.LEAVE:
            self.view = self.view.with_entry(peer, PeerEntry(self.known, message.counter, joined=False))
        elif known is None or message.counter > known.counter:
            entry = PeerEntry(self.known, message.counter, joined=True)
            self._pending[peer] = entry.merged(self._pending.get(peer, entry))
        self.view = self.view.heard(peer, self.known)
        self._handle(message)

    def trained(self, round_: int, step: int, model: Any, stop: bool = False) -> None:
        """Training from the model of `round_` has ended."""
        if round_ != self.round or self.final is not None:
            return
        self._mine = PeerMessage(
            Kind.TRAINED, self.own, round_, step=step, stop=stop, sample=self._sample, view=self.view, model=model
        )
        self._seek_aggregators()

    def woken(self, key: tuple[Any, ...]) -> None:
        """A timer has ended."""
        name, *about = key
        if self.final is not None:
            return
        if name == "hello":
            self._advertise(Kind.JOIN, 10 * self.rules.sample)
            self._do(Wake(key, self.rules.hello))
        elif name == "ping":
            serial, peer, last = about
            sampling = self._samplings.get(serial)
            if sampling is not None and peer in sampling.waiting:
                if last:
                    self._answered(serial, peer, False)
                else:
                    self._ask(serial, peer, True)
        elif name == "gather":
            self._gather_no_more(*about)
        elif name == "ack" and self._mine is not None and self._attempt == about[0]:
            self._suspected |= self._sent_to
            self._seek_aggregators()
        elif name == "watch" and self._gathering_of(about[0]) is not None:
            self._seek(Kind.MEAN, about[0], self.rules.sample)

    def lost(self, peer: int) -> None:
        """The connection to `peer` is lost: no message can be sent or received any more."""
        self._lost.add(peer)
        for serial, sampling in list(self._samplings.items()):
            if peer in sampling.waiting:
                self._answered(serial, peer, False)
        if peer in self._sent_to:
            self._given_up(peer)
        for round_, gathering in list(self._gatherings.items()):
            if gathering.mean is None:
                self._check(round_)
            elif not gathering.delivered and gathering.receivers and not self._others(gathering.receivers):
                self._seek(Kind.MEAN, round_ + 1, self.rules.sample)
        self._ask_for_final()

    def join(self) -> None:
        """Come back, with a larger counter than that of any earlier leave."""
        self._count(True)
        self._advertise(Kind.JOIN, 10 * self.rules.sample)

    def leave(self) -> None:
        """Leave, and announce it."""
        self._count(False)
        self._advertise(Kind.LEAVE, 10 * self.rules.sample)

    # ---- membership

    def _count(self, joined: bool) -> None:
        self.counter += 1
        self.view = self.view.with_entry(self.own, PeerEntry(self.known, self.counter, joined))

    def _advertise(self, kind: Kind, most: int) -> None:
        others = self._present()
        for peer in self._random.sample(others, min(len(others), most)):
            self._send(peer, PeerMessage(kind, self.own, self.known))

    def _others(self, peers: Sequence[int]) -> list[int]:
        """The reachable ones of `peers`, without this one."""
        return [peer for peer in self._reachable(peers) if peer != self.own]

    def _present(self) -> list[int]:
        """All others that have joined."""
        return self._others([peer for peer, entry in sorted(self.view.entries.items()) if entry.joined])

    def _flush(self) -> None:
        """Take joins into the view after a model has been sent, so that no peer joins a sample that is being drawn."""
        for peer, entry in self._pending.items():
            self.view = self.view.with_entry(peer, entry)
        self._pending.clear()

    # ---- messages

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _send(self, to: int, message: PeerMessage) -> None:
        message = replace(message, sender=self.own, counter=self.counter, known=self.known)
        if to == self.own:
            self._to_self.append(message)
        else:
            self._do(Send(to, message))

    def _handle(self, message: PeerMessage) -> None:
        kind, peer = message.kind, message.sender
        if message.view is not None:
            self.view = self.view.merged(message.view)
        if kind == Kind.PING:
            self._send(peer, PeerMessage(Kind.PONG, self.own, message.round))
        elif kind == Kind.PONG:
            for serial, sampling in list(self._samplings.items()):
                if sampling.round == message.round and peer in sampling.waiting:
                    self._answered(serial, peer, True)
        elif kind == Kind.TRAINED:
            self._gather(message)
        elif kind == Kind.MEAN:
            self._send(peer, PeerMessage(Kind.GOT, self.own, message.round))
            if peer != self.own:
                self.known = max(self.known, message.round)
            if message.round > self.round and self.final is None:
                self._adopt(message)
        elif kind == Kind.FINAL:
            self._send(peer, PeerMessage(Kind.GOT, self.own, message.round))
            self._finish(message)
        elif kind == Kind.GOT:
            self._arrived(peer, message.round)
        elif kind in (Kind.ACK, Kind.NACK) and self._mine is not None and self._mine.round == message.round:
            if kind == Kind.ACK:
                self._mine = None
                self._sent_to.clear()
            else:
                self._given_up(peer)
        elif kind == Kind.ASK and self.final is not None:
            self._send(peer, self.final)
        elif kind == Kind.BYE:
            self._byes.add(peer)
            self.lost(peer)

    def _ask_for_final(self) -> None:
        """Ask for the final model, if others have it and its sender may be lost."""
        if self.final is None and self._byes and self._lost - self._byes:
            self._send(min(self._byes), PeerMessage(Kind.ASK, self.own))

    def _finish(self, message: PeerMessage) -> None:
        if self.final is None:
            self.final, self._mine = message, None
            self._samplings.clear()
            self._sent_to.clear()
            self._do(Done(message))

    # ---- drawing a sample

    def _seek(self, kind: Kind, round_: int, wanted: int) -> None:
        """Ping candidates for `round_` until so many have answered."""
        for serial, other in list(self._samplings.items()):
            if other.kind == kind:
                del self._samplings[serial]
        order = self.view.order(round_, self.rules.window, self.own)
        candidates = [peer for peer in self._reachable(order) if peer not in self._suspected]
        if not candidates:
            candidates = self._reachable(order)
            self._suspected.clear()
        self._serial += 1
        self._samplings[self._serial] = Sampling(kind, round_, wanted, deque(candidates))
        self._pull(self._serial)

    def _reachable(self, peers: Sequence[int]) -> list[int]:
        return [peer for peer in peers if peer not in self._lost]

    def _pull(self, serial: int) -> None:
        sampling = self._samplings[serial]
        while sampling.rest and len(sampling.waiting) + len(sampling.answered) < sampling.wanted:
            peer = sampling.rest.popleft()
            if peer == self.own:
                sampling.answered.append(peer)
            else:
                sampling.waiting.add(peer)
                self._ask(serial, peer, False)
        if not sampling.waiting:
            self._drawn(serial)

    def _ask(self, serial: int, peer: int, again: bool) -> None:
        rules = self.rules
        self._send(peer, PeerMessage(Kind.PING, self.own, self._samplings[serial].round))
        self._do(Wake(("ping", serial, peer, again), rules.ping_timeout - rules.resend if again else rules.resend))

    def _answered(self, serial: int, peer: int, there: bool) -> None:
        sampling = self._samplings[serial]
        sampling.waiting.discard(peer)
        if there:
            sampling.answered.append(peer)
        self._pull(serial)

    def _drawn(self, serial: int) -> None:
        sampling = self._samplings.pop(serial)
        order = self.view.order(sampling.round, self.rules.window, self.own)
        found = tuple(sorted(sampling.answered, key=lambda peer: order.index(peer) if peer in order else len(order)))
        if sampling.kind == Kind.TRAINED:
            self._send_trained(sampling.round, found)
        elif len(found) < min(max(2, self.rules.least(sampling.wanted)), len(self._reachable(order))):
            self._do(Wake(("watch", sampling.round), self.rules.ping_timeout))  # alone: the others continue
        else:
            self.asked.append((len(order) - len(sampling.rest), len(found)))
            self._send_mean(sampling.round, found)
        self._flush()

    # ---- a participant

    def _adopt(self, message: PeerMessage) -> None:
        self.round, self._sample, self._mine = message.round, message.sample, None
        self._sent_to.clear()
        self._suspected.discard(self.own)
        self._do(Train(message))

    def _seek_aggregators(self) -> None:
        mine = self._mine
        self._sent_to.clear()
        if mine is not None and self.known > mine.round:
            self._mine = None  # the run has continued, with this model or without it
        elif mine is not None:
            self._seek(Kind.TRAINED, mine.round + 1, self.rules.aggregators)

    def _send_trained(self, round_: int, found: tuple[int, ...]) -> None:
        mine = self._mine
        if mine is None or mine.round + 1 != round_:
            return
        self._attempt += 1
        self._do(Wake(("ack", self._attempt), 2 * self.rules.patience if found else self.rules.ping_timeout))
        self._sent_to = set(found)
        for peer in found:
            self._send(peer, replace(mine, view=self.view))

    def _given_up(self, peer: int) -> None:
        self._suspected.add(peer)
        self._sent_to.discard(peer)
        if not self._sent_to:
            self._seek_aggregators()

    # ---- an aggregator

    def _gather(self, message: PeerMessage) -> None:
        round_, peer = message.round, message.sender
        if self.final is not None:
            return self._send(peer, self.final)
        gathering = self._gatherings.get(round_)
        if round_ + 1 < self.known or (gathering is not None and gathering.delivered):
            return self._send(peer, PeerMessage(Kind.ACK, self.own, round_))
        if gathering is None:
            gathering = self._gatherings[round_] = Gathering(message.sample)
            self._do(Wake(("gather", round_), self.rules.patience))
        if gathering.mean is not None:
            gathering.models.setdefault(peer, None)  # too late for the mean; told when the mean has arrived
            return
        gathering.models.setdefault(peer, message.model)
        gathering.step, gathering.stop = max(gathering.step, message.step), gathering.stop or message.stop
        self._check(round_)

    def _check(self, round_: int) -> None:
        """Take the mean if no further model is awaited."""
        one = self._gatherings[round_]
        expected = [p for p in one.sample if p not in one.models and p not in self._lost]
        if one.mean is None and one.models and (len(one.models) >= self.rules.needed(len(one.sample)) or not expected):
            self._make(round_)

    def _gather_no_more(self, round_: int) -> None:
        gathering = self._gatherings.get(round_)
        if gathering is None or gathering.mean is not None:
            return
        if len(gathering.models) >= self.rules.least(len(gathering.sample)):
            self._make(round_)
            return
        del self._gatherings[round_]
        for peer in gathering.models:
            self._send(peer, PeerMessage(Kind.NACK, self.own, round_))

    def _make(self, round_: int) -> None:
        one = self._gatherings[round_]
        model = self.combine([one.models[peer] for peer in sorted(one.models)])
        one.models = dict.fromkeys(one.models)
        kind = Kind.FINAL if one.stop else Kind.MEAN
        one.mean = PeerMessage(kind, self.own, round_ + 1, step=one.step, stop=one.stop, view=self.view, model=model)
        if kind == Kind.MEAN:
            return self._seek(Kind.MEAN, round_ + 1, self.rules.sample)
        self._finish(one.mean)
        one.receivers = tuple(self._present())
        for peer in one.receivers:
            self._send(peer, one.mean)
        if not one.receivers:
            self._safe(round_)

    def _gathering_of(self, round_: int) -> Gathering | None:
        """The aggregation that made the model of `round_`, if it is here and the run may still need it."""
        one = self._gatherings.get(round_ - 1)
        return one if one is not None and one.mean is not None and self.known <= round_ else None

    def _send_mean(self, round_: int, found: tuple[int, ...]) -> None:
        one = self._gathering_of(round_)
        if one is None or one.mean is None:
            return
        self._do(Wake(("watch", round_), 2 * self.rules.patience))
        one.receivers = found
        for peer in found:
            self._send(peer, replace(one.mean, sample=found, view=self.view))
        if found == (self.own,):
            self._safe(round_ - 1)

    def _arrived(self, peer: int, round_: int) -> None:
        one = self._gatherings.get(round_ - 1)
        if peer != self.own and one is not None and one.mean is not None and not one.delivered:
            self._safe(round_ - 1)

    def _safe(self, round_: int) -> None:
        """Tell the participants of `round_` that the mean has arrived elsewhere, so that they need not keep their models."""
        one = self._gatherings[round_]
        one.delivered, self.known = True, max(self.known, round_ + 1)
        for peer in one.models:
            self._send(peer, PeerMessage(Kind.ACK, self.own, round_))
        for old in [k for k in self._gatherings if k + 1 < self.known]:
            del self._gatherings[old]
