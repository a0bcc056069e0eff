"""A checkpoint may be written at any moment: what it says of the agreed state is true of its anchors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from elastic_toy import RecordedRun, Toy, agree, freeze_a, one_thread

from thinwire.drivers.elastic.messages import Outcome
from thinwire.drivers.elastic.states import Action
from thinwire.membership.testing.cluster import SimulatedCluster

__all__ = ["one_thread"]  # a fixture


class Told(deque[Sequence[Outcome]]):
    """Outcomes that call `then` as soon as one arrives, as a main thread that is busy at any moment may take it."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def append(self, entry: Sequence[Outcome]) -> None:
        super().append(entry)
        self.then()


class SavesAtOnce(Toy):
    """It takes over each outcome at once, and compares its anchors with the state that a checkpoint would name then."""

    compared: list[str]

    def begin(self) -> Toy:
        self.compared = []
        self.elastic.rounds._mail.outcomes = Told(self.compare)
        return super().begin()

    def compare(self) -> None:
        self.elastic._pick_up(self.step)
        digest = self.elastic.facts()["state_digest"]
        if digest in self.record.commits:  # else this replica is the first to commit this round
            self.compared.append(digest)
            for piece, due in zip(self.pieces, self.record.anchors(digest)):
                torch.testing.assert_close(piece.anchor, due)


@pytest.mark.parametrize("doubts", [False, True])
def test_a_checkpoint_between_two_outcomes_names_the_state_that_it_holds(
    doubts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica is frozen for some rounds and catches up. If it `doubts`, the result of a vote on its delta was lost then."""
    cluster, record, looked = SimulatedCluster(), RecordedRun(), list[str]()

    def run(name: str) -> Toy:
        toy = SavesAtOnce(cluster, name, record, least=2)
        actions = toy.elastic.rounds.loop._actions
        look_up = actions[Action.LOOK_UP_DOUBT]
        actions[Action.LOOK_UP_DOUBT] = lambda donor: (looked.append(name), look_up(donor))
        return toy.train(32)

    freeze_a(cluster, doubts, monkeypatch)
    results = cluster.play({name: run for name in "abc"})
    assert all(isinstance(toy, Toy) for toy in results.values()), results
    agree(results, record)
    assert any(name == "a" and event == "caught_up" for name, event, _ in record.events)
    assert looked == (["a"] if doubts else []) and len(results["a"].compared) > 4
