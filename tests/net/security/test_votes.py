"""A member of an elastic run with a valid key votes for others: the hub refuses it by name, and the outcome is the honest one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from thinwire.errors import LinkError
from thinwire.membership.commit import Electorate, ballot, carry_out, keys_of, view_id
from thinwire.membership.registry import MemberRegistry
from thinwire.membership.store import ChannelVoteStore
from thinwire.net import Hub
from thinwire.net.enrol import Enrolment
from thinwire.net.loop import LoopThread
from thinwire.net.requests import HubChannel

PROCESSES = {"bergen": "b" * 16, "liar": "e" * 16, "oslo": "f" * 16, "stranger": "9" * 16}  # `stranger` is in no view
VIEW: Electorate = [(name, PROCESSES[name], 3) for name in ("bergen", "liar", "oslo")]
QUESTION = f"{view_id(VIEW)}/land"
OUTCOME, BALLOTS = keys_of(QUESTION, 3)
FORGERIES = [
    ("liar", "put", BALLOTS[2], "1", VIEW, "liar votes for another member"),
    ("liar", "put", BALLOTS[2], "1", [*VIEW[:2], ("liar", "e" * 16, 3)], "the view of this vote has other members"),
    ("stranger", "put", BALLOTS[0], "1", VIEW, "stranger votes for another member"),
    ("stranger", "settle", OUTCOME, "no", VIEW, "stranger is no member of the view that votes"),
]


def test_a_vote_in_anothers_name_is_refused(tmp_path, audit):
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0), say=audit) as hub:
        enrolments = {name: Enrolment(hub.invite(), name, tmp_path / "keys") for name in PROCESSES}
        thread = LoopThread.shared()

        @contextmanager
        def dialled(name: str, process: str = "") -> Iterator[HubChannel]:
            process = process or PROCESSES[name]
            with closing(HubChannel(enrolments[name], process, "", thread, 600.0)) as channel:
                yield channel

        try:
            with dialled("bergen") as bergen, dialled("oslo") as oslo:
                for who, do, key, value, members, why in FORGERIES:
                    with dialled(who) as channel, pytest.raises(LinkError, match=why):
                        channel.ask(do, key=key, value=value, members=members)
                    audit.wait("refused frames of", f"{who}.member.thinwire", why)
                with pytest.raises(LinkError, match="liar speaks as an incarnation of oslo"), dialled("liar", "f" * 16):
                    pass  # its first request is a heartbeat
                with dialled("liar") as liar:
                    first, second, third = (ChannelVoteStore(one, [], VIEW) for one in (bergen, liar, oslo))
                    first.put(BALLOTS[0]), second.put(BALLOTS[1])
                    assert not first.all(BALLOTS)  # the votes in its name were refused, so oslo has not voted
                    assert carry_out(ballot(QUESTION, 2, 3, True), third, 600.0)
                    liar.ask("forget", keys=[OUTCOME, *BALLOTS])
                    assert second.settle(OUTCOME, b"no") == b"yes" == first.wait(OUTCOME, 600.0)
        finally:
            thread.release()


def test_a_name_has_one_process_one_vote_and_one_word(tmp_path, audit):
    """Three honest members meet beside one that never calls. It alone cannot note an end; what it reports is logged."""
    honest = ("bergen", "lima", "oslo")
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0), say=audit) as hub:
        enrolments = {name: Enrolment(hub.invite(), name, tmp_path / "keys") for name in (*honest, "liar")}
        thread, channels = LoopThread.shared(), []

        def dialled(name: str, process: str) -> HubChannel:
            channels.append(HubChannel(enrolments[name], process * 16, "", thread, 600.0))
            return channels[-1]

        try:
            liar = dialled("liar", "0")
            with pytest.raises(LinkError, match="liar trains already: a process with the same key is connected"):
                dialled("liar", "1")
            members = [dialled(name, process) for name, process in zip(honest, "abc")]
            with ThreadPoolExecutor(3) as pool:
                views = [pool.submit(one.ask, "call", 600.0, presence="status") for one in members]
                for view in views:
                    assert [name for name, *_ in view.result(600.0)["present"]] == list(honest)
            end = f"end/{'0' * 32}"
            liar.ask("put", key=end, value="1", members=[])
            assert members[0].ask("look", keys=[end])["values"] is None
            members[1].ask("put", key=end, value="1", members=[])
            assert members[0].ask("look", keys=[end])["values"] == ["1"]
            for number in range(9):
                liar.ask("report", text=f"oslo is bad {number}\n")
            audit.wait("reports liar: oslo is bad 3\\n")
            assert not any("oslo is bad 4" in line for line in audit.said)
        finally:
            for one in channels:
                one.close()
            thread.release()
