"""A member that is behind gets the fragments that have moved since, and no others; a transfer that was cut off goes on."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm import state_transfer
from thinwire.comm.threads import ThreadGroup
from thinwire.drivers.elastic import global_state
from thinwire.drivers.elastic.ending import level
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.plan import MemberStatus, reconcile

COUNT, NUMEL = 4, 250


def made(rounds: int = 0, other: float = 0.0) -> GlobalState:
    """A state after `rounds` rounds; `other` is in what they add."""
    states: list[Any] = [{"momentum": torch.zeros(NUMEL)} for _ in range(COUNT)]
    state = GlobalState([torch.zeros(NUMEL) for _ in range(COUNT)], states, run="first")
    go_on(state, rounds, other)
    return state


def go_on(state: GlobalState, rounds: int, other: float = 0.0) -> None:
    for _ in range(rounds):
        fragment = state.round % COUNT
        anchor = state.anchors[fragment] + state.round + other
        state.commit(fragment, anchor, {"momentum": anchor / 3}, ("a", "b"))
        state.round += 1


def met(ahead: GlobalState, behind: GlobalState, cut: int | None = None) -> int:
    """Levels the two in one view; the transfer is cut after the part `cut`. Returns the bytes that were given."""
    groups, given = ThreadGroup.create(2, 60.0), list[int]()
    states = [ahead, behind]
    statuses = [MemberStatus(s.round, s.state_digest, run=s.run, brings={}) for s in states]
    members = [SimpleNamespace(name=name) for name in "ab"]

    def observe(event: str, **fields: Any) -> None:
        given.append(fields["nbytes"])

    def hold(rank: int) -> None:
        view: Any = SimpleNamespace(group=groups[rank], members=members)
        try:
            level(view, reconcile(statuses, range(COUNT)), statuses, states[rank], observe, time.monotonic)
        except tw.LinkError:
            groups[rank].close()

    thread = threading.Thread(target=hold, args=(0,))
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if cut is not None:
                taken, calls = state_transfer.take, list[int]()

                def lost(*args: Any) -> Any:
                    if len(calls) == 1 + cut:
                        raise tw.LinkError("the link is cut")
                    calls.append(1)
                    return taken(*args)

                patch.setattr(state_transfer, "take", lost)
            hold(1)
    finally:
        thread.join()
        for group in groups:
            group.close()
    return sum(given)


def alike(one: GlobalState, other: GlobalState) -> bool:
    """Also as a checkpoint would hold them."""
    mine, theirs = ({name: value for part in each.parts() for name, value in part.items()} for each in (one, other))
    facts = json.dumps(one.facts()) == json.dumps(other.facts())
    return facts and mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("away", [1, 2, 3, 9])
def test_a_member_that_was_away_gets_the_fragments_that_moved(away: int) -> None:
    ahead, behind = made(6), made(6)
    go_on(ahead, away)
    values = min(away, COUNT) * NUMEL * 8
    assert values < met(ahead, behind) < values + 3000 and alike(ahead, behind)


@pytest.mark.parametrize("case", ["new", "another history", "another run", "forgotten"])
def test_a_member_without_the_same_history_gets_all_fragments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_state, "REMEMBERED", 5)
    ahead, behind = made(6), made(0 if case == "new" else 6, other=0.5 if case == "another history" else 0.0)
    behind.run = "second" if case == "another run" else "first"
    go_on(ahead, 7 if case == "forgotten" else 1)
    assert met(ahead, behind) > COUNT * NUMEL * 8 and alike(ahead, behind)


def test_a_transfer_that_was_cut_off_goes_on_where_it_was() -> None:
    """Three parts arrive, then the link is cut. A round moves one of them; so that one and the missing one are sent again."""
    ahead, behind = made(6), made()
    met(ahead, behind, cut=3)
    assert behind.round == 0 and not behind.anchors[1].any()  # nothing was taken over
    go_on(ahead, 1)  # moves fragment 2
    values = 2 * NUMEL * 8
    assert values < met(ahead, behind) < values + 3000 and alike(ahead, behind)


def test_a_replica_that_loads_its_checkpoint_after_it_joined_gets_only_what_moved_since_the_join() -> None:
    ahead, joined, saved = made(6), made(), made(2)
    assert met(ahead, joined) > COUNT * NUMEL * 8
    saved.keep(joined)
    go_on(ahead, 1)
    assert NUMEL * 8 < met(ahead, saved) < NUMEL * 8 + 3000 and alike(ahead, saved)
