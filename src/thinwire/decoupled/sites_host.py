"""The server of a site, which is a syncer with a global server above it.

    after K rounds of a fragment:   U = b − a departs,   b ← a                     a: the site's anchor
    the reply lands:                g ← g − decode(reply),   z = (1 − α)·(b − g),   b ← b − z
    and on all replicas of a site:  a ← a − decode(encode(z + e)),   e as in a round

b is the anchor as the global server knows it, and g the global model as the site knows it. So the training between a departure and its
reply is in the next U, once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.decoupled.composition import Composition
from thinwire.decoupled.global_host import GlobalHost
from thinwire.decoupled.host import Closed, Heard, Host
from thinwire.decoupled.messages import DELTA, DOWN, END, MERGE, REST, UP, Down, ReplicaReport, SyncerMessages, Up
from thinwire.decoupled.peer_streams import PeerReceiver, PeerSender
from thinwire.decoupled.rounds import HeldRound
from thinwire.decoupled.sites_composition import SiteComposition
from thinwire.decoupled.sites_timeline import HeldMerge
from thinwire.decoupled.syncer import Syncer, encoded, said_by
from thinwire.errors import DisagreementError, PacketError, PeerError
from thinwire.rng import Key
from thinwire.runtime.handshake import digest
from thinwire.types import State

_ABOVE = -1  # the sender of a message from the global server


@dataclass
class Exchanged:
    """What a site's server knows of a fragment at the global one."""

    base: Tensor  # b
    known: Tensor  # g
    feedback: State
    version: int = 0  # of g
    number: int = 0  # of the next update
    rounds: int = 0  # since the last update
    away: bool = False  # an update has no reply yet
    tokens: float = 0.0  # since the last update
    steps: int = 0


