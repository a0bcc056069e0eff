"""One replica's event file read back: its events as arrays and spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.app.records.clocks import Offset, offsets_of
from thinwire.app.records.departures import SentBytes, places_in, round_keys, sent_bytes
from thinwire.app.records.events import Event
from thinwire.app.records.history import MOST_WARNINGS, ONCE, Columns, Floats, History, Integers, Placed
from thinwire.app.records.participation import RoundSeen, Steps, session_begins
from thinwire.app.records.printable import printable
from thinwire.app.records.round_log import RoundLog
from thinwire.app.records.sessions import Lost, Span, finite, number
from thinwire.app.records.start import Start


@dataclass(frozen=True, eq=False)
class RecordedFlights:
    """Exchanges of fragments, arrays [F] in the order of `begin`: in flight from `begin` to `end`, on the link from `link_begin` to `link_end`."""

    fragment: Integers
    round: Integers
    step: Integers
    begin: Floats
    end: Floats
    link_begin: Floats
    link_end: Floats
    nbytes: Integers

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, eq=False)
class Spans:
    """Stretches of time, arrays [N]."""

    begin: Floats
    end: Floats
    step: Integers
    fragment: Integers

    @property
    def seconds(self) -> Floats:
        return self.end - self.begin

    def __len__(self) -> int:
        return len(self.begin)


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
    start: Start
    step: Integers
    loss: Floats
    smooth: Floats
    tokens: Integers
    begin: Floats
    compute_seconds: Floats
    nbytes: Integers
    flights: RecordedFlights
    stalls: Spans
    merges: Spans
    pauses: tuple[Span, ...]  # evaluations and checkpoints
    evaluation_seconds: float
    saving_seconds: float
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
    opened: tuple[float, ...]  # the time of day at which each of them began
    steps: Steps  # trained, jumped and counted
    rounds: tuple[RoundSeen, ...]  # rounds among replicas that come and go, as this one saw them
    stopped: str | None  # why the last session stopped before its time
    end: Mapping[str, Any] | None  # the summary with which its last session ended
    log: RoundLog  # of its last session
    damaged: int
    clock: Offset | None = None  # of its machine, as far as its messages tell

    @classmethod
    def load_all(cls, paths: Sequence[Path]) -> list[ReplicaRecord]:
        """Read the event files of one run; those in which nothing was started are left out."""
        files = [history for path in paths if (history := History.read(path)).sessions]
        clocks = offsets_of({history.called: history.timed for history in files})
        of_each = [clocks.get(history.called) for history in files]
        begins: list[list[float]] = [[] for _ in files]
        if all(of_each) or all(history.elastic for history in files):
            spans = [[(one.start.opened, one.start.opened + one.end) for one in history.sessions] for history in files]
            begins = session_begins(spans, [clock.seconds if clock else 0.0 for clock in of_each])
        return [_record(*one) for one in zip(files, begins, of_each)]

    @property
    def replica(self) -> int:
        return self.start.replica

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
        counted = self.end.get("ledger") if self.end is not None else None
        sent, received = (_by_purpose(counted, way) for way in ("sent", "received"))
        keys = sorted(sent.keys() | received.keys())
        return [(*key, sent.get(key, {}), received.get(key, {})) for key in keys]

    @property
    def stall_seconds(self) -> float:
        return float(self.stalls.seconds.sum())

    @property
    def wall_seconds(self) -> float:
        """The training loop from first step to last, without evaluations and checkpoints."""
        whole = sum(window.end - window.begin for window in self.windows)
        return whole - sum(pause.overlap(window) for window in self.windows for pause in self.pauses)

    @property
    def time(self) -> Mapping[str, float]:
        """Seconds of its process, or of all its processes one after another: `elapsed` is the sum of the other parts."""
        elapsed = sum(one.end - one.begin for one in self.incarnations)
        start = sum(
            max(
                0.0,
                min((w.begin for w in self.windows if one.begin <= w.begin <= one.end), default=one.end) - one.begin,
            )
            for one in self.incarnations
        )
        told = number(self.end.get("stall_seconds")) if self.end is not None else math.nan
        stalled = min(told if math.isfinite(told) and told >= 0 else self.stall_seconds, self.wall_seconds)
        evaluation, saving = self.evaluation_seconds, self.saving_seconds
        training = self.wall_seconds - stalled
        end = max(0.0, elapsed - start - training - stalled - evaluation - saving)
        parts = {
            "start": start, "training": training, "stalled": stalled, "evaluation": evaluation, "saving": saving, "end": end,
        }  # fmt: skip
        return {"elapsed": sum(parts.values())} | parts

    def time_of_command(self, began: float, seconds: float) -> Mapping[str, float]:
        """`time`, with all that the command took that trained last: it began at the time of day `began`, and has lasted for `seconds`. What it
        did before its replicas' first process is part of `start`, what it did besides is part of `end`.
        """
        parts = self.time
        here = [(opened, one.end - one.begin) for opened, one in zip(self.opened, self.incarnations) if opened >= began]
        if not here:
            return parts
        before = min(here)[0] - began
        rest = max(0.0, seconds - before - sum(lasted for _, lasted in here))
        more = {"elapsed": before + rest, "start": before, "end": rest}
        return {what: spent + more.get(what, 0.0) for what, spent in parts.items()}

    @property
    def compute_utilization(self) -> float:
        """Seconds in inner steps over `wall_seconds`; NaN before the first step."""
        wall = self.wall_seconds
        return float(self.compute_seconds.sum()) / wall if wall > 0 else math.nan

    def sent_between(self, edges: Floats) -> Floats:
        """Bytes on the link in each bin between `edges` [B+1] (seconds): [B]; a packet is spread over its transfer."""
        if not len(self.flights):
            return np.zeros(len(edges) - 1)
        begin = self.flights.link_begin
        end = np.maximum(self.flights.link_end, begin + 1e-3)
        rate = self.flights.nbytes / (end - begin)
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
    """Exponential moving average without start-up bias; NaN where the value is not finite, so that no older one stands for it."""
    mean, weight, out = 0.0, 0.0, []
    for value in loss:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out.append(mean / weight if math.isfinite(value) else math.nan)
    return np.array(out, dtype=np.float64)


def _record(history: History, begins: Sequence[float], clock: Offset | None) -> ReplicaRecord:
    offsets = history.offsets(begins)
    columns, start = history.columns, history.sessions[-1].start
    steps, log = columns["step"], history.log
    assert log
    departs, flights, lands = (columns[kind] for kind in ("depart", "flight", "land"))
    refused = columns["refused"]
    nbytes = sent_bytes(departs, flights)
    evaluations = history.of("eval")
    sent = SentBytes(departs, nbytes, steps, evaluations)
    timed = np.isfinite(steps["begin"]) & np.isfinite(steps["compute_seconds"])
    step, loss = steps.whole("step")[timed], steps["loss"][timed]
    begin, compute_seconds = steps["begin"] + _offset(steps, offsets), steps["compute_seconds"]
    waits = lands.finite("begin") + _offset(lands, offsets)
    ready = waits + lands.finite("stall_seconds")
    lasted, counts = ready > waits, ~places_in(round_keys(refused), round_keys(lands))[1]
    ends = [one["summary"] for one in history.last_session("end") if isinstance(one["summary"], dict)]
    stops = history.last_session("stop")
    return ReplicaRecord(
        name=history.called.replace("-", " ").replace(".", ", "),
        called=history.called,
        start=start,
        step=step,
        loss=loss,
        smooth=smoothed(loss.tolist()),
        tokens=steps.whole("tokens")[timed],
        begin=begin[timed],
        compute_seconds=compute_seconds[timed],
        nbytes=sent.after(step),
        flights=_flights(flights, departs, nbytes, offsets),
        stalls=_spans(lands, waits, ready, lasted),
        merges=_spans(lands, ready, ready + lands.finite("seconds_spent"), counts),
        pauses=tuple(_pause(offsets, one) for kind in ("eval", "checkpoint") for one in history.of(kind)),
        evaluation_seconds=sum(finite(one.event["seconds_spent"]) for one in history.of("eval")),
        saving_seconds=sum(finite(one.event["seconds_spent"]) for one in history.of("checkpoint")),
        departed=_by_fragment(departs.whole("fragment")),
        landed=_by_fragment(lands.whole("fragment")[counts]),
        refused=_by_fragment(refused.whole("fragment")),
        clipped=len(columns["clipped"]),
        sent=_by_fragment(departs.whole("fragment"), nbytes),
        foreseen=int(departs.whole("nbytes").sum()),
        skipped=len(history.of("skip")),
        evaluations=_evaluations(evaluations, offsets, sent),
        notes=_notes(history, offsets),
        lost=history.lost(offsets),
        windows=_windows(history, offsets),
        incarnations=tuple(
            Span(begin, begin + session.end, session.step) for begin, session in zip(offsets.tolist(), history.sessions)
        ),
        opened=tuple(session.start.opened for session in history.sessions),
        steps=history.steps,
        rounds=tuple(
            replace(one.seen, seconds=one.seen.seconds + float(offsets[one.session])) for one in history.rounds
        ),
        stopped=str(stops[0]["reason"]) if stops else None,
        end=ends[0] if ends else None,
        log=log,
        damaged=history.damaged + len(steps) - len(step),
        clock=clock,
    )


def _offset(rows: Columns, offsets: Floats) -> Floats:
    found: Floats = offsets[rows.whole("session")]
    return found


def _spans(rows: Columns, begin: Floats, end: Floats, chosen: NDArray[np.bool_]) -> Spans:
    return Spans(begin[chosen], end[chosen], rows.whole("step")[chosen], rows.whole("fragment")[chosen])


def _flights(rows: Columns, departs: Columns, nbytes: Integers, offsets: Floats) -> RecordedFlights:
    """The flights, with the step and the bytes of their departures."""
    at, known = places_in(round_keys(departs), round_keys(rows))
    step, sent = rows.whole("step"), np.zeros(len(rows), dtype=np.int64)
    step[known], sent[known] = departs.whole("step")[at[known]], nbytes[at[known]]
    begin, end = (rows.finite(name) + _offset(rows, offsets) for name in ("begin", "end"))
    link_begin = np.minimum(begin + rows.finite("queued_seconds"), end)
    transfer = rows.finite("transfer_seconds")
    link_end = np.where(transfer > 0, np.minimum(link_begin + transfer, end), end)
    order = np.argsort(begin, kind="stable")
    return RecordedFlights(
        fragment=rows.whole("fragment")[order],
        round=rows.whole("round")[order],
        step=step[order],
        begin=begin[order],
        end=np.maximum(begin, end)[order],
        link_begin=link_begin[order],
        link_end=link_end[order],
        nbytes=sent[order],
    )


def _pause(offsets: Floats, placed: Placed) -> Span:
    """An evaluation or a checkpoint, which are written when they are over."""
    end = float(offsets[placed.session]) + finite(placed.event["seconds"])
    return Span(end - finite(placed.event["seconds_spent"]), end, placed.event["step"])


def _by_fragment(fragments: Integers, values: Integers | None = None) -> Mapping[int, int]:
    """The sum of `values` by fragment, or how often each fragment is there."""
    names, at = np.unique(fragments, return_inverse=True)
    sums = np.zeros(len(names), dtype=np.int64)
    np.add.at(sums, at, 1 if values is None else values)
    return dict(zip(names.tolist(), sums.tolist()))


def _evaluations(found: Sequence[Placed], offsets: Floats, sent: SentBytes) -> Evaluations:
    found = [one for one in found if one.event["of"] != "start"]
    steps = np.array([one.event["step"] for one in found], dtype=np.int64)
    return Evaluations(
        step=steps,
        seconds=np.array([offsets[one.session] + finite(one.event["seconds"]) for one in found], dtype=np.float64),
        nbytes=sent.after(steps),
        loss=np.array([number(one.event["loss"]) for one in found], dtype=np.float64),
    )


def _windows(history: History, offsets: Floats) -> tuple[Span, ...]:
    """One a session: from its first step to the end of its last step or landing."""
    kinds = [("step", ("compute_seconds",)), ("land", ("stall_seconds", "seconds_spent"))]
    reach: dict[int, list[float]] = {}
    for kind, spent in kinds[: 1 if history.elastic else 2]:  # rounds land beside an elastic replica's training
        rows = history.columns[kind]
        session, begin = rows.whole("session"), rows.finite("begin") + _offset(rows, offsets)
        end = begin + sum(rows.finite(name) for name in spent)
        for one in np.unique(session):
            here = session == one
            reach.setdefault(int(one), []).extend((float(begin[here].min()), float(end[here].max())))
    return tuple(Span(min(times), max(times), 0) for _, times in sorted(reach.items()))


def _notes(history: History, offsets: Floats) -> tuple[Note, ...]:
    notes, before = [], set[str]()
    replica = history.called if history.elastic else history.sessions[-1].start.replica
    for one in history.others:
        kind, text = one.event["event"], text_of_event(one.event)
        if text and not (kind in ONCE and text in before):
            before.add(text)
            seconds = float(offsets[one.session]) + finite(one.event["seconds"])
            notes.append(Note(seconds, one.event["step"], replica, kind, text))
    if (more := history.warnings - MOST_WARNINGS) > 0:
        end = history.sessions[-1]
        told = f"{more:,} more warnings are in events/{history.called}.jsonl"
        notes.append(Note(float(offsets[-1]) + end.end, end.step, replica, "warning", told))
    if history.merged:
        told = f"the log was thinned: {history.merged:,} older inner steps stand in fewer lines, with their sums and mean losses"
        notes.append(Note(float(offsets[0]), 0, replica, "thinned", told))
    return tuple(notes)


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
