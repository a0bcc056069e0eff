"""One replica's event file read back: its events as arrays and spans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.records.clocks import Offset, offsets_of
from thinwire.records.departures import Integers, as_sent, fragment_of, sent_by, sent_of_each
from thinwire.records.events import Event, Tail
from thinwire.records.participation import CARRIER, RoundSeen, Steps, as_flights, session_begins
from thinwire.records.printable import printable
from thinwire.records.sessions import Joined, Lost, Span, finite, join, number, split, whole

Floats = NDArray[np.float64]


MOST_FRAGMENTS = 4096  # most fragments in figures


@dataclass(frozen=True, slots=True)
class Flight:
    """One fragment's exchange: in flight from `begin` to `end`, on the link from `link_begin` to `link_end`."""

    fragment: int
    round: int
    step: int
    begin: float
    end: float
    link_begin: float
    link_end: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the report: a warning, a resume, a refused round, a skipped step, a stop, or a change of membership."""

    seconds: float
    step: int
    replica: int | str
    kind: str
    text: str


@dataclass(frozen=True, eq=False)
class Evaluations:
    """Evaluation points, arrays [E]; `nbytes` is what the replica that evaluated had sent by then."""

    step: Integers
    seconds: Floats
    nbytes: Integers
    loss: Floats


@dataclass(frozen=True, eq=False)
class ReplicaRecord:
    """The record of one replica. Arrays over inner steps are [S]; `nbytes` are the bytes sent before the end of the step.

    A round that has not landed counts with the bytes that it foresaw. `foreseen` adds these of all rounds, a bound if sizes vary.
    """

    name: str  # replica 0, or replica 0, shard 1
    called: str  # as its file is: replica-0
    replica: int
    start: Event
    step: Integers
    loss: Floats
    smooth: Floats
    tokens: Integers
    begin: Floats
    compute_seconds: Floats
    nbytes: Integers
    flights: tuple[Flight, ...]
    stalls: tuple[Span, ...]
    merges: tuple[Span, ...]
    pauses: tuple[Span, ...]  # evaluations and checkpoints
    departed: Mapping[int, int]  # fragment -> rounds
    landed: Mapping[int, int]
    refused: Mapping[int, int]
    clipped: int  # deltas, by the guard
    sent: Mapping[int, int]  # fragment -> bytes
    foreseen: int
    skipped: int
    evaluations: Evaluations
    notes: tuple[Note, ...]
    lost: tuple[Lost, ...]
    windows: tuple[Span, ...]  # the training loop of each session, first step to last
    incarnations: tuple[Span, ...]  # of its process
    steps: Steps  # trained, jumped and counted
    rounds: tuple[RoundSeen, ...]  # rounds among replicas that come and go, as this one saw them
    stopped: str | None  # why the last session stopped before its time
    end: Event | None
    damaged: int
    clock: Offset | None = None  # of its machine, as far as its messages tell

    @classmethod
    def load_all(cls, paths: Sequence[Path]) -> list[ReplicaRecord]:
        """Read the event files of one run; those in which nothing was started are left out."""
        tails = [Tail(path) for path in paths]
        files = []
        for tail in tails:
            events = tail.read()
            last = tail.last()
            files.append((tail, split(events if last is None else [*events, last])))
        files = [(tail, sessions) for tail, sessions in files if sessions]
        clocks = offsets_of({tail.path.stem: sessions for tail, sessions in files})
        of_each = [clocks.get(tail.path.stem) for tail, _ in files]
        if all(of_each) or all(sessions[-1][0]["carrier"] == CARRIER for _, sessions in files):
            ahead = [clock.seconds if clock else 0.0 for clock in of_each]
            offsets: list[list[float]] = session_begins([sessions for _, sessions in files], ahead)
        else:
            offsets = [[] for _ in files]
        return [
            replace(
                _record(tail.path.stem, join(sessions, at), _steps(tail.path.stem, sessions), tail.damaged), clock=clock
            )
            for (tail, sessions), at, clock in zip(files, offsets, of_each)
        ]

    @property
    def sessions(self) -> int:
        return len(self.incarnations)

    @property
    def seconds(self) -> Floats:
        """When each step ended [S]."""
        return self.begin + self.compute_seconds

    @property
    def nbytes_sent(self) -> int:
        """Bytes of all packets that departed and count."""
        return sum(self.sent.values())

    @property
    def ledger(self) -> list[tuple[str, str, Event, Event]]:
        """(purpose, peer, what was sent, what was received), as the replica counted it by its end; empty before that."""
        counted = self.end["summary"].get("ledger") if self.end else None
        sent, received = (_by_purpose(counted, way) for way in ("sent", "received"))
        keys = sorted(sent.keys() | received.keys())
        return [(*key, sent.get(key, {}), received.get(key, {})) for key in keys]

    @property
    def stall_seconds(self) -> float:
        return sum(span.end - span.begin for span in self.stalls)

    @property
    def wall_seconds(self) -> float:
        """The training loop from first step to last, without evaluations and checkpoints."""
        whole = sum(window.end - window.begin for window in self.windows)
        return whole - sum(pause.overlap(window) for window in self.windows for pause in self.pauses)

    @property
    def compute_utilization(self) -> float:
        """Seconds in inner steps over `wall_seconds`; NaN before the first step."""
        wall = self.wall_seconds
        return float(self.compute_seconds.sum()) / wall if wall > 0 else math.nan

    def sent_between(self, edges: Floats) -> Floats:
        """Bytes on the link in each bin between `edges` [B+1] (seconds): [B]; a packet is spread over its transfer."""
        if not self.flights:
            return np.zeros(len(edges) - 1)
        begin = np.array([flight.link_begin for flight in self.flights])
        end = np.maximum([flight.link_end for flight in self.flights], begin + 1e-3)
        rate = np.array([float(flight.nbytes) for flight in self.flights]) / (end - begin)
        times = np.concatenate([begin, end])
        order = np.argsort(times, kind="stable")
        times, slope = times[order], np.cumsum(np.concatenate([rate, -rate])[order])
        sent = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
        between: Floats = np.maximum(np.diff(np.interp(edges, times, sent)), 0.0)
        return between


def _by_purpose(counted: object, way: str) -> dict[tuple[str, str], Event]:
    """{(purpose, peer): counts} of a ledger's dict; what is not in its form is passed over."""
    tree = counted.get(way) if isinstance(counted, dict) else None
    purposes = tree.items() if isinstance(tree, dict) else ()
    return {
        (purpose, peer): count
        for purpose, peers in purposes
        if isinstance(peers, dict)
        for peer, count in peers.items()
        if isinstance(count, dict)
    }


