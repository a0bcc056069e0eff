"""What a member says of a hub that is away."""

from __future__ import annotations

import asyncio

import pytest
from tcp_proxy import Proxy

from thinwire.cli.join import outages
from thinwire.comm.secure import Hub, join
from thinwire.comm.secure.enrol import Enrolment
from thinwire.comm.secure.loop import LoopThread
from thinwire.comm.secure.requests import HubChannel
from thinwire.errors import LinkError
from thinwire.membership.registry import MemberRegistry


def test_a_replica_of_a_fixed_group_says_that_its_hub_is_away_and_back(tmp_path):
    """Training waits meanwhile, and would show nothing."""
    said = []
    with Hub(tmp_path / "hub") as hub, Proxy(hub.invite(1)) as proxy:
        with join(str(proxy.token), "oslo", 1, tmp_path / "keys") as group:
            look = outages(group, "oslo", said.append)
            look()
            proxy.cut()
            while not said:
                look()
            proxy.mend()
            while len(said) == 1:
                look()
    assert said[0].startswith("oslo is not connected to the hub (") and said[0].endswith("); it dials again")
    assert said[1:] == ["oslo is connected to the hub again"]


def test_a_hub_that_is_away_is_named_without_the_words_of_grpc(tmp_path):
    thread = LoopThread.shared()
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0)) as hub:
        member = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        asyncio.run(member.admitted())
    with pytest.raises(LinkError) as told:
        HubChannel(member, "o" * 16, "", thread, 600.0)
    assert str(told.value) == "the hub does not answer: Connection refused"
    thread.release()
