"""Broken connections and a killed hub: no message is lost, doubled or changed, and none is sent again from its beginning."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from group_laws import TIMEOUT, Exchange, peers
from hub_process import HubProcess
from secure_groups import digest_of_trained, run_secure
from tcp_proxy import Proxy

import thinwire as tw
from thinwire.errors import LinkError
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, enrol, join
from thinwire.net.calls import Refused
from thinwire.net.enrol import Admitted, Enrolment
from thinwire.net.group import _SecureTransfer, connected_group
from thinwire.net.hub import LIFETIME
from thinwire.net.invitations import rotate
from thinwire.net.keys import Authorities, Credentials
from thinwire.net.link import HubLink
from thinwire.net.loop import LoopThread
from thinwire.net.messages import BUDGET_NBYTES
from thinwire.net.requests import HubChannel

NBYTES = 4_000_000


@pytest.mark.parametrize("cuts", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_repeatedly_cut_link_loses_no_message(tmp_path, cuts):
    """One of three replicas repeatedly loses its link while it sends."""
    rounds = cuts + 1
    with Hub(tmp_path / "hub") as hub, Proxy(hub.invite(3)) as proxy:
        tokens = [hub.invite(3), proxy.token, hub.invite(3)]
        done, failures, uploaded = threading.Event(), [], [0]

        def replica(index: int) -> None:
            try:
                with join(str(tokens[index]), f"r-{index}", 3, tmp_path / "keys", "", TIMEOUT) as group:
                    for what in range(rounds):
                        small = Exchange(group, 1, what, 100)
                        Exchange(group, 2, what, NBYTES).check()
                        small.check()
                    if index == 1:
                        uploaded[0] = group.uploaded
            except BaseException as failure:
                failures.append(failure)

        def spoil() -> None:
            for number in range(1, cuts + 1):
                proxy.wait(lambda due=number * 4_000_000: proxy.forwarded > due or done.is_set())
                proxy.cut()
                before = proxy.refused
                proxy.wait(lambda before=before: proxy.refused > before or done.is_set())
                proxy.mend()

        threads = [threading.Thread(target=replica, args=(index,)) for index in range(3)]
        spoiler = threading.Thread(target=spoil)
        for thread in (*threads, spoiler):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        with proxy.changed:
            proxy.changed.notify_all()
        spoiler.join()
        assert not failures, failures
        assert proxy.refused >= cuts
        payload = rounds * 2 * NBYTES  # packets differ by receiver
        assert payload < uploaded[0] < payload + cuts * BUDGET_NBYTES


def test_connections_dropped_silently_by_a_router_are_replaced(tmp_path):
    """No end is told that a router drops its packets. The control stream notices within its own bound, and all continue."""
    said, changed, failures = list[str](), threading.Condition(), list[BaseException]()

    def say(line: str) -> None:
        with changed:
            said.append(line)
            changed.notify_all()

    def until(what: str, times: int) -> None:
        with changed:
            assert changed.wait_for(lambda: sum(line.startswith(what) for line in said) >= times or failures, 600.0)
            assert not failures, failures

    with Hub(tmp_path / "hub", say=say) as hub, Proxy(hub.invite(2)) as proxy:
        tokens = {"fast": (proxy.token, 1.0), "near": (hub.invite(), 600.0), "slow": (proxy.token, 600.0)}
        began, forgotten = threading.Barrier(4), threading.Event()

        def replica(name: str) -> None:
            token, silent = tokens[name]
            try:
                link = HubLink(Enrolment(token, name, tmp_path / "keys"), bytes(32), 3, silent=silent)
                with connected_group(link, TIMEOUT, TIMEOUT) as group:
                    Exchange(group, 1, 0, 1_000_000).check()
                    began.wait(600.0)
                    assert forgotten.wait(600.0)
                    Exchange(group, 1, 1, 1_000_000).check()
            except BaseException as failure:
                failures.append(failure)
                began.abort()
                with changed:
                    changed.notify_all()

        threads = [threading.Thread(target=replica, args=(name,)) for name in tokens]
        for thread in threads:
            thread.start()
        try:
            began.wait(600.0)
            proxy.forget()
            forgotten.set()
            until("connected fast", 1)
            assert not any(line.startswith("connected slow") for line in said)  # the slow bound is ten minutes
        finally:
            proxy.cut()
            proxy.mend()
            forgotten.set()
            for thread in threads:
                thread.join()
        assert not failures, failures


def test_a_broadcast_packet_is_uploaded_once(tmp_path):
    with Hub(tmp_path / "hub") as hub:

        def share(group):
            packet = torch.full((NBYTES,), group.rank, dtype=torch.uint8)
            buffers = {peer: torch.zeros(NBYTES, dtype=torch.uint8) for peer in peers(group)}
            group.post(0, dict.fromkeys(peers(group), packet), buffers).wait()
            assert all(bool((buffer == peer).all()) for peer, buffer in buffers.items())
            return group.uploaded

        assert all(NBYTES < uploaded < 1.01 * NBYTES for uploaded in run_secure(hub, 4, share, tmp_path))


@pytest.mark.parametrize(("kills", "standby"), [(1, False), (1, True), pytest.param(5, False, marks=pytest.mark.slow)])
def test_a_hub_restart_changes_no_bit_of_the_model(tmp_path, kills, standby):
    """The real command is killed during transfers, and starts again or in a copy of its folder. The model equals that of thread replicas."""
    hub = HubProcess(tmp_path / "hub")
    rounds, ready = 4 * kills, threading.Barrier(3)
    failures: list[BaseException] = []

    def replica(group):
        Exchange(group, 1, 0, 1000).check()
        try:
            for what in range(rounds):
                if what % 4 == 1:
                    exchange = Exchange(group, 2, what, NBYTES)
                    ready.wait()  # the hub is killed now
                    exchange.check()
                else:
                    Exchange(group, 2, what, NBYTES // 10).check()
        except BaseException:
            ready.abort()  # no thread waits for one that has failed
            raise
        return digest_of_trained(group)

    def kill() -> None:
        try:
            for _ in range(kills):
                ready.wait()
                if standby:
                    hub.replace(tmp_path / "standby")
                else:
                    hub.kill()
                    hub.restart()
        except BaseException as failure:
            failures.append(failure)
            ready.abort()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        ended = run_secure(hub.invite(2), 2, replica, tmp_path / "keys")
    finally:
        ready.abort()
        killer.join()
        hub.close()
    assert not failures, failures
    assert ended == tw.run_threads(2, digest_of_trained)


def test_a_message_that_arrives_as_its_timeout_ends_is_taken(monkeypatch):
    """It comes after the wait has ended without it, and before the time-out is reported. A hub is not needed."""
    transfer = _SecureTransfer(None, 1, [("from", 1)])

    def wait(_: float) -> bool:
        transfer.settled("from", 1, None)
        return False

    monkeypatch.setattr(transfer, "_group", SimpleNamespace(timeout=TIMEOUT))
    monkeypatch.setattr(transfer._over, "wait", wait)
    transfer.wait()
    assert transfer.arrivals.keys() == {1}


def test_a_silent_replica_ends_the_group_after_its_timeout(tmp_path):
    """The error names it and says what to do; threads that wait for another message get it at once."""

    def replica(group):
        if group.rank:
            over.wait()
            return ""
        try:
            group.timeout = 0.5
            early = group.post(1, {}, {1: torch.zeros(9, dtype=torch.uint8)})
            late = group.post(2, {1: torch.zeros(9, dtype=torch.uint8)}, {})
            with pytest.raises(
                LinkError, match=r"from replica 1 \(tag 1\) did not arrive within 0\.5 s; this replica is connected"
            ):
                early.wait()
            group.timeout = TIMEOUT
            with pytest.raises(LinkError, match="did not arrive within"):
                late.wait()
        finally:
            over.set()

    over = threading.Event()
    with Hub(tmp_path / "hub") as hub:
        run_secure(hub, 2, replica, tmp_path)


def test_a_member_that_cannot_store_a_new_authority_tries_again(tmp_path, monkeypatch):
    """Its disk is full while the hub begins to replace its authority. That is no reason to end."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Hub(tmp_path / "hub") as hub:
        member = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        asyncio.run(member.admitted())
        rotate(tmp_path / "hub")
        member.forget()
        hub._thread.run(looked(hub))
        with monkeypatch.context() as patch:
            patch.setattr(enrol, "write_private", full)
            with pytest.raises(
                LinkError, match=r"keys/oslo cannot be used \(.*No space left on device\); make room"
            ) as told:
                asyncio.run(member.admitted())
            assert not isinstance(told.value, Refused)
        asyncio.run(member.admitted())
        assert (tmp_path / "keys/oslo/authority.pem").read_bytes() == Authorities(tmp_path / "hub").trusted


