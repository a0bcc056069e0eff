"""A hub that dies during the vote on the end of a run: who knows that the run is over waits for those who do not."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_toy import RecordedRun, Toy, agree, one_thread, train

from thinwire.membership.testing.cluster import SimulatedCluster, ThreadRendezvous
from thinwire.membership.testing.lighthouse import SimulatedVoteStore
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture


@pytest.mark.parametrize("away", [False, True])
def test_the_only_member_that_knows_the_end_ends_as_the_others_do(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lighthouse restarts as soon as one member has the result, and loses it. A replica that was away returns with a delta. If the
    member that knows the end is frozen meanwhile (`away`), the others go on without it, and it takes over their state.
    """
    cluster, record, last, told = SimulatedCluster(), RecordedRun(), list[str](), list[str]()
    decide, settle = View.decide, SimulatedVoteStore.settle

    def decided(view: View, question: str, yes: bool, seconds: float, *what: str) -> bool:
        own = view.members[view.group.rank].name
        if own == "c" and not any(member.status["brings"] or not member.status["finishing"] for member in view.members):
            last.append(question)
            ThreadRendezvous(cluster, own).sleep(1.0)  # the others have voted then, so this ballot is the last
        return decide(view, question, yes, seconds, *what)

    def settled(store: SimulatedVoteStore, key: str, value: bytes) -> bytes:
        with cluster.time:
            result = settle(store, key, value)
            if last and not told:
                told.append(store._name)
                cluster.lighthouse.stop()
                cluster.later(1.0, cluster.lighthouse.start)
                cluster.later(1.0, lambda: cluster.thaw("d"))
                if away:
                    cluster.freeze(told[0])
                    cluster.later(40.0, lambda: cluster.thaw(told[0]))
            return result

    monkeypatch.setattr(View, "decide", decided)
    monkeypatch.setattr(SimulatedVoteStore, "settle", settled)
    cluster.at("d", "call", lambda: cluster.freeze("d"), 4)
    results: dict[str, Any] = cluster.play({name: train(cluster, record, least=3, keep=60.0) for name in "abcd"})
    assert all(isinstance(result, Toy) for result in results.values()), results
    agree(results, record)
    assert {name for name, event, _ in record.events if event == "doubt"} == set("abc") - set(told)
    keeps = [fields["late"] for name, event, fields in record.events if event == "keeps" and name == told[0]]
    assert keeps[0] == sorted(set("abcd") - set(told))
    assert ((told[0], "caught_up") in [(name, event) for name, event, _ in record.events]) is away
