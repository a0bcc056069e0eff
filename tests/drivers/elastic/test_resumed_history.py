"""All replicas die; two with older checkpoints go on, and two with a newer state come late: theirs counts, and each delta once."""

from __future__ import annotations

from collections import Counter

import torch
from elastic_toy import SIZES, RecordedRun, Returner, Toy, agree, one_thread
from torch import Tensor

from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous

__all__ = ["one_thread"]  # a fixture
STEP, STEPS = {"a": 12.0, "b": 24.0, "c": 60.0, "d": 120.0}, 60  # so that a mean tells whose deltas are in it
SAVED, DIE = 7, 28  # the last checkpoint of a and b; c and d save after each step


class LateReturner(Returner):
    """c and d load their checkpoints first, so that their history is heard at once."""

    def begin(self) -> Toy:
        if self.name in "cd":
            return Toy.begin(self)
        return super().begin()

    def save(self) -> None:
        if self.name in "cd" or self.name not in self.record.disk:
            super().save()


def test_a_newer_history_that_comes_late_counts_each_delta_once() -> None:
    cluster, record, trained, lives = SimulatedCluster(), RecordedRun(), Counter[str](), Counter[str]()
    before: set[str] = set()  # rounds before the deaths
    late = {"a": 0.0, "b": 0.0, "c": 5.5, "d": 5.5}  # a and b hold one round alone: one of two fragments

    def one(toy: Toy, fragment: int) -> Tensor:
        trained[toy.name] += fragment == 0
        if toy.name == "c" and fragment == 0 and trained["c"] == DIE and lives["c"] == 1:
            for name in "abcd":
                cluster.kill(name)
        return torch.full((SIZES[fragment],), STEP[toy.name])

    def run(name: str) -> Toy:
        while True:
            lives[name] += 1
            try:
                return LateReturner(
                    cluster, name, record, inner=one, save_every=1 if name in "cd" else SAVED, least=2
                ).train(STEPS)
            except Killed:
                before.update(record.commits)
                trained[name] = 0
                cluster.revive(name)
                ThreadRendezvous(cluster, name).sleep(late[name])

    results = cluster.play({name: run for name in "abcd"})
    agree(results, record)
    assert lives == dict.fromkeys("abcd", 2), lives
    history = record.history(results["a"].elastic.rounds.loop.agreed.state_digest)
    known, final = {id(record.commits[digest]) for digest in before}, {id(one) for one in history}
    alone = [one for one in record.commits.values() if id(one) not in known | final]
    assert [set(one.names) for one in alone] == [{"a", "b"}], "a and b held no round before c came"
    later = [one for one in history if id(one) not in known]
    for fragment in range(2):
        for name in "ab":  # what c's checkpoint holds was in no round yet
            deltas = [dict(zip(r.names, r.deltas)) for r in later if r.fragment == fragment and name in r.names]
            counted = sum(float(-named[name][0]) / STEP[name] for named in deltas)
            assert counted <= trained[name], f"{name}: {counted} of {trained[name]} steps in fragment {fragment}"
