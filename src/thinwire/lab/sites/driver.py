"""Drives a replica of a run with sites: as `Unequal` does within its site, and at the end with the global model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.driver import Unequal
from thinwire.drivers.unequal.host import Heard, Host
from thinwire.drivers.unequal.messages import ReplicaReport, SyncerMessages
from thinwire.drivers.unequal.saved import SiteRecord
from thinwire.drivers.unequal.syncer import Syncer
from thinwire.drivers.unequal.timeline import done
from thinwire.errors import CheckpointError, LinkError
from thinwire.lab.sites.composition import SiteComposition
from thinwire.lab.sites.global_host import GlobalHost
from thinwire.lab.sites.host import SiteHost
from thinwire.lab.sites.part import PartGroup


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
        self._site = PartGroup(group, self._sites[site])
        return self.strategy.of_site(site), self._site

    def _make_host(self, syncer: Syncer) -> Host:
        leaders = PartGroup(self.group, [ranks[0] for ranks in self._sites])
        elsewhere = self.group.size - self._team.size
        of_site = self.strategy.of_site(leaders.rank)
        self._servers = SiteHost(
            self._site, self._messages, syncer, of_site, self._clock, self._say, self.strategy.upper, leaders, elsewhere,
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
            return self._final_progress
        if not self._line:
            return super().progress
        own = done(self.strategy.slow, self.group.rank, self.step - self._began_at)
        return max(self._final_progress, (self._begun_total + own) // self.group.size)

    def _lost(self) -> str:
        if self.server == 0:
            return "the global server on replica 0 is lost, so all sites end"
        if self.server == self.group.rank:
            return "this site ends"
        return f"the server of this site on replica {self.server} is lost, so the site ends"

    # ---- the end

    @torch.no_grad()
    def finish(self) -> None:
        """Send the training since the last deltas to the servers, and leave the global model in all replicas."""
        if self._finished:
            return
        self._final_progress = self.progress
        super().finish()
        if self.group.rank == self.server:
            final = self._final()
            self._give([self.server + place for place in sorted(self._servers.rounds.there) if place], final)
        else:
            final = self._take_final(self.server)
        for one in self._states:
            one.anchor = final[str(one.index)]
        self._load_anchors()

    def _final(self) -> dict[str, Tensor]:
        """The global model at the server of a site."""
        top = self._servers.top
        if top is None:
            return self._take_final(0)
        top.wait()
        final = {str(index): anchor for index, anchor in enumerate(top.anchors())}
        self._give([self._sites[site][0] for site in sorted(top.there) if site], final)
        top.close()
        return final

    def _give(self, ranks: Sequence[int], final: Mapping[str, Tensor]) -> None:
        """Give the final model to each of `ranks`; the loss of one, after its last message, does not keep it from the others."""
        for rank in ranks:
            try:
                give(self.group, [rank], final, {})
            except LinkError as error:
                self._say("warning", message=f"replica {rank} was lost before it had the final model: {error.cause}")

    def _take_final(self, peer: int) -> dict[str, Tensor]:
        """Raises `LinkError` if `peer` is lost, or does not wait for this replica."""
        try:
            return self._take(peer)
        except LinkError as error:
            raise LinkError(
                f"replica {peer} did not give the global model to this replica, which was too late at the end of the run, or has lost it "
                f"({error.cause}) Take the model of another replica; this one holds that of its site."
            ) from error

    def _take(self, peer: int) -> dict[str, Tensor]:
        return take(self.group, peer, sum(4 * one.anchor.numel() + 256 for one in self._states) + (1 << 16))[0]

    def close(self) -> None:
        super().close()
        if self._host and self._servers.top and not self._finished:
            self._servers.top.close()

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As in `Unequal`; on the first replica of a site with its server, on replica 0 with the global one at the same moment."""
        if not self._host:
            return super().state()
        top = self._servers.top
        with self._servers.lock, top.lock if top else nullcontext():
            tensors, facts = super().state()
            between, facts["site"] = self._servers.state()
            tensors |= between
            if top:
                above, facts["global"] = top.state()
                tensors |= above
        return tensors, facts

    def _load_host(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[int]:
        super()._load_host(tensors, facts)
        if not self._host:
            return []
        if "site" not in facts or (self._servers.top and "global" not in facts):
            raise CheckpointError(
                f"the checkpoint of replica {self.group.rank} does not hold its servers; resume each replica with its own rank and release."
            )
        anew, gone = self._servers.load(tensors, facts["site"], self._above(tensors, facts))
        if anew:
            self._say(
                "warning",
                message="the checkpoint of this site is older than the global server's; the site begins at the global model, and reads again "
                "what it trained since",
            )
        if gone:
            self._say(
                "warning",
                message=f"{gone} updates of this site are not in replica 0's checkpoint; their training is not in the global model",
            )
        return anew

    def _above(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> SiteRecord:
        """What the global server's checkpoint says of this site. Collective among the servers."""
        top = self._servers.top
        if top is None:
            known, said = take(self.group, 0, sum(4 * one.anchor.numel() + 256 for one in self._states) + (1 << 16))
            return SiteRecord([known[str(one.index)] for one in self._states], said["versions"], said["counted"])
        top.load(tensors, facts["global"])
        for site, ranks in enumerate(self._sites[1:], 1):
            record = top.of_site(site)
            known = {str(index): one for index, one in enumerate(record.known)}
            give(self.group, [ranks[0]], known, {"versions": record.versions, "counted": record.counted})
        return top.of_site(0)

    def _begin_at(self, steps: list[int]) -> None:
        mine = self._sites[next(site for site, ranks in enumerate(self._sites) if self.group.rank in ranks)]
        here = [steps[rank] for rank in mine]
        super()._begin_at(here)
        self._begun_total, elsewhere = sum(steps), sum(steps) - sum(here)
        self._reports = (*self._reports, ReplicaReport(taken=elsewhere))
        if self._host:
            self._servers.begin_at(here, elsewhere)
            if self._servers.top:
                self._servers.top.taken = [sum(steps[rank] for rank in ranks) for ranks in self._sites]
