"""One replica's event file as it counts: frequent kinds of events as columns of numbers, others as they are.

A run that was killed and resumed has written some steps twice. The lines of these steps before the resume are dropped (what they
cost is kept as `lost`). Events are read one after the other, and a run of weeks has millions, so a step takes 72 bytes here, not a
thousand.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.app.records.clocks import Timed
from thinwire.app.records.events import Event, Tail, steps_in
from thinwire.app.records.participation import RoundSeen, Steps
from thinwire.app.records.round_log import RoundLog
from thinwire.app.records.sessions import Lost, Span, finite, number, whole
from thinwire.app.records.start import Start

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_COLUMNS = {
    "step": ("begin", "compute_seconds", "loss", "tokens", "sent"),
    "depart": ("fragment", "round", "nbytes"),
    "flight": ("fragment", "round", "nbytes", "begin", "end", "queued_seconds", "transfer_seconds"),
    "land": ("fragment", "round", "begin", "stall_seconds", "seconds_spent"),
    "refused": ("fragment", "round"),
    "clipped": (),
    "": (),  # kinds that no figure uses
}
_AS_IT_IS = (
    *("start", "eval", "checkpoint", "resume", "back", "stop", "warning", "end", "refused", "skip", "caught_up"),
    *("alone", "doubt", "keeps", "late", "retry"),
)
_OF_ROUNDS = ("depart", "flight", "land", "refused")  # in an elastic run they follow from the rounds
_ALWAYS_KEPT = ("start", "resume", "warning", "stop")  # these stay true when their step is done again
MOST_WARNINGS = 1000  # of a replica: the first
ONCE = ("late", "alone", "retry")  # otherwise they would fill the page


class Columns:
    """Rows of numbers. Each has its `place` in the file, its `session`, `step` and `seconds`, and the fields of its kind of event.

    >>> columns = Columns("loss")
    >>> columns.add(0, 0, 1, 0.5, 2.25)
    >>> columns["loss"], columns.whole("step")
    (array([2.25]), array([1]))
    """

    def __init__(self, *names: str) -> None:
        self._at = {name: index for index, name in enumerate(("place", "session", "step", "seconds", *names))}
        self._values = array("d")

    def add(self, *values: float) -> None:
        self._values.extend(values)

    def __len__(self) -> int:
        return len(self._values) // len(self._at)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def __getitem__(self, name: str) -> Floats:
        column: Floats = self._rows()[:, self._at[name]].copy()
        return column

    def finite(self, name: str) -> Floats:
        """A column with 0 in place of what is no finite number."""
        return np.nan_to_num(self[name], nan=0.0, posinf=0.0, neginf=0.0)

    def whole(self, name: str) -> Integers:
        """A column as whole numbers, likewise."""
        return np.clip(self.finite(name), -(2.0**62), 2.0**62).astype(np.int64)

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Leave out the other rows."""
        self._values = array("d", self._rows()[stays].tobytes())

    def _rows(self) -> Floats:
        return np.asarray(self._values).reshape(-1, len(self._at))


class Placed(NamedTuple):
    """An event, its place in the file, and the number of its session."""

    place: int
    session: int
    event: Event


class PlacedRound(NamedTuple):
    """A round, the place of its event in the file, the number of its session, and the step."""

    place: int
    session: int
    step: int
    seen: RoundSeen


@dataclass
class Session:
    """One session of the file: its start, the first place in the file, and its last line."""

    start: Start
    first: int
    end: float = 0.0
    step: int = 0
    trains: bool = False  # it has resumed, or done a step
    said: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class _Dropped:
    """Work that session `again` did again; `begins` is when the first event of each earlier session was that is gone."""

    again: int
    from_step: int
    begins: dict[int, float]
    steps: int
    nbytes: int


