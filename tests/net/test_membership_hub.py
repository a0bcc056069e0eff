"""Members that meet at a hub over real sockets: the code of views and votes is that of a lighthouse, and names are bound to keys."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import FORKS, serve_hub
from tcp_proxy import Proxy

from thinwire.app.cli import main
from thinwire.comm import gather
from thinwire.drivers.elastic.ending import keep, note_end
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.errors import DisagreementError, EndedError, LinkError, PeerError, ThinwireError
from thinwire.membership import Membership, Timeouts
from thinwire.membership.commit import VoteStore
from thinwire.membership.registry import MemberRegistry
from thinwire.membership.rendezvous import AnswerLostError
from thinwire.membership.view import Presence
from thinwire.net import Hub, admit
from thinwire.net.enrol import Enrolment
from thinwire.net.rendezvous import HubRendezvous
from thinwire.net.requests import HubRequester
from thinwire.net.state import RUNS, HubState
from thinwire.net.token import Token

PATIENT = Timeouts(
    heartbeat_interval=0.1, heartbeat_timeout=600.0, grace=600.0, connect=600.0, transfer=600.0, vote=700.0, view=600.0
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", patience=0.2, registry=lambda: MemberRegistry(600.0)) as made:
        yield made


def member(hub: Hub | Token, name: str, tmp_path: Path, at: str = "", **more: Any) -> Membership:
    enrolment = Enrolment(hub.invite() if isinstance(hub, Hub) else hub, name, tmp_path / "keys")
    return Membership(HubRendezvous(enrolment, at), name, timeouts=PATIENT, **more)


def together(names: list[str], body: Callable[[str], Any]) -> dict[str, Any]:
    """Runs `body` for each name in a thread, and returns its results or Thinwire's errors."""
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            results[name] = body(name)
        except ThinwireError as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_members_at_a_hub_agree_on_views_and_votes_and_a_leave_is_named(hub: Hub, tmp_path: Path) -> None:
    """Ranks are those of the view, although a hub sorts names by their numbers. A member that closes during an exchange fails it by name."""
    names = ["replica-10", "replica-2", "replica-3"]
    both_failed = threading.Barrier(2)

    def body(name: str) -> list[Any]:
        with closing(member(hub, name, tmp_path, least=3)) as membership:  # else the first two may be a view
            view = membership.next_view({"round": 0})
            told: list[Any] = [[one.name for one in view.members]]
            told.append(gather(view.group, name.encode(), 64, "packet"))
            told.append(view.decide("land", True, PATIENT.vote))
            again = membership.next_view({"round": 1})
            told.append(again.rebuilt)
            with closing(membership._rendezvous._channel()) as channel:  # type: ignore[attr-defined]
                told.append(channel.begun)
            if name == "replica-3":
                return told
            with pytest.raises(LinkError) as failed:
                gather(again.group, name.encode(), 64, "packet")
            membership.least = 2
            both_failed.wait(600.0)  # else the first that closes may be the one that the second names
            again.close()
            left = [one.name for one in membership.next_view({"round": 1}).members]
        return [*told, str(failed.value), left]

    results = together(names, body)
    alike = [names, [name.encode() for name in names], True, False, True]
    assert results["replica-3"] == alike
    assert (
        results["replica-10"] == results["replica-2"] == [*alike, "replica 2 (replica-3) closed its group.", names[:2]]
    )


class LosesAnAnswer(HubRendezvous):
    """Its connection breaks when the answer with the first view of two is on its way."""

    lost = False

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        answer = super().call(presence, seconds)
        if len(answer[0]) > 1 and not self.lost:
            self.lost = True
            raise AnswerLostError("the connection has broken")
        return answer


def test_who_builds_a_group_does_not_wait_for_one_that_calls_for_another_view(hub: Hub, tmp_path: Path) -> None:
    """The hub says so. Without that, the wait of both would last for the time-out."""
    told = list[str]()

    def body(name: str) -> list[str]:
        kind = LosesAnAnswer if name == "oslo" else HubRendezvous
        rendezvous = kind(Enrolment(hub.invite(), name, tmp_path / "keys"))

        def observe(_: str, fields: Mapping[str, Any]) -> None:
            told.append(str(fields.get("reason")))

        with closing(Membership(rendezvous, name, timeouts=PATIENT, observe=observe)) as membership:
            view = membership.next_view({"round": 0})
            gather(view.group, name.encode(), 64, "packet")
            return [one.name for one in view.members]

    names = ["bergen", "oslo"]
    assert list(together(names, body).values()) == [names, names]
    assert any("all others call for another view" in reason for reason in told)


