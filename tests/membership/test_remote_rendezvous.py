"""A replica and its server, without sockets and in virtual time: how it finds the server, what it requests, and how it handles answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.comm.group import Group
from thinwire.errors import DisagreementError, LinkError
from thinwire.membership.remote_rendezvous import RemoteRendezvous
from thinwire.membership.rendezvous import AnswerLostError
from thinwire.membership.store import ChannelVoteStore, RequestChannel
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Presence


class Lost(RemoteRendezvous):
    """A rendezvous whose server does not answer, in virtual time."""

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


class Line:
    """A connection with prepared answers in order; an error among them is raised."""

    heartbeat_timeout, begun = 5.0, False

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.asked, self.answers, self.closed = list[tuple[str, dict[str, Any]]](), list(answers), 0

    def ask(self, do: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        self.asked.append((do, fields))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


class Linked(Lost):
    """A rendezvous whose server answers over these connections, one after another."""

    def __init__(self, *lines: Line) -> None:
        super().__init__()
        self.lines, self.told = list(lines), list[tuple[str, float]]()
        self._name, self._observe = "oslo", lambda kind, fields: self.told.append((fields["reason"], fields["seconds"]))

    def _channel(self) -> RequestChannel:
        self.looked.append(self.now)
        return self.lines[len(self.looked) - 1]


class Ticks(threading.Event):
    """An event that is set after `count` waits; it records how long they were."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.waits = count, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return len(self.waits) > self.count


def test_heartbeats_reconnect_and_three_failures_are_reported() -> None:
    """After the first failure it tries again at once. Unused keys are deleted at most 256 at a time, and again if that may have been lost."""
    gone, beat, forget = LinkError("gone"), ("beat", {}), "forget"
    lines = [
        Line({}, {}, {}, gone), Line({}, {}, {}, DisagreementError("no")), Line(gone), Line(gone), Line(gone), Line(),
    ]  # fmt: skip
    replica = Linked(*lines)
    replica._unused_keys = [str(number) for number in range(300)]
    replica._left = ticks = Ticks(9)
    told: list[tuple[str, float, int]] = []
    replica._observe = lambda kind, fields: told.append((fields["reason"], fields["seconds"], len(replica.looked)))
    replica._vote_store = ChannelVoteStore(lines[0], [])
    replica._beat()
    assert ticks.waits == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    kept = [fields["keys"] for line in lines for do, fields in line.asked if do == forget]
    assert [len(keys) for keys in kept] == [256, 44, 44] and {key for keys in kept for key in keys} == {
        *map(str, range(300))
    }
    assert [do for do, _ in lines[0].asked] == ["beat", forget, "beat", forget]
    assert [line.asked for line in lines[2:]] == [[beat]] * 3 + [[beat, ("leave", {})]]
    assert told == [("the hub does not hear this replica (gone)", 1.0, 4)]
    assert [line.closed for line in lines] == [0, 0, 0, 0, 0, 1]


def test_no_heartbeat_is_sent_before_the_server_is_found() -> None:
    replica = Linked()
    replica._left = ticks = Ticks(3)
    replica._beat()
    assert not replica.looked and len(ticks.waits) == 4


def test_a_call_keeps_members_of_its_version_and_continues_at_a_restarted_server() -> None:
    own, other = Presence("oslo", "oslo-1", 1), Presence("lima", "lima-1", 1)
    odd = [["lima", "lima-2", other.to_json()], ["rome", "rome-1", "{}"]]
    present = [["oslo", "oslo-1", own.to_json()], ["lima", "lima-1", other.to_json()], *odd]
    lines = [
        Line(LinkError("gone")),
        Line({"present": present}, {}, {"present": present}, LinkError("gone")),
        Line({"present": None}),
    ]
    replica = Linked(*lines)
    with pytest.raises(AnswerLostError, match=r"the hub has gone \(gone\)"):
        replica.call(own, 300.0)
    for _ in range(2):
        heard, store = replica.call(own, 300.0)
        assert [one.to_json() for one in heard] == [own.to_json(), other.to_json()]
        assert isinstance(store, ChannelVoteStore) and store.channel is lines[1]
    assert lines[1].asked[0] == ("call", {"presence": own.to_json()}) and [do for do, _ in lines[1].asked] == [
        "call",
        "beat",
        "call",
    ]
    assert replica.looked == [0.0, 2.0] and replica.now == 4.0  # a new server gets the time of two heartbeats
    with pytest.raises(LinkError, match="no other replica called at the hub"):
        replica.call(own, 300.0)
    assert [line.closed for line in lines] == [1, 1, 0]
    assert [seconds for _, seconds in replica.told] == [0.5, 0.0, 0.0, 0.0]
    reasons = [
        "the hub has gone (gone)",
        "lima is not heard: it calls itself lima",
        "rome is not heard: ",
        "the hub has gone (gone)",
    ]
    assert all(told.startswith(reason) for (told, _), reason in zip(replica.told, reasons, strict=True))


