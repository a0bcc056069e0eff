"""One screen for all replicas of a run, from their event logs: while it trains, and when it has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from thinwire.app.records.clocks import Offset, offsets_of, text_of_clocks, timed_records
from thinwire.app.records.events import Event, Tail, being_written, event_files, recent_events
from thinwire.app.records.fragments import fragments_of
from thinwire.app.records.losses import for_json
from thinwire.app.records.participation import CARRIER, Participation, RoundSeen
from thinwire.app.records.printable import printable
from thinwire.app.records.run_record import provenance_of
from thinwire.app.records.samples import samples_of
from thinwire.app.records.sessions import number, split, whole
from thinwire.app.records.units import (
    NOTHING,
    UNITS,
    text_of_count,
    text_of_loss,
    text_of_nbytes,
    text_of_seconds,
    text_of_share,
    unit_of,
)
from thinwire.app.report.diagnosis import Diagnosis, diagnose_logs
from thinwire.app.report.progress import SILENT_SECONDS
from thinwire.app.report.replica_progress import ReplicaProgress, step_of_run
from thinwire.errors import MissingError

DIAGNOSED_SECONDS = 10.0  # between two diagnoses
RECENT = 8 << 20  # bytes at the end of each log that a diagnosis reads
CLOCK_SECONDS = 0.1  # smaller differences of clocks are not shown
_COLUMNS = (
    *("replica", "state", "step", "loss", "tokens/s", "compute", "stalled", "in the air", "sent", "link", "refused"),
    "checkpoint",
)
_LEFT = ("replica", "state", "in the air", "checkpoint")
# Left out of a narrow screen, in this order.
_SPARED = ("link", "in the air", "refused", "checkpoint", "compute", "stalled", "sent")


@dataclass
class _Watched:
    """One replica, as its log shows it."""

    tail: Tail
    progress: ReplicaProgress = field(default_factory=ReplicaProgress)
    start: Event | None = None
    opened: float = math.nan  # when its log was opened, in seconds since 1970
    heard: float = -math.inf  # when its last event was, in seconds since 1970
    waits: str = ""  # what it has waited for since its last step
    saved: tuple[int, float] | None = None  # the step and the time of the last checkpoint
    evaluated: tuple[int, float] | None = None
    counted: Event = field(default_factory=dict)  # the newest event that counts samples

    @property
    def name(self) -> str:
        return self.tail.path.stem

    def read(self) -> list[RoundSeen]:
        """Take the new events, and return the rounds among them."""
        rounds = []
        for event in self.tail.events():
            kind = event["event"]
            if kind == "start":
                self.start, self.waits = event, ""
                self.opened = number(event["wall_time"]) - number(event["seconds"])  # `seconds` count from the opening
                self.progress = ReplicaProgress.of(event, self.progress.step)
            self.progress.take(event)
            self.heard = self.opened + number(event["seconds"])
            if kind in ("eval", "end"):
                self.counted = event["summary"] if kind == "end" and isinstance(event["summary"], dict) else event
            if kind == "step":
                self.waits = ""
            elif kind in ("retry", "alone"):
                self.waits = str(event["reason"])
            elif kind == "checkpoint":
                self.saved = event["step"], self.heard
            elif kind == "eval" and event["of"] != "start":
                self.evaluated = whole(event.get("progress", event["step"])), number(event["loss"])
            elif kind == "round":
                rounds.append(RoundSeen.of(event))
        return rounds

    def session(self) -> list[Event]:
        """The events of its session in the last `RECENT` bytes, after its start."""
        return split([self.start, *recent_events(self.tail.path, RECENT)])[-1] if self.start else []

    def lives(self) -> bool:
        """Whether a process is writing its log."""
        try:
            return not self.progress.ended and being_written(self.tail.path)
        except OSError:
            return False


class Top:
    """The run in `folder`, or else in the subfolder that was written last. Raises `DataError` if there is none.

    >>> console.print(Top(folder).picture(time.time()))   # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _run_in(folder)
        self._watched: dict[str, _Watched] = {}
        self._participation: Participation | None = None
        self._diagnosis: Diagnosis | None = None
        self._clocks: dict[str, Offset] = {}
        self._diagnosed = -math.inf

    def read(self, now: float) -> None:
        """Take the new events of the logs; `now`: seconds since 1970."""
        rounds = []
        for path in event_files(self.folder):
            rounds += self._watched.setdefault(path.stem, _Watched(Tail(path))).read()
        if self._participation is None and self._start and self._start["carrier"] == CARRIER:
            self._participation = Participation(len(fragments_of(self._start)))
        for round in sorted(rounds, key=lambda round: round.place) if self._participation else ():
            self._participation.take(round)  # type: ignore[union-attr]
        if now - self._diagnosed > DIAGNOSED_SECONDS:
            self._diagnosed = now
            sessions = {one.tail.path: one.session() for one in self._watched.values() if one.start}
            self._diagnosis = diagnose_logs(sessions) if sessions else None
            self._clocks = offsets_of({path.stem: timed_records(session) for path, session in sessions.items()})

    @property
    def over(self) -> bool:
        """Whether no process of a replica runs any more."""
        return bool(self._watched) and not any(one.lives() for one in self._watched.values())

    def facts(self, now: float) -> dict[str, Any]:
        """The contents of the screen, for JSON."""
        return {
            "run": str(self.folder), "step": self._step, "steps": self._steps, "seconds_left": for_json(self._seconds_left()),
            "replicas": [
                {"name": one.name, "state": self._state(one, now), "step": one.progress.step, "loss": for_json(one.progress.loss),
                 "tokens_per_second": for_json(one.progress.tokens_per_second), "nbytes": one.progress.nbytes,
                 "checkpoint": one.saved and one.saved[0]}
                for one in self._all
            ],
            "samples": self._samples,
            "clocks": {name: {"seconds": of.seconds, "error": of.error} for name, of in self._clocks.items()},
            "findings": [finding.facts() for finding in self._diagnosis.findings] if self._diagnosis else [],
        }  # fmt: skip

    def picture(self, now: float, width: int = 160) -> Group:
        """The screen at `now`, seconds since 1970, with the columns that `width` has room for."""
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
        heads = [name.replace("tokens", self._unit) for name in _COLUMNS]
        columns = dict(zip(_COLUMNS, zip(heads, *(self._row(one, now) for one in self._all))))
        for name in _SPARED:
            if sum(_width(other, cells) + 1 for other, cells in columns.items()) > width:
                del columns[name]
        for name, (head, *_) in columns.items():
            table.add_column(head, justify="left" if name in _LEFT else "right", no_wrap=name != "state")
        for row in list(zip(*columns.values()))[1:]:
            table.add_row(*map(Text, row))
        return Group(*(Text(printable(line, 400)) for line in self._head(now)), table, *self._found())

    @property
    def _all(self) -> list[_Watched]:
        return list(self._watched.values())

    @property
    def _start(self) -> Event | None:
        return next((one.start for one in self._all if one.start), None)

    @property
    def _unit(self) -> str:
        return unit_of(self._start) if self._start else UNITS[0]

    @property
    def _steps(self) -> int:
        run = self._start["run"] if self._start else {}
        return whole(run.get("steps")) if isinstance(run, dict) else 0

    @property
    def _step(self) -> int:
        return step_of_run([one.progress for one in self._all], self._participation is not None)

    @property
    def _samples(self) -> dict[str, int]:
        """The samples of the run, at its newest evaluations or ends."""
        counts: dict[str, int] = samples_of([one.counted for one in self._all])
        return counts

    def _seconds_left(self) -> float:
        speeds = [one.progress.steps_per_second for one in self._all if one.lives()]
        speed = min((speed for speed in speeds if speed > 0), default=math.nan)
        return (self._steps - self._step) / speed

    def _state(self, one: _Watched, now: float) -> str:
        if one.progress.ended:
            return one.progress.ended
        if not one.lives():
            return "dead"
        silent = now - one.heard + self._ahead(one)
        if silent > SILENT_SECONDS:
            return f"silent for {text_of_seconds(silent)}"
        if one.waits:
            return f"waits: {printable(one.waits, 60)}"
        if self._participation and one.name not in self._participation.members:
            return "trains, not in the view"
        if self._participation and one.name in self._participation.idle:
            return "trains, stale: not counted"
        return "trains" if one.progress.recent else "starts"

    def _ahead(self, one: _Watched) -> float:
        """Seconds by which its clock is ahead of the first replica's, as far as messages show; 0 within the error."""
        clock = self._clocks.get(one.name)
        return clock.seconds if clock and abs(clock.seconds) > clock.error else 0.0

    def _row(self, one: _Watched, now: float) -> tuple[str, ...]:
        shown = one.progress
        saved = f"step {one.saved[0]}" if one.saved else NOTHING
        if one.saved and math.isfinite(one.saved[1]):
            saved += f", {text_of_seconds(round(now - one.saved[1]))} ago"
        return (
            one.name.removeprefix("replica-"), self._state(one, now), str(shown.step),
            text_of_loss(shown.loss), text_of_count(shown.tokens_per_second),
            text_of_share(shown.compute_utilization), text_of_seconds(shown.stall_seconds), shown.in_the_air,
            text_of_nbytes(shown.nbytes or None), text_of_share(shown.link_use), str(shown.refused), saved,
        )  # fmt: skip

    def _head(self, now: float) -> list[str]:
        damaged = [
            f"{one.tail.path} is damaged: {count} line{'s' * (count > 1)} passed over"
            for one in self._all
            if (count := one.tail.damaged)
        ]
        if self._start is None:
            return damaged or [f"{self.folder}: nothing is written yet"]
        living = [one for one in self._all if one.lives()]
        speed = sum(one.progress.tokens_per_second for one in living if one.progress.recent)
        evaluated = max((one.evaluated for one in self._all if one.evaluated), default=None)
        left = self._seconds_left()
        part = (
            f"{len(self._participation.taking_part)} take part, {self._participation.committed} rounds"
            if self._participation
            else ""
        )
        parts = (
            f"step {min(self._step, self._steps)}/{self._steps}", f"{len(living)} of {whole(self._start['replicas'])} live", part,
            f"{text_of_count(speed)} {self._unit}/s" if living else "",
            f"evaluation {text_of_loss(evaluated[1])} at step {min(evaluated[0], self._steps)}" if evaluated else "",
            f"{samples['samples_trained']:,} samples trained, {samples['samples_waiting']:,} wait"
            if (samples := self._samples) and "samples_waiting" in samples
            else "",
            f"numbers are {provenance_of(self._start)}",
            f"{text_of_seconds(left)} left (predicted)" if left > 0 else "",
        )  # fmt: skip
        return [f"{self.folder.name}: {self._start['strategy']}", " · ".join(part for part in parts if part), *damaged]

    def _found(self) -> list[Text]:
        """The lines of the diagnosis, and the slowest way."""
        if self._diagnosis is None:
            return []
        lines = self._diagnosis.lines()
        slow = max(self._diagnosis.ways.items(), key=lambda item: item[1].ratio, default=None)
        if slow and slow[1].ratio > 1.5:
            (sender, receiver), way = slow
            lines.append(
                f"Slowest against its usual: {sender} to {receiver}, {text_of_seconds(way.seconds)}, else {text_of_seconds(way.usual)}."
            )
        if any(abs(clock.seconds) > max(CLOCK_SECONDS, clock.error) for clock in self._clocks.values()):
            lines.append(text_of_clocks(self._clocks))
        return [Text(""), *(Text(printable(line, 400)) for line in lines)]


def _width(name: str, cells: Sequence[str]) -> int:
    """The width that a column needs; a state may have several lines."""
    return max(cell_len(part) for cell in cells for part in (cell.split() or [""] if name == "state" else [cell]))


def _run_in(folder: Path) -> Path:
    if any(folder.glob("events/*.jsonl")):
        return folder
    logs = sorted(folder.glob("*/events/*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise MissingError(
            f"{folder} holds no run: there is no events/replica-0.jsonl in it, nor in a folder of it. Give the folder that "
            "`thinwire train` wrote, or the one above."
        )
    return logs[-1].parent.parent
