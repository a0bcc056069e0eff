"""Who waits for a group at a hub hears who is here, and how many are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
from group_laws import TIMEOUT
from raw_member import RawMember, admitted

from thinwire.comm.group import gather
from thinwire.errors import LinkError
from thinwire.net import Hub, SecureGroup, frames, join
from thinwire.net.versions import stating_run

Joining = Callable[[Hub, str, "Queue[str]"], "Future[SecureGroup]"]


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Joining]:
    """Joins a group of three on another thread."""
    with ThreadPoolExecutor() as pool:

        def begun(hub: Hub, name: str, said: Queue[str]) -> Future[SecureGroup]:
            return pool.submit(join, str(hub.invite()), name, 3, tmp_path / "keys", timeout=TIMEOUT, say=said.put)

        yield begun


def closed(*groups: Future[SecureGroup]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.result().close(), groups))


def test_a_member_hears_who_comes_and_who_leaves_until_all_are_here(tmp_path: Path, joining: Joining) -> None:
    """Its group then carries messages as if nothing had been said before the welcome."""
    said, other = Queue[str](), Queue[str]()
    with Hub(tmp_path / "hub") as hub, ThreadPoolExecutor() as pool:
        oslo = joining(hub, "oslo", said)
        assert said.get() == "waits for 2 of 3 members; here: oslo"
        with RawMember(hub.invite(), admitted(hub.invite(), "bern", tmp_path), frames.group_label(3, "")) as bern:
            bern.hello(3)
            assert said.get() == "waits for 1 of 3 members; here: bern, oslo"
        assert said.get() == "waits for 2 of 3 members; here: oslo"
        lima = joining(hub, "lima", other)
        assert said.get() == other.get() == "waits for 1 of 3 members; here: lima, oslo"
        groups = lima, oslo, joining(hub, "rome", other)
        words = [pool.submit(gather, group.result(), name, 9, "x") for group, name in zip(groups, (b"l", b"o", b"r"))]
        assert [one.result() for one in words] == [[b"l", b"o", b"r"]] * 3
        closed(*groups)
    assert said.empty() and other.empty()


def test_a_copy_of_a_process_that_waits_is_refused(tmp_path: Path, joining: Joining) -> None:
    """It hears from where the other came, which keeps its place."""
    said, others = Queue[str](), Queue[str]()
    with Hub(tmp_path / "hub") as hub:
        before = joining(hub, "oslo", said)
        said.get()
        with pytest.raises(
            LinkError, match=r"oslo trains already: .* connected from 127\.0\.0\.1:\d+ .* came from 127\.0\.0\.1"
        ):
            joining(hub, "oslo", others).result()
        closed(before, joining(hub, "lima", others), joining(hub, "rome", others))


def test_a_member_that_asks_for_another_number_of_replicas_hears_what_the_others_asked_for(tmp_path: Path) -> None:
    """Both groups would wait for ever. Another run has any number, and who comes again with the right one is not in its own way."""
    said = Queue[str]()
    with Hub(tmp_path / "hub") as hub, ThreadPoolExecutor() as pool:

        def asks(name: str, size: int, run: str = "") -> Future[SecureGroup]:
            return pool.submit(join, str(hub.invite()), name, size, tmp_path / "keys", run, TIMEOUT, say=said.put)

        lima = asks("lima", 2)
        assert said.get() == "waits for 1 of 2 members; here: lima"
        told = "oslo asks for a group of 3 members, and lima, which waits for the same run, for one of 2; give all replicas the same number"
        with pytest.raises(LinkError, match=told):
            asks("oslo", 3).result()
        closed(asks("oslo", 1, "another"))
        again = asks("lima", 1)
        closed(again, lima, asks("oslo", 2))


def test_a_member_of_one_run_cannot_hold_up_another_with_another_number_of_replicas(tmp_path: Path) -> None:
    """It waits for its own run, and states that it is in the other one, whose members would be refused."""
    with Hub(tmp_path / "hub") as hub:
        oslo = admitted(hub.invite(runs=["red"]), "oslo", tmp_path)
        with RawMember(hub.invite(), oslo, frames.group_label(2, "red")) as member:
            member.more = stating_run(frames.run_digest("blue"))[1:]
            assert "oslo was invited to red and may join no other run" in member.hello(2).refusal()[1]