class SiteHost(Host):
    """The server of the site of `group`, on its replica 0.

    `upper` is the composition of the global server, `leaders` the group of all sites' servers, `elsewhere` the number of replicas at
    other sites; `top` makes the global server, if it is here.
    """

    def __init__(
        self, group: Group, messages: SyncerMessages, syncer: Syncer, method: SiteComposition,
        clock: Callable[[], float], tell: Callable[..., None], upper: Composition, leaders: Group, elsewhere: int,
        top: Callable[[SyncerMessages, Callable[[Heard], object]], GlobalHost] | None,
    ) -> None:  # fmt: skip
        super().__init__(group, messages, syncer, method, clock, tell)
        self._method, self._upper, self._leaders, self._elsewhere = method, upper, leaders, elsewhere
        self._wire = SyncerMessages(leaders.size, 0, messages.numels, messages.up, messages.down)
        self.top = top(self._wire, lambda heard: self._answer(0, heard)) if top else None
        self._exchanged = [
            Exchanged(one.anchor.clone(), one.anchor.clone(), method.feedback.init(one.anchor.numel()) if method.feedback else {})
            for one in syncer.agreed
        ]  # fmt: skip
        self._others: tuple[float, float, float] | None = (
            None  # inner steps at other sites, their speed, when it was so
        )
        self._replies: queue.Queue[Heard | None] = queue.Queue()
        self._sender: PeerSender | None = None
        self._ending = False

    def start(self) -> None:
        if self.top:
            self.top.start()
        else:
            self._sender = PeerSender(self._leaders, 0, UP, lambda *_: None)  # the receiver reports it
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
        self._replies.put(heard)
        self._heard.put((_ABOVE, heard))  # wakes the thread
        if isinstance(heard, PeerError):
            return True
        try:
            down = self._wire.read_down(heard)
        except PacketError:
            return True
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
        body, one.feedback = encoded(self._wire.up[fragment], method.feedback, one.feedback, one.base - anchor, key)
        speed = sum(1 / seconds for seconds in self.seconds if seconds)
        self._raise(
            Up(kind, method.site, fragment, one.number, one.version, one.steps, sum(self.taken), one.tokens, 1 / speed if speed else 0.0, body=body)
        )  # fmt: skip
        one.base, one.number, one.rounds, one.away, one.tokens, one.steps = anchor, one.number + 1, 0, True, 0.0, 0

    def _take_over(self, heard: Heard) -> bool:
        """Read a message of the global server; return whether it was a reply, which is merged then."""
        if isinstance(heard, PeerError):
            raise PeerError(f"the global server is lost: {heard}")
        down = self._wire.read_down(heard)
        if down.kind != END:
            self._merge(down)
            return True
        if down.stop and not down.version and not self._stopped:
            self._stopped = True
            self._send(Down(END, stop=True))
        elif down.version and self.timeline is None:  # in virtual time replicas know how far the others are
            self._notice(down.version)
        return False

    def _merge(self, down: Down) -> None:
        one = self._exchanged[down.fragment]
        if down.body is None or down.digest != digest([one.known])[:8]:
            raise DisagreementError(
                f"the global server has another model of site {self._method.site} than this site; start the run anew."
            )
        key = Key(self._upper.seed, down.fragment, down.version, self._method.site, MERGE)
        one.known = one.known - said_by(self._wire.down[down.fragment], down.body, one.known.numel(), key)
        shift = (one.base - one.known).mul_(1 - self._method.merge)
        one.base, one.version, one.away = one.base - shift, down.version, False
        others = [of for site, of in enumerate(down.each) if site != self._method.site]
        self._others = sum(of.taken for of in others), sum(of.speed for of in others), self.clock()
        with self.lock:
            said = self.syncer.merge(down.fragment, shift)
            self._send(Down(MERGE, said.fragment, said.version, said.digest, self._each({}, {}), body=said.body))

    # ---- what a syncer does, and more

    def _each(self, outcomes: Mapping[int, int], waited: Mapping[int, float]) -> tuple[ReplicaReport, ...]:
        """The reports of a site's replicas, and one of all replicas elsewhere. Before the first reply these are taken to be as fast."""
        own = super()._each(outcomes, waited)
        if self._others:
            taken, speed, at = self._others
            ahead = min(speed * (self.clock() - at), float(self._elsewhere * self._method.every * self._method.apart))
            return *own, ReplicaReport(taken=int(taken + ahead), speed=speed)
        share = self._elsewhere / self.group.size
        speed = share * sum(of.speed for of in own)
        return *own, ReplicaReport(taken=int(share * sum(of.taken for of in own)), speed=speed)

    def _read(self, up: Up) -> bool:
        one, stopped = self._exchanged[up.fragment], self._stopped
        waits = super()._read(up)
        if waits or (up.kind == REST and up.body is not None):
            one.tokens, one.steps = one.tokens + up.tokens, one.steps + up.steps
        if self._stopped and not stopped:
            self._raise(Up(DELTA, self._method.site, refused=True, stop=True))
        return waits

    def _hold(self, held: HeldRound, kind: int = DELTA) -> None:
        if isinstance(held, HeldMerge):
            self._await_reply()
            return
        super()._hold(held, kind)
        one = self._exchanged[held.fragment]
        one.rounds += 1
        if one.rounds >= self._method.apart and not one.away and not self._ending:
            self._push(held.fragment, DELTA)

    def _await_reply(self) -> None:
        while (heard := self._replies.get()) is not None:
            if self._take_over(heard):
                return
        raise Closed

    def _between(self) -> None:
        while not self._replies.empty():
            if (heard := self._replies.get()) is None:
                raise Closed
            self._take_over(heard)

    def _end(self) -> None:
        """Hold the last rounds of the site, and send the rest of its training."""
        self._ending = True
        super()._end()
        for fragment in range(len(self._exchanged)):
            self._push(fragment, REST)
        self._raise(Up(END, self._method.site, number=max(1, self._told), taken=sum(self.taken)))
        if self._sender:
            self._sender.end()
