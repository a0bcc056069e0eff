"""Members that meet at a hub, over real sockets: views and votes by the same code as at a lighthouse, names bound to keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from thinwire.comm import gather
from thinwire.comm.secure import Hub
from thinwire.comm.secure.enrol import Enrolment
from thinwire.errors import LinkError, ThinwireError
from thinwire.membership import Membership, Timeouts
from thinwire.membership.book import Book
from thinwire.membership.hub import HubRendezvous

TIMES = Timeouts(
    heartbeat_interval=0.1, heartbeat_timeout=600.0, grace=600.0, connect=600.0, transfer=600.0, vote=700.0, view=600.0
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", patience=0.2, book=Book(600.0)) as made:
        yield made


def member(hub: Hub, name: str, tmp_path: Path, **more: Any) -> Membership:
    enrolment = Enrolment(hub.invite(), name, tmp_path / "keys")
    return Membership(HubRendezvous(enrolment), name, **{"timeouts": TIMES} | more)


def together(bodies: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """What each returned, or raised of ours."""
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            results[name] = bodies[name](name)
        except ThinwireError as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_views_votes_and_a_member_that_goes(hub: Hub, tmp_path: Path) -> None:
    """Ten members, so that the order of names is not that of numbers; one breaks off in the middle of an exchange."""
    names = ["replica-10", "replica-2", "replica-3"]
    gone = threading.Event()

    def body(name: str) -> list[Any]:
        told: list[Any] = []
        with closing(member(hub, name, tmp_path)) as membership:
            view = membership.next_view({"round": 0})
            told.append([one.name for one in view.members])
            told.append(gather(view.group, name.encode(), 64, "packet"))
            told.append(view.decide("land", True, TIMES.vote))
            again = membership.next_view({"round": 1})
            told.append(again.rebuilt)
            if name == "replica-3":
                membership._rendezvous._vote_store.channel.close()  # as a process that was killed: no word of farewell
                return told
            try:
                gather(again.group, name.encode(), 64, "packet")
            except LinkError as error:
                told.append(str(error))
            again.close()
            told.append([one.name for one in membership.next_view({"round": 1}).members])
            gone.set()
        return told

    results = together(dict.fromkeys(names, body))
    print(results)
