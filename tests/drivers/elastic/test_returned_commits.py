"""A commit that others undid comes back with a member that was away: its deltas count once."""

from __future__ import annotations

import threading

import pytest
import torch
from elastic_toy import SIZES, RecordedRun, Toy, one_thread
from torch import Tensor

from thinwire.drivers.elastic.messages import Outcome
from thinwire.membership.testing.cluster import Killed, SimulatedCluster

__all__ = ["one_thread"]  # a fixture
# Unlike, so that no two rounds have the same anchor.
STEP, STEPS = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0, "e": 10000.0}, 40


class Split:
    """Two halves train apart, because `least` is not a majority. a and b hold the round of step 4 alone, then c and d hold more rounds; a meets
    these, and gets its delta back. If it `dies` then, it resumes from a checkpoint with that delta. b and the newcomer e overtake the others,
    a meets them, then c, then d.
    """

    def __init__(self, dies: bool) -> None:
        self.cluster, self.record, self.phase, self.dies = SimulatedCluster(), RecordedRun(), 0, dies
        self.before = [torch.zeros(size) for size in SIZES]  # what a had trained in its checkpoint
        self.toys: dict[str, Toy] = {}
        self.told: list[tuple[str, Outcome]] = []
        self._lock = threading.Lock()

    def rounds(self, name: str) -> int:
        return self.toys[name].elastic.rounds.loop.agreed.round

    def ahead(self, name: str, others: str) -> bool:
        """Whether `name` has met in more rounds than all `others`, and committed more of them."""
        of = (self.rounds, self.committed)
        return all(count(name) > 1 + max(map(count, others)) for count in of)

    def first(self, name: str) -> list[str]:
        """Who committed the first round of the state that `name` holds."""
        return self.record.history(self.toys[name].elastic.rounds.loop.agreed.state_digest)[0].names

    def committed(self, name: str) -> int:
        return len(self.toys[name].elastic.rounds.loop.agreed.counted)

    def learn(self, toy: Toy, fragment: int) -> Tensor:
        """One inner step; the splits happen before it."""
        if fragment == 0:
            with self._lock:
                self.go_on(toy.name, toy.step)
        return torch.full((SIZES[fragment],), STEP[toy.name])

    def go_on(self, name: str, step: int) -> None:
        back = any(outcome.returned is not None for who, outcome in self.told if who == "a")
        if self.phase == 0 and name == "a" and step == 3:
            self.now("cd", "")
        elif self.phase == 1 and name == "a" and self.committed("a") and self.committed("b"):
            self.now("ab", "cd")
        elif self.phase == 2 and name == "c" and self.committed("c") > self.committed("a"):
            self.now("", "a")
        elif self.phase == 3 and name == "a" and back:
            if self.dies:
                self.toys["a"].save()
                self.before = [trained.clone() for trained in self.toys["a"].trained]
                self.cluster.kill("a")
            self.now("cd" if self.dies else "acd", "b")
        elif self.phase == 4 and name == "b" and self.ahead("b", "acd"):
            self.now("", "" if self.dies else "a")
        elif self.phase == 5 and name == "a" and self.first("a") == ["a", "b"]:
            self.now("", "c")  # one after the other: both together, with one of the others, would be a majority
        elif self.phase == 6 and name == "c" and self.first("c") == ["a", "b"]:
            self.now("", "d")

    def now(self, freeze: str, thaw: str) -> None:
        with self.cluster.time:
            self.phase += 1
            for name in freeze:
                self.cluster.freeze(name)
            for name in thaw:
                self.cluster.thaw(name)
            self.cluster.time.notify_all()  # one may wait for the phase

    def run(self, name: str) -> Toy:
        if name == "e":
            self.sleep(name, until=4)
        while True:
            try:
                return self.begin(name).train(STEPS)
            except Killed:
                self.cluster.revive(name)
                self.sleep(name, until=5)

    def sleep(self, name: str, until: int) -> None:
        with self.cluster.time:
            self.cluster.wait(name, lambda: self.phase >= until, None)

    def begin(self, name: str) -> Toy:
        self.toys[name] = toy = Toy(self.cluster, name, self.record, inner=self.learn, least=2, keep=100.0)
        take_over = toy.elastic._take_over

        def taken_over(outcome: Outcome, anchor: Tensor, step: int) -> None:
            self.told.append((name, outcome))
            take_over(outcome, anchor, step)

        toy.elastic._take_over = taken_over  # type: ignore[method-assign]
        return toy


@pytest.mark.parametrize("dies", [False, True])
def test_a_delta_that_was_given_back_counts_once_if_its_commit_comes_back(dies: bool) -> None:
    split = Split(dies)
    results = split.cluster.play({name: split.run for name in "abcde"})
    assert split.phase == 7 and all(isinstance(toy, Toy) for toy in results.values()), results
    digest = results["a"].elastic.rounds.loop.agreed.state_digest
    assert all(toy.elastic.rounds.loop.agreed.state_digest == digest for toy in results.values())
    first = split.record.history(digest)[0]
    assert (first.fragment, first.names) == (0, ["a", "b"]), "what b held came back"
    for name, toy in results.items():
        for fragment in range(2):
            rounds = [one for one in split.record.history(digest) if one.fragment == fragment and name in one.names]
            counted = -sum(float(one.deltas[one.names.index(name)][0]) for one in rounds)
            trained = float(toy.trained[fragment][0] + (split.before[fragment][0] if name == "a" else 0))
            assert counted < 1.001 * trained, f"{name}, fragment {fragment}: {counted} of {trained}"
