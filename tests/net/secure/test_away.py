"""What a member says of a hub that is away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tcp_proxy import Proxy

from thinwire.app.cli.join import outages
from thinwire.errors import LinkError
from thinwire.membership import Membership
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, Token, admit, enrol, join
from thinwire.net.enrol import Enrolment
from thinwire.net.loop import LoopThread
from thinwire.net.rendezvous import HubRendezvous
from thinwire.net.requests import HubChannel


def cut_and_mended(proxy: Proxy, look: Callable[[], None], said: list[str]) -> None:
    """Returns when the replica has said both."""
    proxy.cut()
    while not said:
        look()
    proxy.mend()
    while len(said) == 1:
        look()


def test_a_replica_of_a_fixed_group_says_that_its_hub_is_away_and_back(tmp_path):
    """Training waits meanwhile, and would show nothing."""
    said: list[str] = []
    with Hub(tmp_path / "hub") as hub, Proxy(hub.invite(1)) as proxy:
        with join(str(proxy.token), "oslo", 1, tmp_path / "keys") as group:
            look = outages(group, "oslo", said.append)
            look()
            cut_and_mended(proxy, look, said)
    assert said[0].startswith(f"oslo is not connected to {proxy.token.where} (") and said[0].endswith(
        "); it dials again"
    )
    assert said[1:] == ["oslo is connected to the hub again"]


def test_a_replica_of_a_fixed_group_says_which_other_one_has_lost_the_hub(tmp_path):
    """One that closes its group has not."""
    said: list[str] = []
    with Hub(tmp_path / "hub") as hub, Proxy(hub.invite()) as proxy, ThreadPoolExecutor() as pool:
        lima = pool.submit(join, str(proxy.token), "lima", 2, tmp_path / "keys")
        with join(str(hub.invite()), "oslo", 2, tmp_path / "keys") as group:
            look = outages(group, "oslo", said.append)
            cut_and_mended(proxy, look, said)
            lima.result().close()
            while "lima" not in group.gone:
                look()
            for _ in range(20):
                look()
    assert said == [
        "lima is not connected to the hub; after a minute it counts as lost",
        "lima is connected to the hub again",
    ]


def test_a_hub_that_is_away_is_named_without_the_words_of_grpc(tmp_path):
    thread = LoopThread.shared()
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0)) as hub:
        member = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        asyncio.run(member.admitted())
    with pytest.raises(LinkError) as told:
        HubChannel(member, "o" * 16, "", thread, 600.0)
    assert str(told.value) == "the hub does not answer: Connection refused"
    thread.release()
    with closing(Membership(HubRendezvous(member), "oslo")) as oslo, pytest.raises(LinkError) as told:
        oslo.next_view({}, 0.01)
    address = f"the hub at 127.0.0.1:{hub.port} does not serve this replica (the hub does not answer: Connection refused). Waited"
    assert address in str(told.value)


def test_a_machine_that_gets_no_answer_at_all_is_told_where_and_for_how_long(tmp_path, monkeypatch):
    """As behind a firewall, which drops what is sent to a port."""
    monkeypatch.setattr(enrol, "ANSWER_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        token = Token("127.0.0.1", port - 1, port, bytes(32), bytes(8), bytes(16))
        with pytest.raises(
            LinkError, match=rf"127\.0\.0\.1:{port} does not answer \(nothing within 0\.01 s\)\. Check that"
        ):
            admit(str(token), "oslo", tmp_path)