def smoothed(loss: Iterable[float], keep: float = 0.9) -> Floats:
    """Exponential moving average without start-up bias; values that are not finite are passed over."""
    mean, weight, out = 0.0, 0.0, []
    for value in loss:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out.append(mean / weight if weight else math.nan)
    return np.array(out, dtype=np.float64)


def fragments_of(start: Event) -> list[tuple[str, int]]:
    """(name, parameters) of the fragments that a `start` event lists, `MOST_FRAGMENTS` at most."""
    listed = start["fragments"][:MOST_FRAGMENTS] if isinstance(start["fragments"], list) else []
    pairs = [item if isinstance(item, dict) else {} for item in listed]
    return [(str(item.get("name", index)), whole(item.get("numel"))) for index, item in enumerate(pairs)]


def _steps(called: str, sessions: Sequence[Sequence[Event]]) -> Steps:
    steps = Steps(called)
    for session in sessions:
        for event in session:
            steps.take(event)
    return steps


def _record(called: str, joined: Joined, own_steps: Steps, damaged: int) -> ReplicaRecord:
    of: dict[str, list[tuple[float, Event]]] = {}
    for offset, event in joined.kept:
        of.setdefault(event["event"], []).append((offset, event))
    start = of["start"][-1][1]
    rounds = of.get("round", [])
    if start["carrier"] == CARRIER:
        of |= as_flights(rounds)
    names = {name: index for index, (name, _) in enumerate(fragments_of(start))}
    steps, lands = [item for item in of.get("step", []) if _has_times(item[1])], of.get("land", [])
    told = [item for item in joined.kept if item[1]["event"] in ("step", "eval")]
    departs = as_sent(of.get("depart", []), of.get("flight", []), names)
    stalls = tuple(span for offset, event in lands if (span := _stall(offset, event, names)).end > span.begin)
    loss = _column(steps, "loss")
    dropped = of.get("refused", [])
    refused_rounds = {(fragment_of(event, names), event["round"]) for _, event in dropped}
    landed = [item for item in lands if (fragment_of(item[1], names), item[1]["round"]) not in refused_rounds]
    return ReplicaRecord(
        name=called.replace("-", " ").replace(".", ", "),
        called=called,
        replica=whole(start["replica"]),
        start=start,
        step=np.array([event["step"] for _, event in steps], dtype=np.int64),
        loss=loss,
        smooth=smoothed(loss),
        tokens=np.array([whole(event["tokens"]) for _, event in steps], dtype=np.int64),
        begin=_column(steps, "begin") + np.array([offset for offset, _ in steps]),
        compute_seconds=_column(steps, "compute_seconds"),
        nbytes=sent_by([event["step"] for _, event in steps], departs, told),
        flights=_flights(of.get("flight", []), departs, names),
        stalls=stalls,
        merges=tuple(_merge(offset, event, names) for offset, event in landed),
        pauses=tuple(_pause(offset, event) for kind in ("eval", "checkpoint") for offset, event in of.get(kind, [])),
        departed=_rounds(departs, names),
        landed=_rounds(landed, names),
        refused=_rounds(dropped, names),
        clipped=len(of.get("clipped", [])),
        sent=sent_of_each(departs, names),
        foreseen=sum(whole(event["nbytes"]) for _, event in of.get("depart", [])),
        skipped=len(of.get("skip", [])),
        evaluations=_evaluations(of.get("eval", []), departs, told),
        notes=_notes(joined, called if start["carrier"] == CARRIER else whole(start["replica"])),
        lost=tuple(joined.lost),
        windows=_windows(joined),
        incarnations=tuple(joined.incarnations),
        steps=own_steps,
        rounds=tuple(RoundSeen.of(event, offset) for offset, event in rounds),
        stopped=_stopped(joined),
        end=_end(joined),
        damaged=damaged + len(of.get("step", [])) - len(steps),
    )


