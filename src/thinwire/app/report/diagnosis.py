"""Diagnoses a run: findings, and the matrix of delays behind them, from the event logs of its replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import isfinite, log2
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from thinwire.app.diagnosis import Finding, Record, Rules, Seen, Syndrome, Watch, stuck
from thinwire.app.diagnosis.measure import Cell, Reading
from thinwire.app.records.events import Event, Tail, being_written, event_files
from thinwire.app.records.participation import CARRIER
from thinwire.app.records.run_record import provenance_of
from thinwire.app.records.sessions import finite, whole
from thinwire.app.records.units import NOTHING, text_of_seconds
from thinwire.app.report.page import table
from thinwire.errors import DataError, MissingError, PacketError

ROUNDS = 1 << 16  # the latest rounds of a replica among which one that hangs is looked for

Key = tuple[int, int]


@dataclass(frozen=True)
class Way:
    """The path from one replica to another: the usual time of a message, and the median time of the last few."""

    usual: float
    seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.usual


@dataclass(frozen=True)
class Diagnosis:
    """The present findings, `past` ones, and `ways`, the delay matrix.

    rounds   number of rounds with records of at least two replicas
    going    whether the run is still active
    doubts   facts that could not be checked or distinguished, with the reasons
    word     the provenance of the figures: "measured", or "emulated" on an emulated link
    """

    names: tuple[str, ...]
    findings: tuple[Finding, ...]
    past: tuple[Finding, ...] = ()
    ways: Mapping[Cell, Way] = field(default_factory=dict)
    rounds: int = 0
    doubts: tuple[str, ...] = ()
    going: bool = False
    word: str = "measured"

    @property
    def verdict(self) -> str:
        if self.findings:
            return "; ".join(f"{finding.syndrome}: {finding.culprit}" for finding in self.findings)
        return "no slow replica or link was found" if self.rounds else "cannot tell"

    def lines(self) -> list[str]:
        """Lines for people: every finding with its figures and advice, then earlier findings, then doubts."""
        said = []
        for finding in self.findings:
            figures = f"{_figures(finding, self.going)} ({self.word})."
            said += [f"{finding.syndrome}: {finding.culprit}.", f"  {figures}", f"  {finding.advice}"]
        if not self.findings:
            said.append(f"{self.verdict[0].upper()}{self.verdict[1:]}.")
        said += [f"Earlier, rounds {f.first} to {f.last}: {f.syndrome}: {f.culprit}." for f in self.past]
        return said + list(self.doubts)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        ways = [{"sender": a, "receiver": b, "usual": w.usual, "seconds": w.seconds} for (a, b), w in self.ways.items()]
        return {
            "replicas": list(self.names), "rounds": self.rounds, "verdict": self.verdict,
            "findings": [finding.facts() for finding in self.findings],
            "past": [finding.facts() for finding in self.past], "ways": ways, "doubts": list(self.doubts),
        }  # fmt: skip


def diagnose(folder: str | Path) -> Diagnosis:
    """Diagnose the event logs in `folder`, of the last session of each replica. The run may be active, or interrupted.

    Raises `DataError` for a folder that holds no run.
    """
    paths = event_files(Path(folder))
    logs = [log for path in paths if (log := _Log.read(path))]
    if not logs:
        unread = ", ".join(str(path) for path in paths if path.stat().st_size)
        why = f": no start of a run is in {unread}" if unread else " holds no events/*.jsonl of a run"
        raise (DataError if unread else MissingError)(f"{folder}{why}. Give the folder that `thinwire train` wrote.")
    return _diagnosis(logs)


def diagnose_logs(sessions: Mapping[Path, Sequence[Event]]) -> Diagnosis:
    """Diagnose the last session of each event log, of one or more."""
    return _diagnosis([_Log.of(path, session) for path, session in sessions.items()])


def _diagnosis(logs: Sequence[_Log]) -> Diagnosis:
    if logs[0].word == "simulated":
        doubt = "The run was simulated, so no message was sent. Its report page shows who waits, and for how long."
        return Diagnosis(tuple(log.name for log in logs), (), doubts=(doubt,), word="simulated")
    parts = [_diagnosed([log for log in logs if log.shard == shard]) for shard in sorted({log.shard for log in logs})]
    first = parts[0]
    for other in parts[1:]:  # the shards of a replica send beside each other: what one of them finds counts
        known = {finding.cause for finding in first.findings}
        more = tuple(finding for finding in other.findings if finding.cause not in known)
        first = replace(first, findings=first.findings + more)
    return first


def delay_table(diagnosis: Diagnosis) -> Table:
    """The delay matrix: a row for each sender, a column for each receiver."""
    table = Table(
        title=f"Seconds from sender (row) to receiver, and times the usual ({diagnosis.word})",
        box=None,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("")
    for name in diagnosis.names:
        table.add_column(Text(f"to {name}"), justify="right")
    for sender in diagnosis.names:
        cells = []
        for receiver in diagnosis.names:
            way = diagnosis.ways.get((sender, receiver))
            hot = way is not None and way.ratio > 2
            cells.append(
                Text(
                    f"{text_of_seconds(way.seconds)} ×{way.ratio:.1f}" if way else NOTHING,
                    style="bold red" if hot else "",
                )
            )
        table.add_row(Text(f"from {sender}"), *cells)
    return table


def delay_page(diagnosis: Diagnosis) -> str:
    """The matrix and the findings as HTML; cells are darker if a path takes longer than usual."""
    said = "".join(f"<p{' class=alert' if diagnosis.findings else ''}>{escape(line)}</p>" for line in diagnosis.lines())
    if not diagnosis.ways:
        return said
    rows = []
    for sender in diagnosis.names:
        cells = []
        for receiver in diagnosis.names:
            way = diagnosis.ways.get((sender, receiver))
            share = min(90.0, max(0.0, 30 * log2(max(way.ratio, 1e-9)))) if way else 0.0
            shade = f' style="background:color-mix(in srgb, var(--bad) {share:.0f}%, transparent)"' if share else ""
            text = f"{text_of_seconds(way.seconds)} ×{way.ratio:.1f}" if way else NOTHING
            cells.append(f'<td class="n"{shade}>{escape(text)}</td>')
        rows.append(f"<tr><th>from {escape(sender)}</th>{''.join(cells)}</tr>")
    return said + table(["", *(f"to {name}" for name in diagnosis.names)], rows, len(diagnosis.names))


def _figures(finding: Finding, going: bool) -> str:
    when = f"since round {finding.first}" if finding.last > finding.first else f"in round {finding.last}"
    if finding.syndrome in (Syndrome.HUNG_LINK, Syndrome.HUNG_REPLICA):
        waited, usual = text_of_seconds(finding.seconds), text_of_seconds(finding.usual)
        if going:
            return f"{finding.detail}; for {waited} now (a round takes {usual} otherwise)"
        return (
            f"{finding.detail}; {text_of_seconds(finding.began)} after the start. Nothing more came in the {waited} until the logs "
            f"end (a round takes {usual} otherwise)"
        )
    return f"{finding.detail}: {text_of_seconds(finding.seconds)}, not {text_of_seconds(finding.usual)}; {when}"


@dataclass
class _Log:
    """One replica's last session."""

    name: str
    replicas: int
    shard: int
    records: dict[Key, Record] = field(default_factory=dict)
    began: dict[Key, float] = field(default_factory=dict)
    over: dict[Key, float] = field(default_factory=dict)
    now: float = 0.0
    ended: bool = False
    damaged: int = 0
    going: bool = False
    word: str = "measured"
    elastic: bool = False

    @classmethod
    def read(cls, path: Path) -> _Log | None:
        log, tail = None, Tail(path)
        for event in tail.events():
            if event["event"] == "start":
                log = cls.begun(path, event)
            elif log:
                log.take(event)
        if not log:
            return None
        log.damaged += tail.damaged
        return log.closed(path)

    @classmethod
    def of(cls, path: Path, session: Sequence[Event]) -> _Log:
        start, *events = session
        log = cls.begun(path, start)
        for event in events:
            log.take(event)
        return log.closed(path)

    @classmethod
    def begun(cls, path: Path, start: Event) -> _Log:
        shard = path.stem.partition(".shard-")[2]
        log = cls(str(whole(start["replica"])), whole(start["replicas"]), int(shard) if shard.isdigit() else 0)
        log.word, log.elastic = provenance_of(start), start["carrier"] == CARRIER
        return log

    def closed(self, path: Path) -> _Log:
        """The log, after its last event. A run that is active has waited since then."""
        self.going = being_written(path)
        if self.going:
            self.now += max(0.0, time.time() - path.stat().st_mtime)
        return self

    def take(self, event: Event) -> None:
        kind, seconds = event["event"], finite(event["seconds"])
        self.now, self.ended = max(self.now, seconds), self.ended or kind in ("end", "stop")
        if kind == "wire":
            try:
                record = Record.of(event)
            except PacketError:
                self.damaged += 1
                return
            self.name = record.name
            self.records[record.key] = record
            if self.elastic:  # a departure is not a round yet
                self.began[record.key] = seconds
            if record.over:
                self.over[record.key] = seconds
        elif kind in ("depart", "flight", "land") and not self.elastic:
            key = whole(event["fragment"]), whole(event["round"])
            (self.began if kind == "depart" else self.over).setdefault(key, seconds)
        for rounds in (self.began, self.over):
            if len(rounds) > ROUNDS:
                del rounds[next(iter(rounds))]

    def seen(self) -> Seen:
        failed = {key: record for key, record in self.records.items() if not record.over}
        return Seen(self.name, self.began, self.over, failed, self.now, self.ended)