def test_a_server_that_knows_the_others_is_called_at_once() -> None:
    """If it answers no call, the pauses before the calls become longer."""
    own, gone = Presence("oslo", "oslo-1", 1), LinkError("gone")
    lines = [Line(gone), Line({"present": []}), *(Line(gone) for _ in range(7)), Line({"present": []}), Line()]
    for line in lines:
        line.begun = True
    replica, times = Linked(*lines), list[float]()
    for line in lines[:-1]:
        with suppress(AnswerLostError):
            replica.call(own, 300.0)
        times.append(round(replica.now, 9))
        if not line.closed:
            replica._lose()
    assert times == [0.0, 0.0, 0.0, 0.0, 0.1, 0.3, 0.7, 1.5, 3.1, 5.1]


def test_a_call_ends_at_its_deadline_or_when_its_replica_leaves() -> None:
    own, line = Presence("oslo", "oslo-1", 1), Line({"present": []})
    replica = Linked(line)
    with pytest.raises(LinkError, match="no other replica called"):
        replica.call(own, 2.0)  # the time of two heartbeats that a new server gets
    assert not line.asked
    assert Linked(Line({"present": []})).call(own, 2.5)[0] == []
    replica._left.set()
    with pytest.raises(LinkError, match="replica 'oslo' has left the hub"):
        replica.call(own, 300.0)
    assert not line.closed
    replica.arrive("oslo", "oslo-1", b"", Timeouts(), replica._observe)
    assert [thread.daemon for thread in replica._threads] == [True]
    (beats,), joined = replica._threads, list[float]()
    replica._threads.append(SimpleNamespace(join=joined.append))  # type: ignore[arg-type]
    for times in (1, 2):
        replica.leave()
        assert line.closed == 1 and not beats.is_alive() and len(joined) == times


def test_a_replica_that_leaves_while_it_looks_for_its_server_ends_its_call() -> None:
    """A connection that was opened meanwhile is closed."""

    class Leaving(Linked):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self._left.set()

    own, line = Presence("oslo", "oslo-1", 1), Line({"present": []})
    replica = Leaving(line)
    with pytest.raises(LinkError, match=r"replica 'oslo' has left the hub\."):
        replica.call(own, 300.0)
    assert line.closed == 1 and not line.asked and replica.relays is False
    lost = Lost()
    lost.sleep = lambda seconds: lost._left.set()  # type: ignore[method-assign]
    with pytest.raises(LinkError, match=r"the hub does not answer\. Waited 300 s\. Look for it\."):
        lost.call(own, 300.0)
    assert lost.looked == [0.0, 0.0]


@pytest.mark.parametrize(("there", "told"), [(2.5, False), (10.0, False), (2.4, True), (10.1, True)])
def test_a_server_with_another_heartbeat_timeout_is_reported(there: float, told: bool) -> None:
    replica = Linked()
    replica._compare(there)
    reason = (
        f"the hub takes a replica for dead after {there:g} s, this run needs 5: start it with --heartbeat-timeout 5"
    )
    assert replica.told == ([(reason, 0.0)] if told else [])


def test_a_returned_server_is_found_within_a_heartbeat_interval() -> None:
    """This holds after outages of any length. A replica that returned much later than the others would count as dead, and lose its steps."""
    replica = Lost()
    with pytest.raises(LinkError, match=r"the hub does not answer\..*Look for it"):
        replica.call(Presence("oslo", "oslo-1", 1), 300.0)
    assert replica.looked[-1] > 290.0
    gaps = [later - earlier for earlier, later in zip(replica.looked, replica.looked[1:])]
    assert max(gaps) <= Timeouts().heartbeat_interval
    slow = Lost()
    slow._timeouts = Timeouts(heartbeat_interval=3.0, heartbeat_timeout=9.0)
    with pytest.raises(LinkError, match=r"Waited 10 s\."):
        slow.call(Presence("oslo", "oslo-1", 1), 9.5)
    assert slow.looked == [0.0, 0.5, 1.5, 3.5, 6.5, 9.5]