def _has_times(step: Event) -> bool:
    return all(math.isfinite(number(step[name])) for name in ("begin", "compute_seconds"))


def _column(events: Sequence[tuple[float, Event]], name: str) -> Floats:
    return np.array([number(event[name]) for _, event in events], dtype=np.float64)


def _flights(
    flights: Sequence[tuple[float, Event]], departs: Sequence[tuple[float, Event]], names: Mapping[str, int]
) -> tuple[Flight, ...]:
    left = {(fragment_of(event, names), event["round"]): event for _, event in departs}
    found = []
    for offset, event in flights:
        key = (fragment_of(event, names), event["round"])
        depart = left.get(key)
        begin, end = offset + finite(event["begin"]), offset + finite(event["end"])
        link_begin = min(begin + finite(event["queued_seconds"]), end)
        transfer = finite(event["transfer_seconds"])
        link_end = min(link_begin + transfer, end) if transfer > 0 else end
        nbytes = whole(depart["nbytes"]) if depart else 0
        step = int(depart["step"] if depart else event["step"])
        end, round_ = max(begin, end), whole(event["round"])
        found.append(Flight(key[0], round_, step, begin, end, link_begin, link_end, nbytes))
    return tuple(sorted(found, key=lambda flight: flight.begin))


def _stall(offset: float, event: Event, names: Mapping[str, int]) -> Span:
    begin = offset + finite(event["begin"])
    return Span(begin, begin + finite(event["stall_seconds"]), event["step"], fragment_of(event, names))