def _diagnosed(logs: Sequence[_Log]) -> Diagnosis:
    names = tuple(sorted({log.name for log in logs}, key=lambda name: (len(name), name)))
    order: dict[Key, None] = {}
    for log in sorted(logs, key=lambda log: -len(log.records)):
        order |= dict.fromkeys(log.records)
    together = [[log.records[key] for log in logs if key in log.records] for key in order]
    whole_ones = [number for number, records in enumerate(together) if {r.name for r in records} >= records[0].group]
    if whole_ones:  # else somebody's log is not here at all; what comes after the last one is still being written
        together = together[: whole_ones[-1] + 1]
    watch, last, past = Watch(), [], dict[Any, Finding]()
    rounds = [records for records in together if len(records) > 1]
    for records in rounds:
        last = watch.add(records)
        past |= {finding.cause: finding for finding in last}
    for finding in last:
        past.pop(finding.cause, None)
    ways = {cell: _way(list(readings)) for cell, readings in sorted(watch.latest.items())}
    findings = (*stuck([log.seen() for log in logs]), *last)
    doubts = _doubts(logs, names, len(rounds), ways)
    return Diagnosis(
        names,
        findings,
        tuple(past.values()),
        ways,
        len(rounds),
        tuple(doubts),
        any(log.going for log in logs),
        logs[0].word,
    )


