"""One screen for all replicas of a run, from their event logs: while it trains, and when it has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from thinwire.app.records.clocks import Offset, Timed, offsets_of, text_of_clocks
from thinwire.app.records.events import event_files
from thinwire.app.records.losses import for_json
from thinwire.app.records.participation import Participation, RoundSeen
from thinwire.app.records.printable import printable
from thinwire.app.records.round_log import RoundLog
from thinwire.app.records.samples import samples_of
from thinwire.app.records.sessions import whole
from thinwire.app.records.start import Start
from thinwire.app.records.units import NOTHING, UNITS, text_of_count, text_of_loss, text_of_seconds
from thinwire.app.report.diagnosis import Diagnosis, diagnose_logs
from thinwire.app.report.progress import SILENT_SECONDS
from thinwire.app.report.replica_progress import Watched, step_of_run
from thinwire.app.report.terminal import screen
from thinwire.errors import MissingError

DIAGNOSED_SECONDS = 10.0  # between two diagnoses
RECENT_ROUNDS = 4096  # the latest rounds of each replica that a diagnosis reads
CLOCK_SECONDS = 0.1  # smaller differences of clocks are not shown
_COLUMNS = (
    *("replica", "state", "step", "loss", "tokens/s", "compute", "stalled", "in the air", "sent", "link", "refused"),
    "checkpoint",
)
_LEFT = ("replica", "state", "in the air", "checkpoint")
# Left out of a narrow screen, in this order.
_SPARED = ("link", "in the air", "refused", "checkpoint", "compute", "stalled", "sent")


class Top:
    """The run in `folder`, or else in the subfolder that was written last. Raises `DataError` if there is none.

    >>> console.print(Top(folder).picture(time.time()))   # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _run_in(folder)
        self._watched: dict[str, Watched] = {}
        self._logs: dict[Path, RoundLog] = {}
        self._participation: Participation | None = None
        self._diagnosis: Diagnosis | None = None
        self._clocks: dict[str, Offset] = {}
        self._diagnosed = -math.inf

    def read(self, now: float) -> None:
        """Take the new events of the logs; `now`: seconds since 1970."""
        rounds = []
        for path in event_files(self.folder):
            watched = self._watched.setdefault(path.stem, Watched(path))
            for event in watched.events():
                if event["event"] == "start" and watched.start:
                    self._logs[path] = RoundLog(watched.start, path.stem, RECENT_ROUNDS)
                if path in self._logs:
                    self._logs[path].take(event)
                if event["event"] == "round":
                    rounds.append(RoundSeen.of(event))
        if self._participation is None and self._start and self._start.elastic:
            self._participation = Participation(len(self._start.fragments))
        for seen in sorted(rounds, key=lambda seen: seen.place) if self._participation else ():
            self._participation.take(seen)  # type: ignore[union-attr]
        if now - self._diagnosed > DIAGNOSED_SECONDS:
            self._diagnosed = now
            self._diagnosis = diagnose_logs(self._logs) if self._logs else None
            timed = {
                p.stem: [Timed(log.start.opened, r) for r in log.records.values()] for p, log in self._logs.items()
            }
            self._clocks = offsets_of(timed)

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
        rows = [self._row(one, now) for one in self._all]
        heads = {name: name.replace("tokens", self._unit) for name in _COLUMNS}
        columns = {heads[name]: [row[name] for row in rows] for name in _COLUMNS}
        for name in _SPARED:
            if sum(_width(other, [other, *cells]) + 1 for other, cells in columns.items()) > width:
                del columns[heads[name]]
        table = screen(columns, _LEFT)
        return Group(*(Text(printable(line, 400)) for line in self._head(now)), table, *self._found())

    @property
    def _all(self) -> list[Watched]:
        return list(self._watched.values())

    @property
    def _start(self) -> Start | None:
        return next((one.start for one in self._all if one.start), None)

    @property
    def _unit(self) -> str:
        return self._start.unit if self._start else UNITS[0]

    @property
    def _steps(self) -> int:
        return whole(self._start.run.get("steps")) if self._start else 0

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

    def _state(self, one: Watched, now: float) -> str:
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

    def _ahead(self, one: Watched) -> float:
        """Seconds by which its clock is ahead of the first replica's, as far as messages show; 0 within the error."""
        clock = self._clocks.get(one.name)
        return clock.seconds if clock and abs(clock.seconds) > clock.error else 0.0

    def _row(self, one: Watched, now: float) -> dict[str, str]:
        saved = f"step {one.saved[0]}" if one.saved else NOTHING
        if one.saved and math.isfinite(one.saved[1]):
            saved += f", {text_of_seconds(round(now - one.saved[1]))} ago"
        return {
            "replica": one.name.removeprefix("replica-"), "state": self._state(one, now), "step": str(one.progress.step),
            **one.progress.cells(), "checkpoint": saved,
        }  # fmt: skip

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
            f"step {min(self._step, self._steps)}/{self._steps}", f"{len(living)} of {self._start.replicas} live", part,
            f"{text_of_count(speed)} {self._unit}/s" if living else "",
            f"evaluation {text_of_loss(evaluated[1])} at step {min(evaluated[0], self._steps)}" if evaluated else "",
            f"{samples['samples_trained']:,} samples trained, {samples['samples_waiting']:,} wait"
            if (samples := self._samples) and "samples_waiting" in samples
            else "",
            f"numbers are {self._start.provenance}",
            f"{text_of_seconds(left)} left (predicted)" if left > 0 else "",
        )  # fmt: skip
        return [f"{self.folder.name}: {self._start.strategy}", " · ".join(part for part in parts if part), *damaged]

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