def _merge(offset: float, event: Event, names: Mapping[str, int]) -> Span:
    begin = _stall(offset, event, names).end
    return Span(begin, begin + finite(event["seconds_spent"]), event["step"], fragment_of(event, names))


def _pause(offset: float, event: Event) -> Span:
    """An evaluation or a checkpoint, which are written when they are over."""
    end = offset + finite(event["seconds"])
    return Span(end - finite(event["seconds_spent"]), end, event["step"])


def _rounds(events: Sequence[tuple[float, Event]], names: Mapping[str, int]) -> Mapping[int, int]:
    return Counter(fragment_of(event, names) for _, event in events)


def _evaluations(
    evals: Sequence[tuple[float, Event]], departs: Sequence[tuple[float, Event]], told: Sequence[tuple[float, Event]]
) -> Evaluations:
    evals = [(offset, event) for offset, event in evals if event["of"] != "start"]
    steps = [event["step"] for _, event in evals]
    return Evaluations(
        step=np.array(steps, dtype=np.int64),
        seconds=np.array([offset + finite(event["seconds"]) for offset, event in evals], dtype=np.float64),
        nbytes=sent_by(steps, departs, told),
        loss=_column(evals, "loss"),
    )


def _windows(joined: Joined) -> tuple[Span, ...]:
    """One a session: from its first step to the end of its last step or landing."""
    reach: dict[float, list[float]] = {}
    for offset, event in joined.kept:
        spent = {"step": "compute_seconds", "land": "seconds_spent"}.get(event["event"])
        if spent is not None:
            begin = offset + finite(event["begin"])
            reach.setdefault(offset, []).extend(
                (begin, begin + finite(event.get("stall_seconds")) + finite(event[spent]))
            )
    return tuple(Span(min(times), max(times), 0) for times in reach.values())


def _last_session(joined: Joined, kind: str) -> Iterator[Event]:
    last_start = max(index for index, (_, event) in enumerate(joined.kept) if event["event"] == "start")
    return (event for _, event in joined.kept[last_start:] if event["event"] == kind)


def _end(joined: Joined) -> Event | None:
    return next((event for event in _last_session(joined, "end") if isinstance(event["summary"], dict)), None)


def _stopped(joined: Joined) -> str | None:
    return next((str(event["reason"]) for event in _last_session(joined, "stop")), None)


def _notes(joined: Joined, replica: int | str) -> tuple[Note, ...]:
    notes, before = [], set[str]()
    for offset, event in joined.kept:
        kind, text = event["event"], text_of_event(event)
        if text and not (kind in _ONCE and text in before):
            before.add(text)
            notes.append(Note(offset + finite(event["seconds"]), event["step"], replica, kind, text))
    return tuple(notes)


_ONCE = ("late", "alone", "retry")  # otherwise they would fill the page


def text_of_event(event: Event) -> str:
    """The text of an event for the report; empty if it has none."""
    return printable(_told(event))


def _told(event: Event) -> str:
    kind = event["event"]
    if kind in ("skip", "stop", "alone", "retry"):
        return str(event["reason"])
    if kind == "warning":
        return str(event["message"]).removeprefix("JobError: ")  # its words name the user's own line
    if kind == "refused":
        return f"round {event['round']} of fragment {event['fragment']}, by {event['by']}: {event['reason']}"
    if kind in ("resume", "back"):
        where = f"from step {event['from_step']}" if kind == "resume" else f"from round {event['round']}"
        passed_over = "".join(f"; passed over {_skipped(item)}" for item in event["skipped"] or ())
        return f"{where}, {event['path'] or 'without a checkpoint of its own'}{passed_over}"
    if kind == "caught_up":
        return f"took over what {event['donor']} held at round {event['round']}"
    if kind == "keeps":
        return f"keeps the final weights for {', '.join(map(str, event['late']))}"
    if kind == "late":
        return "a fragment did not depart, because its last round was not over: the link or other replicas are slower than the schedule needs"
    return f"round {event['round']}: {event['reason']}" if kind == "doubt" else ""


def _skipped(item: object) -> str:
    return f"{item.get('path')} ({item.get('reason')})" if isinstance(item, dict) else str(item)
