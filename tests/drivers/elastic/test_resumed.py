"""A replica that resumes from a checkpoint, or returns, while the others have gone on: what it has sent before counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_toy import SIZES, Committed, RecordedRun, Returner, Toy, agree, freeze_a, one_thread
from torch import Tensor

from thinwire.drivers.elastic import global_state
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous
from thinwire.membership.testing.lighthouse import SimulatedVoteStore
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture
SAVED, DIES, STEPS = 7, 13, 40
UNIT = 12.0  # is whole after division by 1, 2 or 3 members


def sent(rounds: list[Committed], name: str, fragment: int) -> list[float]:
    """Returns the steps in each delta of `name` that these rounds counted."""
    deltas = [dict(zip(one.names, one.deltas)) for one in rounds if one.fragment == fragment and name in one.names]
    return [float(-named[name][0]) / UNIT for named in deltas]


class SavesOnce(Returner):
    """It never saves after step `SAVED`.

    If it `overlaps`, its other fragments depart after the exchange thread has taken over the newer state, and before it knows that.
    """

    overlaps = False

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        pick_up, elastic = self.elastic._pick_up, self.elastic

        def picked_up(step: int) -> None:
            if (
                self.overlaps
                and self.restored
                and any(outcome.anew for entry in elastic.rounds._mail.outcomes for outcome in entry)
            ):
                late = [elastic._bring(index, step) for index in range(len(SIZES)) if index not in elastic._waiting]
                elastic.rounds.depart(*late, own_steps=step)
            pick_up(step)

        elastic._pick_up = picked_up  # type: ignore[method-assign]

    def save(self) -> None:
        if self.name not in self.record.disk:
            super().save()


@pytest.mark.parametrize(("remembered", "overlaps"), [(1024, False), (1024, True), (3, False)])
def test_deltas_since_a_checkpoint_are_counted_once(
    remembered: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds progress that was sent in a later round. With `remembered` 3, that round is forgotten at the return."""
    monkeypatch.setattr(global_state, "REMEMBERED", remembered)
    monkeypatch.setattr(SavesOnce, "overlaps", overlaps)
    cluster, record, trained = SimulatedCluster(), RecordedRun(), dict.fromkeys("abc", 0)
    before: set[str] = set()  # rounds before the death

    def one(toy: Toy, fragment: int) -> Tensor:
        trained[toy.name] += fragment == 0
        if toy.name == "b" and trained["b"] == DIES:
            cluster.kill("b")
        return torch.full((SIZES[fragment],), UNIT)

    def run(name: str) -> Toy:
        while True:
            try:
                return SavesOnce(cluster, name, record, inner=one, save_every=SAVED, least=2).train(STEPS)
            except Killed:
                before.update(record.commits)
                cluster.revive(name)

    results = cluster.play({name: run for name in "abc"})
    agree(results, record)
    assert results["b"].restored and trained["b"] > DIES
    history = record.history(results["a"].elastic.rounds.loop.agreed.state_digest)
    later = [one for digest, one in record.commits.items() if digest not in before]

    for fragment in range(2):
        assert all(steps > 0 for steps in sent(later, "b", fragment)), "it took back what it had sent"
        assert sum(sent(later, "b", fragment)) <= trained["b"] - DIES, "some steps were counted twice"
        assert all(sum(sent(history, name, fragment)) == trained[name] for name in "ac"), "steps of others are lost"


@pytest.mark.parametrize("doubts", [False, True])
def test_a_delta_whose_round_is_forgotten_is_not_sent_again(doubts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is frozen for more rounds than the others remember, after its delta was counted. If it `doubts`, it froze during the vote,
    whose result is lost with the lighthouse.
    """
    monkeypatch.setattr(global_state, "REMEMBERED", 3)
    cluster, record, trained = SimulatedCluster(), RecordedRun(), dict.fromkeys("abc", 0)

    def one(toy: Toy, fragment: int) -> Tensor:
        trained[toy.name] += fragment == 0
        return torch.full((SIZES[fragment],), UNIT)

    freeze_a(cluster, doubts, monkeypatch)
    results = cluster.play(
        {name: lambda name: Toy(cluster, name, record, inner=one, least=2).train(32) for name in "abc"}
    )
    agree(results, record)
    assert any(name == "a" and event == "doubt" for name, event, _ in record.events) is doubts
    agreed = results["a"].elastic.rounds.loop.agreed
    assert len(agreed.counted) <= 3 and trained["a"] < trained["b"]
    history = record.history(agreed.state_digest)
    for fragment in range(2):
        assert {name: sum(sent(history, name, fragment)) for name in "abc"} == trained


def test_a_delta_whose_doubt_was_dropped_is_not_counted_again_when_its_round_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lighthouse dies when a alone has the result of a round. While a is frozen, b and c hold that round again. Then c dies, and the
    state of a, which has the lower name, wins over that of b.
    """
    cluster, record, trained = SimulatedCluster(), RecordedRun(), dict.fromkeys("abc", 0)
    settle, told = SimulatedVoteStore.settle, list[str]()
    decide, again = View.decide, list[str]()

    def one(toy: Toy, fragment: int) -> Tensor:
        trained[toy.name] += fragment == 0
        return torch.full((SIZES[fragment],), UNIT)

    def decided(view: View, question: str, yes: bool, seconds: float, *what: str) -> bool:
        own = view.members[view.group.rank].name
        if question == "round 3" and not told:
            ThreadRendezvous(cluster, own).sleep(1.0 if own == "a" else 0.1)  # so the ballot of a is the last
        answer = decide(view, question, yes, seconds, *what)
        if question == "round 3" and told and own == "b":
            again.append(question)
            cluster.thaw("a")
            cluster.kill("c")
        return answer

    def settled(store: SimulatedVoteStore, key: str, value: bytes) -> bytes:
        if not key.endswith("round 3/outcome") or told:
            return settle(store, key, value)
        if store._name != "a":
            with cluster.time:
                cluster.wait(store._name, lambda: bool(told), None)
            return settle(store, key, value)  # of a lighthouse that has gone
        answer = settle(store, key, value)
        told.append("a")
        cluster.lighthouse.stop()
        cluster.later(3.0, cluster.lighthouse.start)
        cluster.freeze("a")
        return answer

    monkeypatch.setattr(View, "decide", decided)
    monkeypatch.setattr(SimulatedVoteStore, "settle", settled)

    def run(name: str) -> Toy:
        settings: dict[str, Any] = {"least": 2, "keep": 60.0, "inner": one}
        try:
            return Toy(cluster, name, record, **settings).train(32)
        except Killed:
            cluster.revive(name)
            ThreadRendezvous(cluster, name).sleep(10.0)  # so that b meets a, and not the next life of c
            return Toy(cluster, name, record, **settings).train(32)

    results = cluster.play({name: run for name in "abc"})
    (digest,) = {toy.elastic.rounds.loop.agreed.state_digest for toy in results.values()}
    assert told and again and any(name == "b" and event == "caught_up" for name, event, _ in record.events)
    for fragment in range(2):  # c dies, and has no checkpoint
        counted = {name: sum(sent(record.history(digest), name, fragment)) for name in "ab"}
        assert counted == {name: trained[name] for name in "ab"}, "counted twice, or lost"
