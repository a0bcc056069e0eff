"""The sessions of one event file, joined.

A run that was killed and resumed has written some steps twice. The lines of these steps before the resume are dropped (what they
cost is kept as `lost`), and the sessions follow each other in seconds, the lost time included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from thinwire.records.events import Event

_ALWAYS_KEPT = ("start", "resume", "warning", "stop")  # these stay true when their step is done again


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a replica, in seconds since the run began."""

    begin: float
    end: float
    step: int
    fragment: int = -1

    def overlap(self, other: Span) -> float:
        """Seconds that both have in common."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclass(frozen=True, slots=True)
class Lost:
    """Work that a resume did again."""

    span: Span
    steps: int
    nbytes: int


@dataclass
class Joined:
    """Events that count, each with the second at which its session began."""

    kept: list[tuple[float, Event]] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    incarnations: list[Span] = field(default_factory=list)  # the sessions


def split(events: Iterable[Event]) -> list[list[Event]]:
    """The sessions, each from its `start` on."""
    sessions: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            sessions.append([event])
        elif sessions:
            sessions[-1].append(event)
    return sessions


def _from_step(session: Sequence[Event]) -> int | None:
    """The step after which this session began to write; None if it wrote no step."""
    for event in session:
        if event["event"] == "resume":
            return whole(event["from_step"])
        if event["event"] == "step":  # it began from nothing
            return int(event["step"]) - 1
    return None


def join(sessions: Sequence[Sequence[Event]], offsets: Sequence[float] = ()) -> Joined:
    """Join `sessions` end to end (or at `offsets` seconds), and drop steps that a later one did again."""
    joined, offset = Joined(), 0.0
    for index, session in enumerate(sessions):
        offset = offsets[index] if offsets else offset
        from_step = _from_step(session)
        if from_step is not None:
            _drop(joined, from_step, offset)
        joined.kept += [(offset, event) for event in session]
        end = offset + max(_end_of(event) for event in session)
        joined.incarnations.append(Span(offset, end, session[-1]["step"]))
        offset = end
    return joined


def _drop(joined: Joined, from_step: int, resumed_at: float) -> None:
    """Take out what came after the checkpoint of `from_step`; the last lines of that step may stand behind it as well."""
    saved = (i for i, (_, e) in enumerate(joined.kept) if e["event"] == "checkpoint" and e["step"] == from_step)
    last = max(saved, default=len(joined.kept))
    kept: list[tuple[float, Event]] = []
    gone: list[tuple[float, Event]] = []
    for index, (offset, event) in enumerate(joined.kept):
        stays = event["event"] in _ALWAYS_KEPT or (event["step"] <= from_step and index <= last)
        (kept if stays else gone).append((offset, event))
    joined.kept = kept
    if not gone:
        return
    begin = min(offset + finite(event.get("begin", event["seconds"])) for offset, event in gone)
    nbytes = sum(whole(event["nbytes"]) for _, event in gone if event["event"] == "depart")
    steps = sum(event["event"] == "step" for _, event in gone)
    joined.lost.append(Lost(Span(begin, max(begin, resumed_at), from_step), steps, nbytes))


def _end_of(event: Event) -> float:
    return max(finite(event["seconds"]), finite(event.get("end")))


def number(value: object) -> float:
    """A field that should be a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def whole(value: object) -> int:
    """A field that should be a whole number; 0 if it is no finite one."""
    return int(finite(value))


def finite(value: object) -> float:
    """A field that should be a finite number; 0 if it is none."""
    result = number(value)
    return result if math.isfinite(result) else 0.0
