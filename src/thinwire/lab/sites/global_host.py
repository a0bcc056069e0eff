"""The global server of a run with sites: a syncer whose replicas are the servers of the sites, and which answers only the sender.

    an update U of site s comes:   G, state ← outer step on w_s·U / Σ w            w as in a syncer
    its reply:                     c = encode(g_s − G),   g_s ← g_s − decode(c)    g_s: G as the site knows it

Each reply is a difference from what the site knows, so the loss of a codec is in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.codecs import Identity
from thinwire.comm.group import Group
from thinwire.drivers.handshake import digest
from thinwire.drivers.saved_state import under
from thinwire.drivers.unequal.host import Heard, Host
from thinwire.drivers.unequal.messages import DELTA, END, LEFT_OUT, MERGE, MOVE, REST, Down, SyncerMessages, Up
from thinwire.drivers.unequal.saved import SiteRecord, load_syncer, state_of_syncer
from thinwire.drivers.unequal.syncer import AgreedFragment, Syncer, decode_body, encode_delta
from thinwire.lab.sites.composition import SiteComposition
from thinwire.lab.sites.timeline import Arrivals
from thinwire.rng import Key


class GlobalHost(Host):
    """The global server of `leaders`, on the first of them. `near` takes the messages to the server of the first site."""

    member = "site"

    def __init__(
        self, leaders: Group, messages: SyncerMessages, method: SiteComposition, anchors: Sequence[Tensor],
        clock: Callable[[], float], tell: Callable[..., None], near: Callable[[Heard], object],
    ) -> None:  # fmt: skip
        upper = method.upper
        agreed = [AgreedFragment(anchor.clone(), upper.outer.init(anchor)) for anchor in anchors]
        exact = [Identity()] * len(anchors)
        syncer = Syncer(replace(upper, feedback=None), agreed, messages.up, exact, 0)
        super().__init__(leaders, messages, syncer, upper, clock, tell)
        self._near, self._known = near, [[anchor.clone() for anchor in anchors] for _ in range(leaders.size)]
        lines = [method.of_site(site).timeline(len(anchors)) for site in range(leaders.size)] if method.slow else []
        self._order = Arrivals(lines) if lines else None

    def wait(self) -> None:
        """Wait until all sites have ended."""
        self._thread.join()

    def anchors(self) -> list[Tensor]:
        """The global model, by fragment."""
        return [one.anchor for one in self.syncer.agreed]

    @property
    def there(self) -> set[int]:
        """The sites that were not lost."""
        return self.rounds.there

    # ---- the thread

    def _run(self) -> None:
        super()._run()
        while not self.inbox.empty():  # the error with which it ended
            self._near(self.inbox.get())

    def _in_real_time(self) -> None:
        """Take updates until all sites have ended: in real time as they come, in virtual time in their order."""
        while waiting := self.rounds.there - self._ended:
            up = self._due(waiting)
            if up is not None and self._read(up) and not self._stopped:
                self._reply(up)

    def _due(self, waiting: Collection[int]) -> Up | None:
        if self._order is None:
            rank = self._take(True, None)
            return self._mail[rank].popleft() if rank is not None and self._mail[rank] else None
        site = self._order.first(waiting)
        up = self._next(site)
        if up is not None and up.kind == DELTA and not up.refused:
            self._order.passed(site)
        return up

    def _read(self, up: Up) -> bool:
        if not up.refused:
            return super()._read(up)
        if not self._stopped:  # a site asks all to stop
            self._stopped = True
            self._send(Down(END, stop=True))
        return False

    def _send(self, down: Down) -> None:
        packet = self.messages.write_down(down)
        self._near(packet)
        for sender in self._senders.values():
            sender.send(packet)

    def _reply(self, up: Up) -> None:
        site, fragment, codec = up.sender, up.fragment, self.messages.down[up.fragment]
        with self.lock:
            _, outcomes = self.syncer.hold(fragment, self.rounds.there)
            agreed, known = self.syncer.agreed[fragment], self._known[site][fragment]
            key = Key(self.syncer.method.seed, fragment, agreed.version, site, MERGE)
            body, _ = encode_delta(codec, None, {}, known - agreed.anchor, key)
            self._known[site][fragment] = known - decode_body(codec, body, known.numel(), key)
        reports = self._reports(outcomes, {})
        packet = self.messages.write_down(Down(MOVE, fragment, agreed.version, digest([known])[:8], reports, body=body))
        if site == 0:
            self._near(packet)
        else:
            self._senders[site].send(packet)
        if LEFT_OUT in outcomes.values():
            self.tell("warning", message=f"an update of site {site} was not finite, and was left out")

    def _end(self) -> None:
        """Take the rest of all sites' training into the global model, after updates that came after a stop."""
        for kind in (DELTA, REST):
            for fragment in sorted({where for of, where, _ in self.syncer.given if of == kind}):
                self.syncer.hold(fragment, self.rounds.there, kind)
        self._send(Down(END))
        for sender in self._senders.values():
            sender.end()

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The global model and what each site knows of it, to be saved while `lock` is held."""
        agreed, facts = state_of_syncer(self.syncer)
        for site, known in enumerate(self._known):
            agreed |= {f"known.{site}.{index}": one.clone() for index, one in enumerate(known)}
        return {f"global.{name}": value for name, value in agreed.items()}, facts

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`. Raises `CheckpointError`."""
        own = under("global.", tensors)
        load_syncer(self.syncer, 0, own, facts)
        self._known = [[own[f"known.{site}.{i}"] for i in range(len(known))] for site, known in enumerate(self._known)]

    def of_site(self, site: int) -> SiteRecord:
        """What a site needs to resume."""
        counted = [self.syncer.counted.get((site, index), 0) for index in range(len(self.syncer.agreed))]
        return SiteRecord(self._known[site], [one.version for one in self.syncer.agreed], counted)
