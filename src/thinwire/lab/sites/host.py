"""The server of a site, which is a syncer with a global server above it.

    after K rounds of a fragment:   U = b − a departs,   b ← a                     a: the site's anchor
    the reply lands:                g ← g − decode(reply),   z = (1 − α)·(b − g),   b ← b − z
    and on all replicas of a site:  a ← a − decode(encode(z + e)),   e as in a round

b is the anchor as the global server knows it, and g the global model as the site knows it. So the training between a departure and its
reply is in the next U, once.

A request to stop goes to the global server, which answers no update after it and tells all sites. They send no update after it. So of what
replicas save then, an update in flight is either counted or not, and a resume takes it back or takes the model that the reply would have
brought.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.handshake import digest
from thinwire.drivers.saved_state import under
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.host import Closed, Heard, Host
from thinwire.drivers.unequal.messages import DELTA, DOWN, END, MERGE, REST, UP, Down, ReplicaReport, SyncerMessages, Up
from thinwire.drivers.unequal.peer_streams import LEFT, PeerReceiver, PeerSender, of_this_replica
from thinwire.drivers.unequal.rounds import HeldRound
from thinwire.drivers.unequal.saved import SiteRecord
from thinwire.drivers.unequal.syncer import Syncer, decode_body, encode_delta
from thinwire.errors import DisagreementError, LinkError, PacketError, PeerError
from thinwire.lab.sites.composition import SiteComposition
from thinwire.lab.sites.global_host import GlobalHost
from thinwire.lab.sites.part import PartGroup
from thinwire.lab.sites.timeline import HeldMerge
from thinwire.rng import Key
from thinwire.types import State

_ABOVE = -1  # the sender of a message from the global server


@dataclass(frozen=True)
class SentUpdate:
    """An update that has no reply yet: what its fragment was before it."""

    base: Tensor
    feedback: State
    tokens: float
    steps: int
    rounds: int


@dataclass
class Exchanged:
    """What a site's server knows of a fragment at the global one."""

    base: Tensor  # b
    known: Tensor  # g
    feedback: State
    version: int = 0  # of g
    number: int = 0  # of the next update
    rounds: int = 0  # since the last update
    away: SentUpdate | None = None
    tokens: float = 0.0  # since the last update
    steps: int = 0

    def take_back(self) -> None:
        """Undo the departure of the update without a reply: its training is in the next one."""
        if sent := self.away:
            self.base, self.feedback, self.away, self.number = sent.base, sent.feedback, None, self.number - 1
            self.tokens, self.steps = self.tokens + sent.tokens, self.steps + sent.steps
            self.rounds += sent.rounds

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, to be saved."""
        named = {"base": self.base, "known": self.known, **{f"feedback.{k}": v for k, v in self.feedback.items()}}
        if sent := self.away:
            named |= {"sent.base": sent.base, **{f"sent.feedback.{k}": v for k, v in sent.feedback.items()}}
        return {name: value.clone() for name, value in named.items()}


class SiteHost(Host):
    """The server of the site of `group`, on its replica 0.

    `upper` is the composition of the global server, `leaders` the group of all sites' servers, `elsewhere` the number of replicas at
    other sites; `top` makes the global server, if it is here.
    """

    def __init__(
        self, group: PartGroup, messages: SyncerMessages, syncer: Syncer, method: SiteComposition,
        clock: Callable[[], float], tell: Callable[..., None], upper: Composition, leaders: Group, elsewhere: int,
        top: Callable[[SyncerMessages, Callable[[Heard], object]], GlobalHost] | None,
    ) -> None:  # fmt: skip
        super().__init__(group, messages, syncer, method, clock, tell)
        self._method, self._upper, self._leaders, self._elsewhere = method, upper, leaders, elsewhere
        self._members = group.members
        self._wire = SyncerMessages(leaders.size, 0, messages.numels, messages.up, messages.down)
        self.top = top(self._wire, lambda heard: self._answer(0, heard)) if top else None
        self._exchanged = [
            Exchanged(one.anchor.clone(), one.anchor.clone(), method.feedback.init(one.anchor.numel()) if method.feedback else {})
            for one in syncer.agreed
        ]  # fmt: skip
        self._others: tuple[float, float, float] | None = (
            None  # inner steps at other sites, their speed, when it was so
        )
        self._begun = (0, 0)  # inner steps at which a resumed run began: here, and elsewhere
        self._replies: queue.Queue[Heard | None] = queue.Queue()
        self._sender: PeerSender | None = None
        self._ending = self._asked = self._halted = False

    def start(self) -> None:
        if self.top:
            self.top.start()
        else:
            # The receiver reports a loss.
            self._sender = PeerSender(self._leaders, 0, UP, lambda *_: None, len(self._wire.numels))
            PeerReceiver(self._leaders, 0, DOWN, lambda: self._wire.buffer(DOWN), self._answer)
        super().start()

    def close(self) -> None:
        self._replies.put(None)
        super().close()
        if self._sender:
            self._sender.end()
            self._sender.wait(self.rounds.patience)

    # ---- to and from the global server

    def _answer(self, _: int, heard: Heard) -> bool:
        over = self._read_above(heard)
        self._replies.put(heard)
        self._heard.put((_ABOVE, heard))  # wakes the thread
        return over

    def _read_above(self, heard: Heard) -> bool:
        if isinstance(heard, PeerError):
            return True
        try:
            down = self._wire.read_down(heard)
        except PacketError:
            return True
        self._halted |= down.kind == END and down.stop and not down.version
        return down.kind == END and not down.stop

    def _raise(self, up: Up) -> None:
        packet = self._wire.write_up(up)
        if self.top:
            self.top.give(packet)
        elif self._sender:
            self._sender.send(packet)

    def _push(self, fragment: int, kind: int) -> None:
        """Send the update of a fragment."""
        one, anchor, method = self._exchanged[fragment], self.syncer.agreed[fragment].anchor, self._method
        key = Key(self._upper.seed, fragment, one.number, method.site, kind)
        one.away = SentUpdate(one.base, one.feedback, one.tokens, one.steps, one.rounds)
        body, one.feedback = encode_delta(
            self._wire.up[fragment], method.feedback, one.feedback, one.base - anchor, key
        )
        speed = sum(1 / seconds for seconds in self.seconds if seconds)
        self._raise(
            Up(kind, method.site, fragment, one.number, one.version, one.steps, sum(self.taken), one.tokens, 1 / speed if speed else 0.0, body=body)
        )  # fmt: skip
        one.base, one.number, one.rounds, one.tokens, one.steps = anchor, one.number + 1, 0, 0.0, 0

    def _take_over(self, heard: Heard) -> bool:
        """Read a message of the global server; return whether it was a reply, which is merged then."""
        if isinstance(heard, PeerError):
            raise heard if of_this_replica(heard) else PeerError(f"the global server is lost: {heard}")
        down = self._wire.read_down(heard)
        if down.left:
            raise LinkError(LEFT)
        if down.kind != END:
            self._merge(down)
            return True
        if not down.stop:
            raise PeerError("the global server has ended the run without this site")
        if not down.version:
            self._halt()
        elif self.timeline is None:  # in virtual time replicas know how far the others are
            self._announce_finish(down.version)
        return False

    def _halt(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._send(Down(END, stop=True))

    def _take(self, block: bool, until: float | None) -> int | None:
        rank = super()._take(block, until)
        if self.timeline and self._halted:  # in virtual time replies are read when they land
            self._halt()
        return rank

    def _merge(self, down: Down) -> None:
        one = self._exchanged[down.fragment]
        if down.body is None or down.digest != digest([one.known])[:8]:
            raise DisagreementError(
                f"the global server has another model of site {self._method.site} than this site; start the run anew."
            )
        key = Key(self._upper.seed, down.fragment, down.version, self._method.site, MERGE)
        with self.lock:
            known = one.known - decode_body(self._wire.down[down.fragment], down.body, one.known.numel(), key)
            said = self._move(down.fragment, known, down.version)
        others = [report for site, report in enumerate(down.reports) if site != self._method.site]
        self._others = sum(one.taken for one in others), sum(one.speed for one in others), self.clock()
        self._send(Down(MERGE, said.fragment, said.version, said.digest, self._reports({}, {}), body=said.body))

    def _move(self, fragment: int, known: Tensor, version: int) -> Down:
        """Merge the global model `known` of `version` into the site's. Returns the message to its replicas."""
        one = self._exchanged[fragment]
        shift = (one.base - known).mul_(1 - self._method.merge)
        one.base, one.known, one.version, one.away = one.base - shift, known, version, None
        return self.syncer.merge(fragment, shift)

    # ---- what a syncer does, and more

    def _number(self, rank: int) -> int:
        return self._members[rank]

    def _reports(self, outcomes: Mapping[int, int], waited: Mapping[int, float]) -> tuple[ReplicaReport, ...]:
        """The reports of a site's replicas, and one of all replicas elsewhere. Before the first reply these are taken to be as fast."""
        own = super()._reports(outcomes, waited)
        if self._others:
            taken, speed, at = self._others
            ahead = min(speed * (self.clock() - at), float(self._elsewhere * self._method.every * self._method.apart))
            return *own, ReplicaReport(taken=int(taken + ahead), speed=speed)
        share, (here, elsewhere) = self._elsewhere / self.group.size, self._begun
        speed = share * sum(one.speed for one in own)
        return *own, ReplicaReport(taken=int(elsewhere + share * (sum(one.taken for one in own) - here)), speed=speed)

    def _read(self, up: Up) -> bool:
        one = self._exchanged[up.fragment]
        if up.stop and not self._asked:
            self._asked = True
            self._raise(Up(DELTA, self._method.site, refused=True, stop=True))
        with self.lock:
            waits = super()._read(replace(up, stop=False))
            if waits or (up.kind == REST and up.body is not None):
                one.tokens, one.steps = one.tokens + up.tokens, one.steps + up.steps
        return waits

    def _hold(self, held: HeldRound, kind: int = DELTA) -> None:
        if isinstance(held, HeldMerge):
            self._await_reply()
            return
        with self.lock:
            super()._hold(held, kind)
            one = self._exchanged[held.fragment]
            one.rounds += 1
            if one.rounds >= self._method.apart and not (one.away or self._ending or self._stopped):
                self._push(held.fragment, DELTA)

    def _await_reply(self) -> None:
        while not self._stopped:  # after a stop none comes
            if (heard := self._replies.get()) is None:
                raise Closed
            if self._take_over(heard):
                return

    def _between(self) -> None:
        while self._cut_off() or not self._replies.empty():
            if (heard := self._replies.get()) is None:
                raise Closed
            self._take_over(heard)

    def _cut_off(self) -> bool:
        """Whether this site must wait for the global server, because all its updates have been in flight for two of its periods or longer. Its
        replicas wait then, too. Later rounds would be one long update from a model that the other sites have left.
        """
        if self._stopped or self._finish_announced_at is not None:
            return False
        return all(one.away and one.rounds >= 2 * self._method.apart for one in self._exchanged)

    def _end(self) -> None:
        """Hold the last rounds of the site, and send the rest of its training."""
        self._ending = True
        super()._end()
        for fragment in range(len(self._exchanged)):
            self._push(fragment, REST)
        self._raise(Up(END, self._method.site, number=max(1, self._final_progress), taken=sum(self.taken)))
        if self._sender:
            self._sender.end()

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], list[Any]]:
        """What is between this server and the global one, to be saved while `lock` is held."""
        tensors = {
            f"site.{i}.{name}": kept for i, one in enumerate(self._exchanged) for name, kept in one.tensors().items()
        }
        facts = []
        for index, one in enumerate(self._exchanged):
            # they are sent again
            waiting = [given.up for (_, of, _), given in self.syncer.given.items() if of == index]
            tokens, steps = sum(up.tokens for up in waiting), sum(up.steps for up in waiting)
            sent = one.away and [one.away.tokens, one.away.steps, one.away.rounds]
            facts.append([one.version, one.number, one.rounds, one.tokens - tokens, one.steps - steps, sent])
        return tensors, facts

    def load(self, tensors: Mapping[str, Tensor], facts: Sequence[Any], above: SiteRecord) -> tuple[list[int], int]:
        """Resume from `state()` and from what the global server's checkpoint says of this site, after the syncer is loaded.

        Returns the fragments that begin at the global model, because the site's checkpoint is older, and the number of lost updates.
        """
        anew, gone = list[int](), 0
        for index, (one, kept) in enumerate(zip(self._exchanged, facts)):
            named, due, known = under(f"site.{index}.", tensors), above.counted[index], above.known[index]
            one.version, one.number, one.rounds, one.tokens, one.steps, sent = kept
            one.base, one.known, one.feedback = named["base"], known, under("feedback.", named)
            one.away = SentUpdate(named["sent.base"], under("sent.feedback.", named), *sent) if sent else None
            if due > one.number:
                anew.append(index)
                self._begin_anew(index, known, above.versions[index], due)
                continue
            if one.away and due == one.number:  # it was counted, and its reply was lost
                self._move(index, known, above.versions[index])
            one.take_back()
            gone, one.number = gone + max(0, one.number - due), due
            one.version = min(one.version, above.versions[index])
            one.rounds = one.rounds if self.timeline is None else 0  # the timeline begins again
        return anew, gone

    def _begin_anew(self, index: int, known: Tensor, version: int, number: int) -> None:
        agreed, feedback = self.syncer.agreed[index], self._method.feedback
        agreed.anchor, agreed.state = known.clone(), self._method.outer.init(known)
        agreed.residual = None if agreed.residual is None else agreed.residual.zero_()
        residual = feedback.init(known.numel()) if feedback else {}
        self._exchanged[index] = Exchanged(known, known, residual, version, number)

    def begin_at(self, here: list[int], elsewhere: int) -> None:
        """Take the inner steps at which the replicas of this site resume, and the sum of all others."""
        self.taken, self._begun = here, (sum(here), elsewhere)