def test_a_certificate_is_used_until_its_end_while_no_other_can_be_got(tmp_path, monkeypatch):
    """The hub cannot be reached half-way through its lifetime; a minute later it can be."""
    now, half = [0.0], LIFETIME.total_seconds() / 2
    monkeypatch.setattr(enrol, "time", SimpleNamespace(time=lambda: now[0]))

    def credentials() -> Credentials:
        async def two() -> list[Admitted]:
            return await asyncio.gather(member.admitted(), member.admitted())

        one, other = asyncio.run(two())
        assert one.credentials is other.credentials
        return one.credentials

    with Hub(tmp_path / "hub") as hub:
        now[0] = time.time()
        member = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        first = credentials()
    now[0] += half + 1
    assert credentials() is first
    with Hub(tmp_path / "hub"):
        assert credentials() is first  # it does not ask at once
        now[0] += 61
        second, end = credentials(), now[0] + 2 * half
        assert second is not first
    for now[0] in (end - 60, end - 20):
        assert credentials() is second
    now[0] = end + 1
    with pytest.raises(LinkError, match="does not answer"):
        credentials()


@pytest.mark.parametrize("who", ["requests", "group"])
def test_a_connection_goes_on_with_a_certificate_that_is_renewed_over_it(who, tmp_path, monkeypatch):
    """The port for joining is closed: strangers may fill it. The hub hears no new connection, and tells nobody of a loss."""
    said, clock = list[str](), SimpleNamespace(time=time.time)
    monkeypatch.setattr(enrol, "time", clock)
    registry = (lambda: MemberRegistry(600.0, said.append)) if who == "requests" else None
    with Hub(tmp_path / "hub", registry=registry) as hub:
        member, thread = Enrolment(hub.invite(), "oslo", tmp_path / "keys"), LoopThread.shared()
        first = asyncio.run(member.admitted())
        clock.time = lambda: first.due - 0.001
        if registry:
            opened = HubChannel(member, "o" * 16, "", thread, 600.0)
        else:
            opened = connected_group(HubLink(member, bytes(32), 1), 600.0, 600.0)
        (before,) = hub._connections.values()
        thread.run(hub._ports[1].close())
        monkeypatch.setattr(hub, "_looked", lambda version: version)
        before.expires = 0.0  # at a look it would be over
        clock.time = lambda: first.due + 1.0
        while before.expires == 0.0:
            time.sleep(0.01)
        while member._admitted.credentials is first.credentials:
            time.sleep(0.01)
        assert list(hub._connections.values()) == [before] and before.expires > time.time()
        if registry:
            opened.ask("here", who="o" * 16)
            assert [line.split(":")[0] for line in said] == ["joined"]  # and none has left
        opened.close()
        thread.release()


