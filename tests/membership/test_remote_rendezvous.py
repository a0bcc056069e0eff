"""A replica that looks for a server: how often, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from thinwire.comm.group import Group
from thinwire.errors import LinkError
from thinwire.membership.remote_rendezvous import RemoteRendezvous
from thinwire.membership.store import RequestChannel
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Presence


class Lost(RemoteRendezvous):
    """Of a server that does not answer, in a time of its own."""

    where, advice = "the hub", "Look for it."

    def __init__(self) -> None:
        super().__init__()
        self.now, self.looked = 0.0, list[float]()

    @property
    def address(self) -> str:
        return ""

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _channel(self) -> RequestChannel:
        self.looked.append(self.now)
        raise LinkError("the hub does not answer.")

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        raise NotImplementedError

    def reaches(self, other: Presence) -> bool:
        raise NotImplementedError


def test_a_server_that_is_back_is_found_within_a_heartbeat_interval() -> None:
    """However long it was away: one that came back much later than the others would count as dead, and lose what it trained."""
    replica = Lost()
    with pytest.raises(LinkError, match=r"the hub does not answer\..*Look for it"):
        replica.call(Presence("oslo", "oslo-1", 1), 300.0)
    assert replica.looked[-1] > 290.0
    gaps = [later - earlier for earlier, later in zip(replica.looked, replica.looked[1:])]
    assert max(gaps) <= Timeouts().heartbeat_interval
