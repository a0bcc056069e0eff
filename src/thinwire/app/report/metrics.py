"""The table of all metrics. Each row has a name, and how the value follows from the events of a run (app/records/events.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from thinwire.app.records.events import Event
from thinwire.app.records.sessions import finite, number, whole


@dataclass(frozen=True)
class Metric:
    """A number of one replica. A gauge is the value of the last event. A counter is the sum over all sessions of the run, so work
    that is done again after a restart counts twice. An elastic run has no `event` for some, whose value is `of_round`: that of a `round`
    of a fragment.
    """

    name: str
    event: str
    kind: Literal["gauge", "counter"]
    value: Callable[[Event], float]
    about: str
    of_round: Callable[[Event], float] | None = None


def _field(name: str) -> Callable[[Event], float]:
    return lambda event: number(event[name])


METRICS = (
    Metric("loss", "step", "gauge", _field("loss"), "training loss of an inner step"),
    Metric("learning_rate", "step", "gauge", _field("lr"), "of the inner optimizer"),
    Metric("gradient_norm", "step", "gauge", _field("grad_norm"), "before clipping"),
    Metric("step_seconds", "step", "gauge", _field("compute_seconds"), "that an inner step computed"),
    Metric("steps", "step", "counter", lambda event: 1.0, "inner steps"),
    Metric("compute_seconds", "step", "counter", _field("compute_seconds"), "in inner steps"),
    Metric("tokens", "step", "counter", _field("tokens"), "trained on; samples or batches of a job of your own"),
    Metric(
        "sent_bytes",
        "flight",
        "counter",
        _field("nbytes"),
        "packets of rounds, to all peers together",
        of_round=_field("nbytes"),
    ),
    Metric(
        "flight_seconds",
        "flight",
        "gauge",
        lambda event: finite(event["end"]) - finite(event["begin"]),
        "of a round in flight",
        of_round=_field("seconds_spent"),
    ),
    Metric(
        "rounds_landed",
        "land",
        "counter",
        lambda event: 1.0,
        "rounds that took effect",
        of_round=lambda event: float(event["committed"] is True),
    ),
    Metric("stall_seconds", "land", "counter", _field("stall_seconds"), "that training waited for rounds"),
    Metric(
        "rounds_refused", "refused", "counter", lambda event: 1.0, "rounds with NaN or infinity in somebody's delta"
    ),
    Metric("deltas_clipped", "clipped", "counter", lambda event: 1.0, "deltas of this replica that the guard clipped"),
    Metric("steps_skipped", "skip", "counter", lambda event: 1.0, "inner steps without an update"),
    Metric("members", "round", "gauge", lambda event: float(len(event["members"])), "in the view of a round (elastic)"),
    Metric("evaluation_loss", "eval", "gauge", _field("loss"), "of the anchors on what is held out"),
    Metric("checkpoint_bytes", "checkpoint", "gauge", _field("nbytes"), "of the last checkpoint"),
    Metric("warnings", "warning", "counter", lambda event: 1.0, "warnings of the run"),
)


class MetricValues:
    """The metrics of one replica, updated event after event."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}

    def take(self, event: Event) -> Mapping[str, float]:
        """Take `event`, and return the new values of the metrics that it changes."""
        changed, kind = {}, event["event"]
        exchanged = kind == "round" and whole(event.get("fragment", -1)) >= 0
        for metric in (*_BY_EVENT.get(kind, ()), *(_OF_ROUNDS if exchanged else ())):
            read = metric.value if metric.event == kind else metric.of_round
            value = _read(read, event) if read else math.nan
            if metric.kind == "counter":
                value = self.now.get(metric.name, 0.0) + finite(value)
            self.now[metric.name] = changed[metric.name] = value
        return changed


def _read(value: Callable[[Event], float], event: Mapping[str, Any]) -> float:
    try:
        return value(dict(event))
    except TypeError:  # a line that is not of this format
        return math.nan


_OF_ROUNDS = [metric for metric in METRICS if metric.of_round]
_BY_EVENT: dict[str, list[Metric]] = {}
for _metric in METRICS:
    _BY_EVENT.setdefault(_metric.event, []).append(_metric)
