"""Diagnoses a run: findings, and the matrix of delays behind them, from the event logs of its replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import isfinite, log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from thinwire.app.diagnosis import Finding, Rules, Syndrome, Watch, stuck
from thinwire.app.diagnosis.measure import Cell, Reading
from thinwire.app.records.events import being_written
from thinwire.app.records.round_log import Key, RoundLog
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import NOTHING, text_of_seconds
from thinwire.app.report.page import table


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


def diagnose(record: RunRecord) -> Diagnosis:
    """Diagnose the last session of each replica of a run, which may be active, or interrupted."""
    return diagnose_logs({record.folder / f"events/{replica.called}.jsonl": replica.log for replica in record.replicas})


def diagnose_logs(logs: Mapping[Path, RoundLog]) -> Diagnosis:
    """Diagnose the rounds of replicas, by their event files. A run that is active has waited since its last event."""
    every = [_Log(log, _waited(path)) for path, log in logs.items()]
    if every[0].rounds.start.provenance == "simulated":
        doubt = "The run was simulated, so no message was sent. Its report page shows who waits, and for how long."
        return Diagnosis(tuple(log.rounds.name for log in every), (), doubts=(doubt,), word="simulated")
    shards = sorted({log.rounds.shard for log in every})
    first, *others = [_diagnosed([log for log in every if log.rounds.shard == shard]) for shard in shards]
    for other in others:  # the shards of a replica send beside each other: what one of them finds counts
        known = {finding.cause for finding in first.findings}
        more = tuple(finding for finding in other.findings if finding.cause not in known)
        first = replace(first, findings=first.findings + more)
    return first


class _Log(NamedTuple):
    """The rounds of one replica, and the seconds since its last event; None if its process no longer runs."""

    rounds: RoundLog
    waited: float | None


def _waited(path: Path) -> float | None:
    return max(0.0, time.time() - path.stat().st_mtime) if being_written(path) else None


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


def _diagnosed(logs: Sequence[_Log]) -> Diagnosis:
    names = tuple(sorted({log.rounds.name for log in logs}, key=lambda name: (len(name), name)))
    of_each, order = [log.rounds.records for log in logs], dict[Key, None]()
    for its in sorted(of_each, key=len, reverse=True):
        order |= dict.fromkeys(its)
    together = [[its[key] for its in of_each if key in its] for key in order]
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
    findings = (*stuck([log.rounds.seen(log.waited or 0.0) for log in logs]), *last)
    doubts = _doubts(logs, names, len(rounds), ways)
    return Diagnosis(
        names,
        findings,
        tuple(past.values()),
        ways,
        len(rounds),
        tuple(doubts),
        any(log.waited is not None for log in logs),
        logs[0].rounds.start.provenance,
    )


def _way(readings: Sequence[Reading]) -> Way:
    """The median of the last ones."""
    longer = [r.least if isfinite(r.least) else min(0.0, r.most) for r in readings]
    # A difference below zero is that of both directions together: half of it is this one's.
    seconds = [r.usual + (more if more > 0 else more / 2) for r, more in zip(readings, longer)]
    return Way(median(r.usual for r in readings), max(0.0, median(seconds)))


def _doubts(logs: Sequence[_Log], names: Sequence[str], rounds: int, ways: Mapping[Cell, Way]) -> list[str]:
    doubts, due = [], max(log.rounds.start.replicas for log in logs)
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
    damaged = sum(log.rounds.damaged for log in logs)
    return doubts + ([f"{damaged} records could not be read."] if damaged else [])
