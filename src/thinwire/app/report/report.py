"""Writes `RUN/report.html`: one page that shows one run, or several side by side, and needs only a browser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.app.records.clocks import text_of_clocks
from thinwire.app.records.participation import explained_steps
from thinwire.app.records.run_record import RunRecord, best_loss, text_of_privacy
from thinwire.app.records.sessions import finite, whole
from thinwire.app.records.units import NOTHING, text_of_count, text_of_nbytes, text_of_seconds
from thinwire.app.report.charts import (
    Chart,
    colour,
    drawn_replica,
    link_chart,
    loss_chart,
    text_of_rates,
    typical_window,
)
from thinwire.app.report.diagnosis import delay_page, diagnose
from thinwire.app.report.distributions import distribution_charts
from thinwire.app.report.page import chart_place, page, table, word
from thinwire.app.report.timeline import timeline_chart
from thinwire.errors import DataError
from thinwire.files import write_whole

NOTES = 200

MEANINGS = {
    "measured": "real processes on a real link",
    "emulated": "real processes on a shaped link, or slowed down",
    "simulated": "virtual time",
    "predicted": "closed form",
}


@dataclass(frozen=True)
class Section:
    """A chart that the caller adds to a report, with the provenance of its figures."""

    name: str
    title: str
    text: str
    word: str
    chart: Chart

    def html(self, body: str) -> str:
        return _titled(self.name, self.title, word(self.word), self.text, body)


def write_report(
    records: Sequence[RunRecord],
    out: str | Path,
    beside: Callable[[Sequence[RunRecord]], Sequence[Section]] = lambda records: (),
) -> Path:
    """Write a self-contained HTML page on runs to `out`, and return `out`. `beside` makes further sections.

    A run that has not ended is shown up to its last event. The page has about 5 MB, most of it Plotly; the number of
    bars and points is bounded. Raises `DataError` if the page cannot be written.

    >>> write_report([RunRecord.load("runs/streaming"), RunRecord.load("runs/ddp")], "comparison.html")   # doctest: +SKIP
    """
    trained = any(record.summary.provenance != "simulated" for record in records)  # a simulated run has no loss
    charts: dict[str, Chart] = {}
    sections = beside(records)

    def place(name: str, chart: Chart) -> str:
        charts[name] = chart
        return chart_place(name, chart)

    def each(name: str, title: str, text: str, body: Callable[[RunRecord, int], str]) -> str:
        """A section with a part for each run."""
        return _section(name, title, text, records, _of_each(records, body))

    def distributions(record: RunRecord, index: int) -> str:
        places = [place(f"{what}-{index}", chart) for what, chart in distribution_charts(record).items()]
        return "".join(places) or _paragraph("No step yet.")

    def timeline(record: RunRecord, index: int) -> str:
        clocks = text_of_clocks(record.clocks)
        chart = place(f"timeline-{index}", timeline_chart(record))
        return chart + _paragraph(clocks and f"{clocks} The rows are corrected for it.")

    def link(record: RunRecord, index: int) -> str:
        return place(f"link-{index}", link_chart(record, typical_window(record)))

    loss = _LOSS.format(drawn_replica(records))
    body = "".join(
        (
            _headline(records),
            _section("loss", "Loss against what it cost", loss, records, place("loss", loss_chart(records)))
            if trained
            else "",
            each("timeline", "Who computes, who waits", _TIMELINE, timeline),
            each("link", "Use of the link", _LINK, link),
            *(section.html(place(section.name, section.chart)) for section in sections),
            each("distributions", "Distributions", _DISTRIBUTIONS, distributions),
            each("wire", "Who sent what to whom", _WIRE, _wire),
            _diagnoses(records),
            each("fragments", "Fragments", "", _fragments),
            each("notes", "Events of note", "", _notes),
            _section("settings", "Settings and machine", "", [], _settings(records) + _machine(records)),
            _paragraph("; ".join(f"{word}: {meaning}" for word, meaning in MEANINGS.items()) + "."),
        )
    )
    out = Path(out)
    title = " · ".join(record.name for record in records)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(out, page(f"Thinwire: {title}", body, charts))
    except OSError as error:
        raise DataError(
            f"the page {out} cannot be written ({error}); about 5 MB are needed. Free some space, or choose another --out."
        ) from error
    return out


_LOSS = "The thick line is the evaluation of the agreed weights; the thin one is the training loss of {}, smoothed. Repeated steps count once."
_TIMELINE = (
    "Without stalls, inner steps leave no gaps, because packets travel while the replica computes. The numbers in the bars are fragments. "
    "A packet has its full colour while it is on the link, and a faint one while it waits or travels. Drag to move through the run."
)
_LINK = "The bits that each replica sends, over time."
_DISTRIBUTIONS = (
    "The replicas side by side. A curve is at the share of values that are at most as large. An exchange begins when a fragment departs and "
    "ends when all packets are there."
)
_WIRE = (
    "Every byte by purpose and peer, as each replica's ledger counted it; headers of TCP and IP come on top. Seconds are sums over messages. "
    '"Queued" and "on the link" are times of an emulated link; a real link does not tell them. "Until there" is the time from the request for '
    "a message to its arrival, and so contains the lateness of its sender."
)

_DIAGNOSIS = (
    "The seconds that recent messages took from sender (row) to receiver (column), and that time divided by the usual one. Only durations are "
    "compared, each by the clock of one machine."
)


def _diagnoses(records: Sequence[RunRecord]) -> str:
    """The diagnoses of the runs with messages."""
    real = [record for record in records if record.summary.provenance != "simulated" and len(record.replicas) > 1]
    body = _of_each(real, lambda record, index: delay_page(diagnose(record)), titled=len(records) > 1)
    return _section("diagnosis", "Who is slow", _DIAGNOSIS, real, body) if real else ""


def _headline(records: Sequence[RunRecord]) -> str:
    best = best_loss(records)
    if len(records) == 1:
        (record,) = records
        cards = "".join(
            f'<div class="card"><span class="what">{escape(what)}</span><b>{escape(value)}</b>'
            f"{word(record.summary.provenance)}</div>"
            for what, value in record.summary.figures()
        )
        score, *remarks = _remarks(record, best, "")
        return (
            f'<header><h1>{escape(record.name)}</h1><p class="soft">{escape(_shape(record))}</p>'
            f"<p><code>{escape(record.summary.strategy)}</code></p>{score}{''.join(remarks)}</header>"
            f'<div class="cards" id="headline">{cards}</div>{_steps(record, "")}'
        )
    labels = list(dict.fromkeys(what for record in records for what, _ in record.summary.figures()))
    rows = []
    for index, record in enumerate(records):
        figures = dict(record.summary.figures())
        cells = "".join(
            f'<td class="n">{escape(figures.get(what, NOTHING))}<br>{word(record.summary.provenance)}</td>'
            for what in labels
        )
        dot = f'<span class="dot" style="background:{colour(index)}"></span>'
        rows.append(
            f"<tr><th>{dot}{escape(record.name)}<br><small class=soft>{escape(_shape(record))}</small></th>{cells}</tr>"
        )
    said = []
    for record in records:
        score, *remarks = _remarks(record, best, f"{record.name}: ")
        said += [score, _steps(record, f"{record.name}: "), *remarks]
    body = f'<section id="headline">{table(["run", *labels], rows, len(labels))}{"".join(said)}</section>'
    return f"<header><h1>{len(records)} runs side by side</h1></header>{body}"


def _shape(record: RunRecord) -> str:
    summary = record.summary
    parts = [
        f"{summary.replicas} replicas",
        f"{text_of_count(summary.parameters)} parameters",
        f"{summary.steps:,} inner steps",
        f"{text_of_count(summary.tokens)} {record.start.unit}",
        f"link {text_of_rates(record.rates)}" if record.rates else "link not shaped",
        record.status,
        summary.text_of_time(),
    ]
    parts = [part for part in parts if part]
    return " · ".join(parts)


def _remarks(record: RunRecord, best: float | None, name: str) -> list[str]:
    """The score of a run, and what else is to be said of it; each begins with `name`."""
    score = f"{f'{name}score' if name else 'Score'} {record.score(best).text()}."
    privacy, samples = text_of_privacy(record.privacy), record.named_samples
    return [
        _paragraph(score, "remark", record.summary.provenance),
        _paragraph(privacy and name + privacy, "remark", "predicted"),
        _paragraph(samples and name + samples, "remark"),
        *(_paragraph(name + remark, "alert") for remark in record.remarks),
    ]


def _steps(record: RunRecord, name: str) -> str:
    steps = explained_steps(record.steps)
    return _paragraph(steps and name + steps)


def _paragraph(text: str, kind: str = "soft", provenance: str = "") -> str:
    """A paragraph with the provenance of its figures; nothing for an empty text."""
    label = f" {word(provenance)}" if provenance else ""
    return f'<p class="{kind}">{escape(text)}{label}</p>' if text else ""


def _section(name: str, title: str, text: str, records: Sequence[RunRecord], body: str) -> str:
    words = " ".join(word(w) for w in dict.fromkeys(record.summary.provenance for record in records))
    return _titled(name, title, words, text, body)


def _titled(name: str, title: str, words: str, text: str, body: str) -> str:
    return f'<section id="section-{name}"><h2>{escape(title)} {words}</h2>{_paragraph(text)}{body}</section>'


def _of_each(records: Sequence[RunRecord], body: Callable[[RunRecord, int], str], titled: bool | None = None) -> str:
    """The bodies of all runs, each below its title if there are several."""
    parts = []
    for index, record in enumerate(records):
        if len(records) > 1 if titled is None else titled:
            parts.append(f"<h3>{escape(record.name)} {word(record.summary.provenance)}</h3>")
        parts.append(body(record, index))
    return "".join(parts)


def _fragments(record: RunRecord, number: int) -> str:
    sizes = record.start.fragments
    largest = max((numel for _, numel in sizes), default=1) or 1
    flights, stalls = [r.flights for r in record.replicas], [r.stalls for r in record.replicas]
    flown, fragments = np.concatenate([f.end - f.begin for f in flights]), np.concatenate([f.fragment for f in flights])
    stalled, waited_for = np.concatenate([s.seconds for s in stalls]), np.concatenate([s.fragment for s in stalls])
    rows = []
    for index, (name, numel) in enumerate(sizes):
        seconds = flown[fragments == index]
        departed = max(replica.departed.get(index, 0) for replica in record.replicas)
        sent = float(np.mean([replica.sent.get(index, 0) for replica in record.replicas]))
        refused = max(replica.refused.get(index, 0) for replica in record.replicas)
        landed = max(replica.landed.get(index, 0) for replica in record.replicas)
        stall = float(stalled[waited_for == index].sum())
        bar = f'<span class="bar" style="width:{110 * numel / largest:.0f}px;background:{colour(index)}"></span>'
        air = float(np.median(seconds)) if len(seconds) else None
        values = (
            *(text_of_count(numel), str(departed), str(landed), str(refused)),
            *(text_of_nbytes(sent / departed if departed else None), text_of_seconds(air)),
            text_of_seconds(stall / len(record.replicas)),
        )
        cells = "".join(f'<td class="n">{value}</td>' for value in values)
        rows.append(f"<tr><td>{index}</td><th>{escape(name)}</th><td>{bar}</td>{cells}</tr>")
    head = ["", "fragment", "", "parameters", "rounds", "landed", "refused", "sent a round", "in the air", "stalled"]
    return table(head, rows, 7)


def _wire(record: RunRecord, number: int) -> str:
    rows, predicted, counted, emulated = [], 0, 0, record.bits_per_second is not None
    unknown = [replica.name for replica in record.replicas if not replica.ledger]
    for replica in record.replicas:
        predicted += replica.foreseen
        for purpose, peer, sent, received in replica.ledger:
            counted += whole(sent.get("nbytes")) if purpose == "packet" else 0
            values = (
                text_of_nbytes(whole(sent.get("nbytes"))),
                str(whole(sent.get("messages"))),
                text_of_seconds(finite(sent.get("queued_seconds")) if emulated else None),
                text_of_seconds(finite(sent.get("transfer_seconds")) if emulated else None),
                text_of_nbytes(whole(received.get("nbytes"))),
                str(whole(received.get("messages"))),
                text_of_seconds(finite(received.get("transfer_seconds"))),
            )
            cells = "".join(f'<td class="n">{value}</td>' for value in values)
            rows.append(
                f"<tr><th>{escape(replica.name)}</th><td>{escape(purpose)}</td><td>{escape(peer)}</td>{cells}</tr>"
            )
    if not rows:
        return _paragraph("No ledger here: it is written when a run ends.")
    head = ["", "purpose", "peer", "sent", "messages", "queued", "on the link", "received", "messages", "until there"]
    sums = (
        f"Packets, all replicas together: {counted:,} bytes counted; the departures of the log foresaw {predicted:,}."
    )
    if counted != predicted:
        sums += " " + _difference(record, unknown, counted > predicted)
    return table(head, rows, 7) + _paragraph(sums, "remark")


def _difference(record: RunRecord, unknown: Sequence[str], more: bool) -> str:
    """Why counted and predicted bytes differ, as far as the events show."""
    why = [f"no ledger of {', '.join(unknown)} is here (it is written when a replica ends)"] if unknown else []
    refused = max(sum(replica.refused.values()) for replica in record.replicas)
    if any(replica.nbytes_sent < replica.foreseen for replica in record.replicas):
        why.append("the codec's sizes depend on the values, and the most they can be was foreseen")
    failed = sum(seen.committed is not True for seen in max((r.rounds for r in record.replicas), key=len, default=()))
    caught_up = sum(note.kind == "caught_up" for replica in record.replicas for note in replica.notes)
    if any(replica.sessions > 1 for replica in record.replicas):
        why.append(
            "a replica that was started again sends packets in flight at its checkpoint again, and its ledger lacks what it sent after that one"
        )
    for count, what in ((refused, "refused"), (failed, "failed")):
        why += [f"rounds that were {what} ({count}) were sent in part, or again"] if count else []
    why += [f"replicas caught up {caught_up} times, for which others sent no packets"] if caught_up else []
    if more and not why:
        why = ["what a server answers, and what ends a run without rounds, is in the ledgers alone"]
    return "They differ: " + ("; ".join(why) or "the events do not tell why") + "."


def _notes(record: RunRecord, number: int) -> str:
    notes = record.notes
    if not notes:
        return _paragraph("None: no warning, refused round, skipped step or restart.")
    rows = [
        f"<tr><td class=t>{text_of_seconds(note.seconds)}</td><td>{note.step}</td><td>{escape(str(note.replica))}</td>"
        f"<th>{escape(note.kind)}</th><td>{escape(note.text)}</td></tr>"
        for note in notes[:NOTES]
    ]
    more = f"{len(notes) - NOTES} more are in the event logs." if len(notes) > NOTES else ""
    head = ["time", "step", "replica", "event", ""]
    return table(head, rows) + _paragraph(more, "remark")


def _settings(records: Sequence[RunRecord]) -> str:
    flat = [_flat({**record.settings, "made of": record.start.made_of}) for record in records]
    return _compared("run.toml", records, flat)


def _machine(records: Sequence[RunRecord]) -> str:
    """The machines of all replicas; where these differ, all values in the order of the replicas."""
    flat = []
    for record in records:
        starts = [replica.start for replica in record.replicas]
        each = [_flat({"carrier": start.carrier, **start.machine}) for start in starts]
        keys = dict.fromkeys(key for one in each for key in one)
        flat.append({key: "; ".join(dict.fromkeys(one.get(key, NOTHING) for one in each)) for key in keys})
    return _compared("machine", records, flat)


def _compared(title: str, records: Sequence[RunRecord], flat: Sequence[Mapping[str, str]]) -> str:
    """A table with a row for each key and a column for each run; rows in which runs differ are marked."""
    rows = []
    for key in dict.fromkeys(key for one in flat for key in one):
        values = [one.get(key, NOTHING) for one in flat]
        cells = "".join(f"<td><code>{escape(value)}</code></td>" for value in values)
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        rows.append(f"<tr{mark}><th>{escape(key)}</th>{cells}</tr>")
    names = [record.name for record in records] if len(records) > 1 else [""]
    return table([title, *names], rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = NOTHING if value is None else str(value)
    return out
