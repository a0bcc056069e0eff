"""Drives a replica of a run with sites: as `Unequal` does within its site, and at the end with the global model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.comm.part import PartGroup
from thinwire.comm.state_transfer import give, take
from thinwire.decoupled.composition import Composition
from thinwire.decoupled.driver import Unequal
from thinwire.decoupled.global_host import GlobalHost
from thinwire.decoupled.host import Heard, Host
from thinwire.decoupled.messages import SyncerMessages
from thinwire.decoupled.sites_composition import SiteComposition
from thinwire.decoupled.sites_host import SiteHost
from thinwire.decoupled.syncer import Syncer
from thinwire.decoupled.timeline import done
from thinwire.errors import CheckpointError


class SiteReplica(Unequal):
    """The loop of `Halos` on one replica; see `Unequal`.

    During the run the anchors are those of the site. `finish` leaves the global model on all replicas. A lost replica does not delay the
    others. The first replica of a site has its server: if it is lost, its site ends, and the other sites continue. Replica 0 has the
    global server, too, and is needed to the end.
    """

    strategy: SiteComposition  # the `Halos` that attached it
    beyond = 1

    def _near(self, method: Composition, group: Group) -> tuple[Composition, Group]:
        self._sites = self.strategy.ranks(group.size)
        site = next(site for site, ranks in enumerate(self._sites) if group.rank in ranks)
        self.server = self._sites[site][0]
        return self.strategy.of_site(site), PartGroup(group, self._sites[site])

    def _make_host(self, syncer: Syncer) -> Host:
        leaders = PartGroup(self.group, [ranks[0] for ranks in self._sites])
        elsewhere = self.group.size - self._team.size
        of_site = self.strategy.of_site(leaders.rank)
        self._servers = SiteHost(
            self._team, self._messages, syncer, of_site, self._clock, self._say, self.strategy.upper, leaders, elsewhere,
            self._make_top(leaders) if leaders.rank == 0 else None,
        )  # fmt: skip
        return self._servers

    def _make_top(self, leaders: Group) -> Callable[[SyncerMessages, Callable[[Heard], object]], GlobalHost]:
        anchors = [one.anchor for one in self._states]
        return lambda wire, near: GlobalHost(leaders, wire, self.strategy, anchors, self._clock, self._say, near)

    @property
    def progress(self) -> int:
        """Mean number of inner steps of all replicas; in real time by the newest reports of the others."""
        if self._finished:
            return self._told
        if not self._line:
            return super().progress
        return max(self._told, done(self.strategy.slow, self.group.rank, self.step) // self.group.size)

    # ---- the end

    @torch.no_grad()
    def finish(self) -> None:
        """Send the training since the last deltas to the servers, and leave the global model in all replicas."""
        if self._finished:
            return
        self._told = self.progress
        super().finish()
        if self.group.rank == self.server:
            final = self._final()
            if others := [self.server + place for place in sorted(self._servers.rounds.there) if place]:
                give(self.group, others, final, {})
        else:
            final = self._take(self.server)
        for one in self._states:
            one.anchor = final[str(one.index)]
        self._load_anchors()

    def _final(self) -> dict[str, Tensor]:
        """The global model at the server of a site."""
        top = self._servers.top
        if top is None:
            return self._take(0)
        top.wait()
        final = {str(index): anchor for index, anchor in enumerate(top.anchors())}
        if others := [self._sites[site][0] for site in sorted(top.there) if site]:
            give(self.group, others, final, {})
        top.close()
        return final

    def _take(self, peer: int) -> dict[str, Tensor]:
        return take(self.group, peer, sum(4 * one.anchor.numel() + 256 for one in self._states) + (1 << 16))[0]

    def close(self) -> None:
        super().close()
        if self._host and self._servers.top and not self._finished:
            self._servers.top.close()

    # ---- save and resume

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Always raises `CheckpointError`."""
        raise CheckpointError(
            "a run of halos cannot be resumed, because checkpoints do not hold what is between its servers; begin a new run from an "
            "exported model."
        )
