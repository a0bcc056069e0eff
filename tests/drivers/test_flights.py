"""A replica's reports of its rounds in the air: times by its own clock, and the cause of a refusal."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.drivers.flights import Flights
from thinwire.testing.toy import adamw, batch, inner_step, journey, toy
from thinwire.types import State


@pytest.mark.parametrize("strategy", [tw.streaming_diloco(every=4, fragments=2, delay=1), tw.data_parallel()])
def test_seconds_are_counted_by_the_given_clock(strategy: tw.Strategy) -> None:
    def replica(group: tw.Group) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []
        model = toy()
        optimizer = adamw(model)
        with tw.Replica(
            strategy, model, optimizer, group, observer=lambda *_, **fields: heard.append(fields), clock=lambda: 1000.0
        ) as attached:
            for step in range(1, 6):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            assert attached.step == 5
            attached.finish()
            assert attached.seconds == attached.stall_seconds == 0
        return heard

    for heard in tw.run_threads(2, replica, timeout=600.0):
        seconds = {
            (name, fields[name]) for fields in heard for name in fields if name in ("stall_seconds", "seconds_spent")
        }
        assert seconds == {("stall_seconds", 0), ("seconds_spent", 0)}
        assert {fields[name] for fields in heard for name in ("begin", "end") if name in fields} == {1000.0}


def test_a_landing_reports_waiting_and_work_apart() -> None:
    """It waits from 10 to 13, and the landing is done at 20. Earlier landings have waited for 2 seconds."""
    heard: list[tuple[str, dict[str, Any]]] = []
    times = iter((10.0, 13.0, 20.0))
    training = SimpleNamespace(
        clock=lambda: next(times),
        observe=lambda event, step, **fields: heard.append((event, fields)),
        **{"step": 5, "stall_seconds": 2.0, "stopping": False},
    )
    update = SimpleNamespace(
        alike=False,
        fragment=SimpleNamespace(index=1),
        unlike=False,
        round=SimpleNamespace(number=3),
        **{"nbytes_sent": 8, "stop": False, "good": True},
        **{"begin": 6.0, "end": 12.0, "queued_seconds": 2.0, "transfer_seconds": 4.0},
    )
    flights = object.__new__(Flights)
    flights.digests = None
    flights.training, flights.pipeline = training, SimpleNamespace(wait=lambda _: None)  # type: ignore[assignment]
    flights.land(update)  # type: ignore[arg-type]
    flights.landed(update)  # type: ignore[arg-type]
    begin_and_spent = {"begin": 10.0, "stall_seconds": 3.0, "seconds_spent": 7.0}
    assert heard[1:] == [("land", {"fragment": 1, "round": 3} | begin_and_spent)] and training.stall_seconds == 5.0


def test_rounds_before_finish_are_reported_as_scheduled() -> None:
    """This includes rounds of gradients, which depart before their step."""
    one, _ = journey(tw.data_parallel(), 2, steps=3)
    assert [event["scheduled"] for event in one.heard("wire")] == [True] * 3


@dataclasses.dataclass(frozen=True)
class Endless(tw.pieces.outer.Outer):
    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return anchor + math.inf, state


def test_a_refused_round_reports_its_cause():
    """The cause is a replica's delta, or no replica's if the outer step overflows on a finite one. An aggregate that tolerates the first
    does not tolerate the second."""

    def poison(replica, step):
        if step == 2 and replica.group.rank == 1:
            replica.model.get_parameter("gain").grad = torch.tensor(math.nan)

    every_second = tw.Strategy(schedule=tw.pieces.schedule.Every(2))
    endless = dataclasses.replace(every_second, outer=Endless())
    median = {"aggregate": tw.lab.robust.coordinates.Median()}
    nan, infinity = (2, [1], "NaN or infinity in the delta"), (2, [], "the anchor would not be finite")
    for strategy, replicas, plan, due in (
        (every_second, 2, {"before_step": poison}, [nan]),
        (endless, 2, {}, [infinity]),
        (dataclasses.replace(every_second, **median), 3, {"before_step": poison}, []),
        (dataclasses.replace(endless, **median), 3, {}, [infinity]),
    ):
        first, *_ = journey(strategy, replicas, steps=2, **plan)
        assert [(event["step"], event["by"], event["reason"]) for event in first.heard("refused")][:1] == due
