"""Codecs with levels in a replica's rounds: what the deadlines hear, and the levels after a resume."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import replace

import pytest

import thinwire as tw
from thinwire.codecs import E3M0, Identity, Int, Sign
from thinwire.lab.codecs.deadlines import Deadlines
from thinwire.lab.codecs.levelled import Levelled
from thinwire.pieces.partition import Whole
from thinwire.testing.toy import Journey, Plan, batch, inner_step, journey, own, still, toy, travel


@pytest.mark.parametrize(("beside", "taken"), [(0.0, [0.0, 0.0, 0.0, 0.0]), (10.0, [10.0, 2.0, 2.0, 1.0])])
def test_deadlines_hear_when_rounds_depart_arrive_and_land(monkeypatch, beside, taken):
    """Two seconds pass in four steps, one of them after the last flight, and none during a flight. By the clock of the other threads a round
    arrives `beside` seconds after its departure; then it has waited for the round before it."""
    both: list[list[tuple]] = []

    class Noting(Deadlines):
        def __init__(self):
            super().__init__()
            both.append([])
            self.told = both[-1]

        def share(self, now, nbytes, deadline):
            self.told.append(("share", deadline - now))
            return 0.0

        def departed(self, round_, now, nbytes):
            self.told.append(("departed", now, nbytes))

        def arrived(self, round_, now, nbytes, seconds, values=True):
            self.told.append(("arrived", now, nbytes, seconds, values))

        def landed(self, late):
            self.told.append(("landed", late))

    monkeypatch.setattr("thinwire.lab.codecs.pacer.Deadlines", Noting)
    codec = Levelled((Identity(), Sign(block=64)), skips=1)
    strategy = tw.streaming_sign(every=4, delay=1, fragments=1, codec=codec, partition=Whole())

    def replica(group: tw.Group) -> None:
        ticks, main = [0.0], threading.current_thread()

        def tick(replica: tw.Replica, step: int) -> None:
            ticks[0] += step % 4 in (2, 3)

        def clock() -> float:
            return ticks[0] + (0.0 if threading.current_thread() is main else beside)

        travel(Plan(strategy, steps=14, before_step=tick, clock=clock), group)

    tw.run_threads(2, replica, timeout=600.0)
    due = list[tuple]()
    for departed, nbytes, seconds in zip((2.0, 4.0, 6.0, 7.0), (71, 49, 71, 497), taken, strict=True):
        due += [("share", 0.5)] * (nbytes != 497 and departed > 2)  # neither the probe nor the end has a deadline
        due += [("departed", departed, nbytes), ("arrived", departed + beside, nbytes, seconds, nbytes != 49)]
        due += [("landed", beside > 0)]
    assert both == [due, due]


def test_a_round_that_training_waits_for_has_the_finest_level():
    """It has no deadline. This includes the first round, which in the air would probe the link."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(2), codec=Levelled((Int(8), Sign(block=64))))
    first, *_ = journey(strategy, 2, steps=4)
    assert len({event["nbytes"] for event in first.heard("flight")}) == 1
    finest, *_ = journey(replace(strategy, codec=Int(8)), 2, steps=4)
    assert [e["nbytes"] for e in first.heard("flight")] == [1 + e["nbytes"] for e in finest.heard("flight")]


AIR = {"every": 2, "delay": 1, "partition": Whole()}


@pytest.mark.parametrize(
    ("strategy", "nbytes"),
    [
        (tw.streaming_sign(fragments=1, codec=Levelled((Int(8), Sign(block=64))), **AIR), 71),
        (tw.lab.recipes.noloco(codec=Levelled((E3M0(8), Int(2))), **AIR), 574),
    ],
    ids=["deltas", "gossip"],
)
def test_a_first_round_in_the_air_departs_with_the_same_level_after_a_resume(strategy, nbytes):

    def replica(group: tw.Group) -> list[object]:
        heard: list[object] = []

        def observer(event: str, step: int, **fields: object) -> None:
            heard.extend(fields[name] for kind, name in (("flight", "nbytes"), ("wire", "scheduled")) if event == kind)

        def made() -> tw.Replica:
            model = toy()
            return tw.Replica(strategy, model, own(strategy, model), group, observer=observer, clock=still)

        with made() as first:
            for step in (1, 2):
                inner_step(first.model, first.optimizer, *batch(0, group.rank, step))
            saved = copy.deepcopy(first.state())
        with made() as second:
            second.load_state(*saved)
        return heard

    for heard in tw.run_threads(2, replica, timeout=600.0):
        assert heard == [True, nbytes, False, nbytes]


def test_a_resumed_fragment_has_skipped_no_round(monkeypatch):
    """A checkpoint does not hold the number of skips. Nothing fits into the time; the first departure does not know its speed."""
    monkeypatch.setattr(Deadlines, "share", lambda *_: 0.0)
    codec = Levelled((Int(8), Sign(block=64)), skips=1)

    def resume(replica: tw.Replica, step: int) -> None:
        for fragment in replica._driver.training.fragments if step == 1 else ():
            fragment.rounds = 5

    def replica(group: tw.Group) -> Journey:
        ticks = itertools.count()
        strategy = tw.streaming_sign(every=4, delay=1, fragments=2, codec=codec)
        return travel(Plan(strategy, steps=8, before_step=resume, clock=lambda: float(next(ticks))), group)

    for one in tw.run_threads(2, replica, timeout=600.0):
        first, second, *_ = one.heard("flight")
        assert first["nbytes"] > second["nbytes"] == 49 and first["fragment"] != second["fragment"]