def test_who_builds_a_group_does_not_wait_for_a_hub_that_is_gone(tmp_path: Path) -> None:
    waits, failed = threading.Event(), list[LinkError]()

    def noted(line: str) -> None:
        if "waits oslo" in line:
            waits.set()

    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0), say=noted) as hub:
        rendezvous = HubRendezvous(Enrolment(hub.invite(), "oslo", tmp_path / "keys"))

        def connect() -> None:
            there = [Presence(name, f"{place:016x}", 1) for place, name in enumerate(("lima", "oslo"))]
            try:
                rendezvous.connect("an epoch", there, 1)
            except LinkError as error:
                failed.append(error)

        with closing(Membership(rendezvous, "oslo", timeouts=PATIENT)):
            thread = threading.Thread(target=connect)
            thread.start()
            assert waits.wait(600.0)
            hub.close()
            thread.join()
    assert len(failed) == 1


def test_a_revoked_member_leaves_with_the_reason_and_the_others_go_on(hub: Hub, tmp_path: Path) -> None:
    """The others continue without it, and at the end none of them keeps the final state for it. It may keep it for one that died, until that
    one is revoked.
    """
    there = threading.Event()
    admit(str(hub.invite()), "rome", tmp_path / "keys")

    def revoke(name: str) -> None:
        state = HubState(tmp_path / "hub")  # as `thinwire hub` does, from another process
        state.revoke(name)
        state.close()

    def body(name: str) -> Any:
        with closing(member(hub, name, tmp_path, least=1)) as membership:
            view = membership.next_view({"round": 0})
            while len(view.members) < 2:
                view = membership.next_view({"round": 0})
            if name == "oslo":
                there.set()
            else:
                assert there.wait(600.0)
                revoke("oslo")
            with pytest.raises(LinkError, match=r"\(oslo\) was revoked at the hub|oslo is revoked"):
                view.group.post(5, {}, {1 - view.group.rank: torch.zeros(9, dtype=torch.uint8)}).wait()
            view.close()
            members = [one.name for one in membership.next_view({"round": 0}).members]
            agreed = GlobalState([], [])
            late, noted = note_end(membership, agreed, True, {"oslo", "rome"}, (), members, True)
            kept = set(late)
            keep(membership.next_view, membership, agreed, 0, [0], late, 600.0, lambda *_, **__: revoke("rome"))
            return members, kept, late, noted

    results = together(["bergen", "oslo"], body)
    assert results["bergen"] == (["bergen"], {"rome"}, set(), True)
    assert isinstance(results["oslo"], DisagreementError) and "oslo is revoked" in str(results["oslo"])