class History:
    """The events of the replica `called` that count; `take` them in the order of its file."""

    def __init__(self, called: str) -> None:
        self.called = called
        self.damaged = self.warnings = self.merged = 0
        self.sessions: list[Session] = []
        self.columns = {kind: Columns(*names) for kind, names in _COLUMNS.items()}
        self.others: list[Placed] = []
        self.rounds: list[PlacedRound] = []
        self.timed: list[Timed] = []
        self.log: RoundLog | None = None  # of the last session
        self.steps = Steps(called)
        self._place = 0
        self._dropped: list[_Dropped] = []

    @classmethod
    def read(cls, path: Path) -> History:
        """The history in the file `path`."""
        tail, history = Tail(path), cls(path.stem)
        for event in tail.events():
            history.take(event)
        if last := tail.last():
            history.take(last)
        history.damaged = tail.damaged
        if history.log:
            history.log.damaged += tail.damaged
        return history

    @property
    def elastic(self) -> bool:
        return self.sessions[-1].start.elastic

    def take(self, event: Event) -> None:
        """Learn from the next event. What comes before the first start is passed over."""
        kind, self._place = event["event"], self._place + 1
        if kind == "start":
            self.sessions.append(Session(Start.of(event), self._place))
            self.log = RoundLog(self.sessions[-1].start, self.called)
        if self.log is None:
            return
        session = self.sessions[-1]
        if kind in ("step", "resume") and not session.trains:
            session.trains = True
            self._drop(whole(event["from_step"]) if kind == "resume" else event["step"] - 1)
        seconds = finite(event["seconds"])
        session.step, session.end = event["step"], max(session.end, seconds, finite(event.get("end")))
        elastic = session.start.elastic
        if elastic:
            self.steps.take(event)
        if kind == "step":
            self.merged += steps_in(event) if steps_in(event) > 1 else 0
        if record := self.log.take(event):
            self.timed.append(Timed(session.start.opened, record))
        if kind in _AS_IT_IS and self._is_news(session, event):
            self.others.append(Placed(self._place, len(self.sessions) - 1, event))
        if kind == "round":
            self.rounds.append(PlacedRound(self._place, len(self.sessions) - 1, event["step"], RoundSeen.of(event)))
            if elastic:
                self._add_round(event)
        if kind not in _ALWAYS_KEPT:
            self._add(kind if kind in _COLUMNS and not (elastic and kind in _OF_ROUNDS) else "", event, seconds)

    def _is_news(self, session: Session, event: Event) -> bool:
        if event["event"] == "warning":
            self.warnings += 1
            return self.warnings <= MOST_WARNINGS
        if event["event"] not in ONCE:
            return True
        told = event["event"], str(event.get("reason"))
        new = told not in session.said
        session.said.add(told)
        return new

    def _add(self, kind: str, event: Event, seconds: float) -> None:
        fields = [number(event.get(name)) for name in _COLUMNS[kind]]
        if fields and kind != "step":  # an elastic replica writes the name of its fragment
            fields[0] = self.sessions[-1].start.fragment_of(event)
        self.columns[kind].add(self._place, len(self.sessions) - 1, event["step"], seconds, *fields)

    def _add_round(self, event: Event) -> None:
        """Add a round as the departure, flight and landing that a fixed group's replica would have told of."""
        fragment = whole(event["fragment"])
        if fragment < 0:
            return
        end = finite(event["seconds"])
        begin = end - finite(event["seconds_spent"])
        same = {**event, "queued_seconds": 0.0, "transfer_seconds": 0.0, "stall_seconds": 0.0, "seconds_spent": 0.0}
        self._add("depart", {**same, "nbytes": event["foreseen"]}, begin)
        self._add("flight", {**same, "begin": begin, "end": end}, end)
        self._add("land", {**same, "begin": end}, end)
        if event["committed"] is False:
            self._add("refused", same, end)

    def _drop(self, from_step: int) -> None:
        """Take out what earlier sessions wrote after the checkpoint of `from_step`; the last lines of that step may stand behind it as well."""
        first = self.sessions[-1].first
        checkpoints = [one for one in self.of("checkpoint") if one.place < first and one.event["step"] == from_step]
        last = max((one.place for one in checkpoints), default=first)

        def gone(place: Any, step: Any) -> Any:  # of one event, or of the rows of columns
            return (place < first) & ((step > from_step) | (place > last))

        begins: dict[int, float] = {}
        steps = nbytes = 0
        for kind, columns in self.columns.items():
            left_out = gone(columns["place"], columns["step"])
            begin, session = columns.finite("begin" if "begin" in columns else "seconds"), columns.whole("session")
            for one in np.unique(session[left_out]).tolist():
                least = float(begin[left_out & (session == one)].min())
                begins[one] = min(begins.get(one, least), least)
            steps += int(left_out.sum()) if kind == "step" else 0
            nbytes += int(columns.whole("nbytes")[left_out].sum()) if kind == "depart" and not self.elastic else 0
            columns.keep(~left_out)
        self.others = [
            one for one in self.others if one.event["event"] in _ALWAYS_KEPT or not gone(one.place, one.event["step"])
        ]
        self.rounds = [one for one in self.rounds if not gone(one.place, one.step)]
        if begins:
            self._dropped.append(_Dropped(len(self.sessions) - 1, from_step, begins, steps, nbytes))

    def offsets(self, begins: Sequence[float]) -> Floats:
        """The second at which each session begins: as given, or end to end."""
        ends = [session.end for session in self.sessions]
        return np.array(begins if begins else np.cumsum([0.0, *ends[:-1]]), dtype=np.float64)

    def lost(self, offsets: Floats) -> tuple[Lost, ...]:
        """Work that was done again, with sessions that begin at `offsets`."""
        found = []
        for one in self._dropped:
            begin = min(float(offsets[session]) + seconds for session, seconds in one.begins.items())
            span = Span(begin, max(begin, float(offsets[one.again])), one.from_step)
            found.append(Lost(span, one.steps, one.nbytes))
        return tuple(found)

    def last_session(self, kind: str) -> list[Event]:
        """The events of a kind in the last session."""
        last = len(self.sessions) - 1
        return [one.event for one in self.others if one.session == last and one.event["event"] == kind]

    def of(self, kind: str) -> list[Placed]:
        """The events of a kind that is kept as it is."""
        return [one for one in self.others if one.event["event"] == kind]
