"""A replica with feedback that dies and resumes: what feedback had held back in its checkpoint counts once, or is lost with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_toy import SIZES, RecordedRun, Returner, Toy, one_thread
from torch import Tensor

import thinwire as tw
from thinwire.codecs import Identity, TopK
from thinwire.data_ledger import LeasedReader
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.plan import RoundPlan
from thinwire.membership.testing.cluster import Killed, SimulatedCluster
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture
SAVED, STEPS = 10, 80
SPARSE = {"codec": TopK(density=0.2, values=Identity()), "feedback": tw.pieces.feedback.Feedback()}  # one value a delta


class SavesOnce(Toy):
    """Only b trains, until step `SAVED`, and has a checkpoint of that step; then it dies when it reaches `phase` for the nth time."""

    phase, nth = "call", 1

    def __init__(
        self, cluster: SimulatedCluster, name: str, record: RecordedRun, held: dict[str, Tensor], reads: bool
    ) -> None:
        reader = LeasedReader(seed=0, replicas=2, step=1, samples=1000) if reads else None
        super().__init__(
            cluster, name, record, inner=SavesOnce.learn, save_every=SAVED, least=2, reader=reader, **SPARSE
        )
        loop = self.elastic.rounds.loop
        fly, believe = loop._fly, loop._believe
        self.landed: list[tuple[int, str]] = []  # fragments and views of the deltas of b that counted

        def flown(view: View, plan: RoundPlan, ready: Ready) -> Any:
            moved = fly(view, plan, ready)
            if name == "b" and not self.restored and name in record.disk and view.group.rank in plan.counted:
                held[view.id] = moved.feedback["residual"]  # what its present life holds back, if this delta counts
            return moved

        def believed(view: View, plan: RoundPlan, ready: Ready, moved: Any, granted: bool = False, *reads: Any) -> None:
            believe(view, plan, ready, moved, granted, *reads)
            if moved is not None and "b" in (view.members[rank].name for rank in plan.counted):
                self.landed.append((plan.fragment, view.id))

        loop._fly, loop._believe = flown, believed  # type: ignore[method-assign]

    def learn(self, fragment: int) -> Tensor:
        if self.reader and fragment == 0:
            self.reader.draw(1)
            self.reader.trained()
        learns = self.name == "b" and self.step <= SAVED
        return torch.arange(1.0, SIZES[fragment] + 1) * self.step if learns else torch.zeros(SIZES[fragment])

    def save(self) -> None:
        if self.name == "b" and self.name not in self.record.disk:
            super().save()
            passed = self.cluster._passed.get(("b", self.phase), 0)
            self.cluster.at("b", self.phase, lambda: self.cluster.kill("b"), passed + self.nth)


class MeetsFirst(SavesOnce, Returner):
    """It meets the others before it loads its checkpoint."""


@pytest.mark.parametrize(("kind", "reads"), [(SavesOnce, False), (MeetsFirst, False), (MeetsFirst, True)])
@pytest.mark.parametrize(
    ("phase", "nth", "counts"),
    [("call", 1, 0), ("post", 1, 0), ("wait", 1, 1), ("call", 2, 1), ("call", 3, 2), ("call", 12, 2)],
)
def test_what_feedback_held_back_in_a_checkpoint_counts_once(
    kind: type[SavesOnce], reads: bool, phase: str, nth: int, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before a later delta is ready, while it travels, after the vote for it, or later: then deltas of `counts` fragments or more count."""
    monkeypatch.setattr(kind, "phase", phase)
    monkeypatch.setattr(kind, "nth", nth)
    cluster, record, held = SimulatedCluster(), RecordedRun(), dict[str, Tensor]()

    def run(name: str) -> SavesOnce:
        while True:
            try:
                toy = kind(cluster, name, record, held, reads)
                toy.train(STEPS)
                return toy
            except Killed:
                cluster.revive(name)

    results = cluster.play({name: run for name in "ab"})
    a, b = results["a"], results["b"]
    assert b.restored
    lost = {fragment: held[view] for fragment, view in a.landed if view in held}  # at its death
    # when it meets the others first, it may be counted once more before it loads
    assert len(lost) >= counts and bool(lost) == bool(counts)
    saved = [feedback["residual"] for _, _, feedback in record.disk["b"][1]]
    assert all(residual.any() for residual in saved), "the checkpoint has none"
    for fragment, piece in enumerate(b.pieces):
        there = 2 * (record.start[fragment] - a.pieces[fragment].anchor)  # a brought zeros
        here = piece.feedback["residual"] + piece.anchor - b.parameters[fragment].detach()
        gone = lost.get(fragment, torch.zeros_like(here))
        trained = sum(torch.arange(1.0, SIZES[fragment] + 1) * step for step in range(1, SAVED + 1))
        assert torch.equal(there + here + gone, -trained), (fragment, there, here, gone, trained)