async def looked(hub: Hub) -> None:
    """One look of the hub at what commands have changed."""
    hub._look_at_authorities()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_and_hub_restarts_lose_no_message(tmp_path, seed):
    """Three replicas send messages of all sizes under a few tags, while links are cut and the hub stops and restarts."""
    size, messages, faults = 3, 150, 25
    draw = random.Random(seed)
    hub = Hub(tmp_path / "hub")
    proxies = [Proxy(hub.invite()) for _ in range(size)]
    done, failures = threading.Event(), []
    plan = [(draw.randrange(4), draw.choice((1, 50, 9_000, 200_000, 700_000))) for _ in range(messages)]

    def replica(index: int) -> None:
        try:
            with join(str(proxies[index].token), f"r-{index}", size, tmp_path / "keys", "", TIMEOUT) as group:
                own = random.Random(f"{seed} {index}")
                open_ones = []
                for what, (tag, nbytes) in enumerate(plan):
                    open_ones.append(Exchange(group, tag, what, nbytes))
                    while len(open_ones) > own.randrange(1, 8):
                        open_ones.pop(own.randrange(len(open_ones))).check()
                for exchange in open_ones:
                    exchange.check()
        except BaseException as failure:
            failures.append(failure)

    def spoil() -> None:
        nonlocal hub
        for _ in range(faults):
            done.wait(draw.random() * 0.5)
            if draw.random() < 0.3:
                hub.close()
                hub = Hub(tmp_path / "hub")
            else:
                proxy = draw.choice(proxies)
                proxy.cut()
                done.wait(draw.random() * 0.3)
                proxy.mend()

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(size)]
    spoiler = threading.Thread(target=spoil)
    for thread in (*threads, spoiler):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    spoiler.join()
    for proxy in proxies:
        proxy.close()
    hub.close()
    assert not failures, failures