def test_runs_at_one_hub_are_separate(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has its own members, settings, votes and end, even for a member of both. One member may begin only so many runs."""
    runs = {"red": ["bergen", "oslo"], "blue": ["lima", "oslo"]}
    tokens, listed = {name: hub.invite() for name in ("bergen", "lima", "oslo")}, list[list[Any]]()
    barrier = threading.Barrier(4)
    for name, token in tokens.items():
        admit(str(token), name, tmp_path / "keys")  # both members of oslo have one key

    def body(who: str) -> list[Any]:
        run, name = who.split()
        with closing(member(tokens[name], name, tmp_path, at=run, facts={"lr": run})) as membership:
            try:
                view = membership.next_view({"round": 0})
                told: list[Any] = [[one.name for one in view.members]]
                told.append(view.decide("land", who != "blue lima", PATIENT.vote))
                told.append(gather(view.group, who.encode(), 64, "packet"))
                if run == "red":
                    membership.note_end("the end")
                barrier.wait(600.0)
                told.append(membership.ended("the end"))
                if who == "red oslo":
                    capsys.readouterr()
                    main(["hub", "list", "--json", "--out", str(tmp_path / "hub")])
                    listed.append(json.loads(capsys.readouterr().out)["runs"])
                barrier.wait(600.0)
                return told
            except BaseException:
                barrier.abort()
                raise

    results = together([f"{run} {name}" for run, names in runs.items() for name in names], body)
    for run, names in runs.items():
        alike = [names, run == "red", [f"{run} {name}".encode() for name in names], run == "red"]
        assert [results[f"{run} {name}"] for name in names] == [alike] * 2
    assert {run["name"]: run["present"] for run in listed[0]} == runs
    state = HubState(tmp_path / "hub")
    for number in range(RUNS + 1):
        state.use_run(f"run-{number}", "kyoto", [])
    assert {run.name for run in state.runs() if run.begun_by == "kyoto"} == {f"run-{n}" for n in range(1, RUNS + 1)}
    with pytest.raises(LinkError, match=f"kyoto began {RUNS} runs that are in progress"):
        state.use_run("one-more", "kyoto", [run.name for run in state.runs()])
    state.use_run("one-more", "lima", [run.name for run in state.runs()])
    state.close()


def test_a_hub_of_fixed_groups_refuses_elastic_members_with_advice(tmp_path: Path) -> None:
    with (
        Hub(tmp_path / "hub") as hub,
        closing(member(hub, "oslo", tmp_path)) as membership,
        pytest.raises(DisagreementError, match="start it with --elastic"),
    ):
        membership.next_view({})


class KilledHub:
    """A hub in a separate process, which a test can kill and restart in the same folder at the same ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        hear, tell = FORKS.Pipe(duplex=False)
        with hear, tell:
            self.process = FORKS.Process(target=serve_hub, args=(tell, self.folder, 600.0), daemon=True)
            self.process.start()
            self.token = Token.read(hear.recv()[0])

    def end(self) -> None:
        """Kills it, as a power cut would."""
        self.process.kill()
        self.process.join()
        self.process.close()

    def again(self) -> None:
        self.end()
        self.begin()


def test_a_killed_hub_keeps_the_members_and_the_end_of_a_run(tmp_path: Path) -> None:
    """A member that returns first waits for the others, and is not the whole run. One that returns after the end learns of it."""
    names, hub = ["bergen", "lima", "oslo"], KilledHub(tmp_path / "hub")
    all_there, begun_again = threading.Barrier(3), threading.Event()
    try:
        with Proxy(hub.token) as proxy:

            def body(name: str) -> list[str]:
                token = hub.token if name == "oslo" else proxy.token
                with closing(member(token, name, tmp_path, least=1)) as membership:
                    while len(membership.next_view({"round": 0}).members) < 3:
                        pass
                    all_there.wait(600.0)
                    if name == "oslo":
                        alone(membership)
                    begun_again.wait(600.0)
                    members = [one.name for one in membership.next_view({"round": 1}).members]
                    membership.note_end("the run")
                    return members

            def alone(membership: Membership) -> None:
                """Calls at the restarted hub. Raises `LinkError` if it gets into a view."""
                try:
                    hub.end()
                    proxy.cut()  # before the hub restarts, so that the member cannot reach it
                    hub.begin()
                    reason = ""
                    while "no other replica called" not in reason:  # until then the hub was not reached
                        try:
                            raise PeerError(str(membership.next_view({"round": 1}, seconds=1.0)))
                        except LinkError as error:
                            reason = str(error)
                finally:
                    proxy.mend()
                    begun_again.set()

            assert together(names, body) == dict.fromkeys(names, names)
        emptied(tmp_path / "hub")
        hub.again()
        with closing(member(hub.token, "late", tmp_path, least=1, run="the run")) as late, pytest.raises(EndedError):
            late.next_view({"round": 0})
    finally:
        hub.end()


def test_a_member_restarted_during_a_hub_outage_is_not_waited_for_as_before(tmp_path: Path) -> None:
    """Its earlier process no longer counts; those of the others do."""

    def here(incarnation: str) -> bool:
        asked = {"do": "here", "who": incarnation}
        return bool(asyncio.run(registry.answer(HubRequester("lima", b"b" * 16, ""), asked))["here"])

    state = HubState(tmp_path)
    state.use_run("", "oslo", [])
    for names in (("oslo", b"a" * 16), ("lima", b"b" * 16)), (("oslo", b"c" * 16),):
        registry = MemberRegistry(600.0)
        registry.remember(state.kept_run(""))
        for name, process in names:
            registry.hear(HubRequester(name, process, ""))
        registry.tick()
        assert not here("d" * 16) and here("b" * 16)
    state.close()
    assert here("c" * 16) and not here("a" * 16)


def emptied(folder: Path) -> None:
    """Waits until the hub has recorded that no member is present."""
    state = HubState(folder)
    for _ in range(12_000):
        if not state.kept_run("").present():
            break
        threading.Event().wait(0.05)
    else:
        pytest.fail("the hub has not seen for ten minutes that all have left")
    state.close()