def _way(readings: Sequence[Reading]) -> Way:
    """The median of the last ones."""
    longer = [r.least if isfinite(r.least) else min(0.0, r.most) for r in readings]
    # A difference below zero is that of both directions together: half of it is this one's.
    seconds = [r.usual + (more if more > 0 else more / 2) for r, more in zip(readings, longer)]
    return Way(median(r.usual for r in readings), max(0.0, median(seconds)))


def _doubts(logs: Sequence[_Log], names: Sequence[str], rounds: int, ways: Mapping[Cell, Way]) -> list[str]:
    doubts, due = [], max(log.replicas for log in logs)
    if len(names) < due:
        doubts.append(
            f"{len(names)} of {due} replicas left an event log here: what the others saw is not known. Copy their events/ "
            "files beside these."
        )
    if len(names) == 1:
        doubts.append("One log does not show which replica waits for which; at least two logs are needed.")
    elif not rounds:
        doubts.append(
            "No two replicas recorded the same round: the run has just begun, or its method has its own loop, whose "
            "messages are not recorded."
        )
    elif not ways:
        doubts.append(
            f"A link's usual time is known after {Rules().known} rounds of one fragment; this run has {rounds} in all."
        )
    if len(names) == 2 and rounds:
        doubts.append(
            "With two replicas, a slow sender, a slow receiver and a slow link look alike; a third replica would tell them apart."
        )
    damaged = sum(log.damaged for log in logs)
    return doubts + ([f"{damaged} records could not be read."] if damaged else [])
