"""The live display of a run: the progress of its replicas, read from their event files.

On a terminal it is a table that redraws itself; elsewhere (a file, a batch job) one plain line at intervals, without
control characters. The process that started the replicas calls `update` about five times a second, which costs a few
file reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.app.records.events import Event
from thinwire.app.records.losses import useless
from thinwire.app.records.participation import MembershipLog, Steps, text_of_steps
from thinwire.app.records.printable import printable
from thinwire.app.records.run_record import RunRecord, best_loss
from thinwire.app.records.start import CARRIER, Start
from thinwire.app.records.units import (
    NOTHING,
    UNITS,
    text_of_count,
    text_of_loss,
    text_of_nbytes,
    text_of_seconds,
    text_of_share,
)
from thinwire.app.report.replica_progress import ReplicaProgress, Watched, step_of_run
from thinwire.app.report.terminal import Terminal, screen

SILENT_SECONDS = 20.0  # seconds without an event after which a replica does not count as living
COLUMNS = ("replica", "step", "loss", "tokens/s", "compute", "stalled", "in the air", "sent", "link", "refused")
NARROW = tuple(name for name in COLUMNS if name not in ("in the air", "link", "refused"))
# Least width of a terminal for all columns, and for the narrow ones; below it the first five of them are shown.
WIDE, SLIM = 80, 60
QUIET_SECONDS = 10.0  # seconds between plain lines, or a hundredth of the run so far if that is longer


class Progress:
    """Follows `replicas` event files of `run_folder` until `steps`; for sharded replicas (`sharded`) those of the first ranks.

    `console` says where it is shown: the terminal by default, `Console(stderr=True)` where stdout is for JSON.

    >>> with Progress(folder, steps=1000, replicas=2) as progress:   # doctest: +SKIP
    ...     while any(process.is_alive() for process in processes):
    ...         progress.update()
    ...         time.sleep(0.2)
    """

    def __init__(
        self,
        run_folder: str | Path,
        steps: int,
        replicas: int | Sequence[str],
        console: Console | None = None,
        sharded: bool = False,
    ) -> None:
        events = Path(run_folder) / "events"
        suffix = ".shard-0.jsonl" if sharded else ".jsonl"
        self.steps = steps
        self.console = console or Terminal()
        self._names = [f"replica-{index}" for index in range(replicas)] if isinstance(replicas, int) else list(replicas)
        self._watched = [Watched(events / f"{name}{suffix}") for name in self._names]
        self._heard = [-math.inf] * len(self._names)  # when, on this process's clock
        self._membership: MembershipLog | None = None  # of an elastic run
        self._steps = [Steps(name) for name in self._names]
        self._said: set[str] = set()
        self._unit, self._provenance = UNITS[0], "measured"
        self._waits = ""  # what the start waits for
        self._here = ""  # behind sums, if the run has more replicas than are followed
        self._opened = self._spoke = time.monotonic()
        self._spoke_step = 0
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update(last=True)
        if self._live:
            self._live.stop()

    @property
    def step(self) -> int:
        """The run's step, as `step_of_run` has it. Replicas with different speeds may take more steps together than the run's."""
        return min(self.steps, step_of_run(self._replicas, self._membership is not None))

    def pass_over(self) -> None:
        """Skip the events of earlier sessions, which have been shown."""
        for watched, steps in zip(self._watched, self._steps):
            for event in watched.tail.events():
                # Nobody asks for its steps, and there may be millions.
                if event["event"] == "start" and event["carrier"] != CARRIER:
                    watched.tail.pass_over()
                    break
                steps.take(event)

    def update(self, last: bool = False) -> None:
        """Read new events and show the progress; `last` shows it even if the last line was recent."""
        for index, watched in enumerate(self._watched):
            for event in watched.events():
                self._heard[index] = time.monotonic()
                self._steps[index].take(event)
                self._take(index, event)
        if self._live:
            self._live.update(self._picture(), refresh=True)
        elif self._due() or (last and self.step != self._spoke_step):
            self._spoke, self._spoke_step = time.monotonic(), self.step
            self._print(self._line())

    def _take(self, index: int, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            start = Start.of(event)
            self._unit, self._provenance = start.unit, start.provenance
            self._here = " here" if start.replicas > len(self._names) else ""
            if start.elastic and self._membership is None:
                self._membership = MembershipLog(len(start.fragments), start.replicas)
            exchanges = start.run.get("exchanges")
            for choice in exchanges if isinstance(exchanges, list) else ():
                self._say("exchange", choice)
        elif kind in ("warning", "stop"):
            said = event.get("message", event.get("reason"))
            if not str(said).startswith("JobError: "):  # the command ends with it
                self._say(f"{kind} ({self._names[index].replace('-', ' ')}, step {event['step']})", said)
        elif kind == "skip" and sum(replica.skipped for replica in self._replicas) == 1:
            self._print(
                f"warning ({self._names[index].replace('-', ' ')}, step {event['step']}): the step changed no weights, because "
                f"{event['reason']}. If more steps are skipped, check the data and the loss, or lower --lr."
            )
        elif kind in ("resume", "back"):
            for passed_over in event["skipped"] if isinstance(event["skipped"], list) else ():
                self._say("passed over", passed_over.get("reason"))
            if kind == "back":
                path = event["path"] or "no checkpoint of its own"
                self._print(
                    f"{self._names[index]} is back at step {event['step']}, from round {event['round']} ({path})"
                )
            elif event["path"]:
                self._say("resume", f"from step {event['from_step']}")
        elif kind in ("alone", "retry", "caught_up", "doubt", "late", "keeps", "round") and self._membership:
            for text in self._membership.take(self._names[index], event):
                self._print(text)

    def say(self, text: str) -> None:
        """Show a line that is not in the logs."""
        self._print(text)

    def say_start(self, text: str) -> None:
        """Show what the start waits for, also as its phase."""
        self._waits = text
        self._print(text)

    def _say(self, what: str, said: object) -> None:
        if (text := str(said)) not in self._said:
            self._said.add(text)  # several replicas report the same line
            self._print(f"{what}: {text}")

    def _print(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _due(self) -> bool:
        now = time.monotonic()
        quiet = max(QUIET_SECONDS, (now - self._opened) / 100)
        if self._phase():
            return now - self._spoke >= quiet
        return self.step > self._spoke_step and (
            now - self._spoke >= quiet or (self.step - self._spoke_step) * 20 >= self.steps
        )

    @property
    def _replicas(self) -> list[ReplicaProgress]:
        return [watched.progress for watched in self._watched]

    @property
    def _moving(self) -> list[ReplicaProgress]:
        """The replicas that train: without those that have no step yet, and those that have ended, unless all have."""
        begun = [replica for replica in self._replicas if replica.recent]
        return [replica for replica in begun if not replica.ended] or begun

    def _seconds_left(self) -> float:
        speed = min((r.steps_per_second for r in self._moving), default=math.nan)
        return (self.steps - self.step) / speed if speed > 0 else math.nan

    def _phase(self) -> str:
        """The phase before the first step; empty afterwards."""
        if any(replica.recent or replica.ended for replica in self._replicas):
            return ""
        begun = all(watched.start for watched in self._watched)
        return "compiling, meeting the others" if begun else self._waits or "starting"

    def _elapsed(self) -> str:
        return text_of_seconds(round(time.monotonic() - self._opened))

    def _evaluation(self) -> str:
        evaluated = max((watched.evaluated for watched in self._watched if watched.evaluated), default=None)
        if evaluated is None:
            return ""
        step, loss = evaluated
        return f"evaluation {text_of_loss(loss)} at step {min(self.steps, step)}"

    def _line(self) -> str:
        if phase := self._phase():
            return f"{phase} · {self._elapsed()}"
        losses = [r.loss for r in self._replicas if r.loss is not None]  # one NaN among them is shown
        parts = [
            f"step {self.step}/{self.steps}",
            f"loss {text_of_loss(sum(losses) / len(losses) if losses else None)}",
            self._evaluation(),
            f"{text_of_count(sum(r.tokens_per_second for r in self._moving))} {self._unit}/s{self._here}",
            f"compute {text_of_share(min((r.compute_utilization for r in self._moving), default=None))}",
            f"stalled {text_of_seconds(max(r.stall_seconds for r in self._replicas))}",
            f"sent {text_of_nbytes(sum(r.nbytes for r in self._replicas) / len(self._replicas))} per replica",
            self._membership_line(),
            self._steps_line(),
            self._troubles(),
            f"{self._elapsed()} elapsed",
            f"numbers are {self._provenance}",
            f"{text_of_seconds(self._seconds_left())} left (predicted)" if self.step < self.steps else "",
        ]
        return " · ".join(part for part in parts if part)

    def _troubles(self) -> str:
        refused, skipped = max(r.refused for r in self._replicas), sum(r.skipped for r in self._replicas)
        counts = {
            "refused rounds": refused,
            "skipped steps": skipped,
            "clipped deltas": sum(r.clipped for r in self._replicas),
        }
        return " · ".join(f"{what}: {count}" for what, count in counts.items() if count)

    def _membership_line(self) -> str:
        """The three numbers."""
        if self._membership is None:
            return ""
        if all(replica.ended for replica in self._replicas):
            return f"{self._membership.committed} rounds committed"
        now = time.monotonic()
        each = zip(self._names, self._heard, self._replicas)
        here = [name for name, heard, replica in each if now - heard < SILENT_SECONDS and not replica.ended]
        return self._membership.line(here, self._names)

    def _steps_line(self) -> str:
        return f"steps: {text_of_steps(self._steps)}" if self._membership else ""

    def _picture(self) -> Group:
        if phase := self._phase():
            return Group(Text(f"{phase} · {self._elapsed()}"))
        left = f"{text_of_seconds(self._seconds_left())} left (predicted)" if self.step < self.steps else "done"
        width = self.console.width
        shown = COLUMNS if width >= WIDE else NARROW if width >= SLIM else NARROW[:5]
        troubles = "" if shown == COLUMNS else self._troubles()
        said = (
            f"{self._elapsed()} elapsed", left, self._evaluation(), self._membership_line(), self._steps_line(), troubles,
            f"numbers are {self._provenance}",
        )  # fmt: skip
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(self.steps, 1), completed=self.step, width=24), f"step {self.step}/{self.steps}"
        )
        rows = [self._row(index, replica) for index, replica in enumerate(self._replicas)]
        table = screen(
            {name.replace("tokens", self._unit): [row[name] for row in rows] for name in shown}, ["in the air"]
        )
        return Group(head, Text(" · ".join(part for part in said if part)), table)

    def _row(self, index: int, replica: ReplicaProgress) -> dict[str, str]:
        silent = self._membership is not None and time.monotonic() - self._heard[index] > SILENT_SECONDS
        cells = {
            "replica": self._names[index].removeprefix("replica-"),
            "step": replica.ended or ("silent" if silent else str(replica.step)),
            **replica.cells(),
        }
        return cells | ({"refused": f"{replica.refused}, {replica.skipped} skipped"} if replica.skipped else {})


def final_table(record: RunRecord) -> Table:
    """The numbers of one run, each with its provenance."""
    table = Table(title=Text(record.name), box=None, show_header=False, title_justify="left", pad_edge=False)
    for what, value in record.summary.figures():
        table.add_row(Text(what), Text(value, style="bold"), Text(record.summary.provenance, style="dim"))
    if told := record.summary.text_of_time():
        table.add_row(Text("time"), Text(told), Text(record.summary.provenance, style="dim"))
    table.add_row(Text("status"), Text(record.status, style="bold red" if useless(record.status) else ""), "")
    return table


def compare_table(records: Sequence[RunRecord], width: int = 160) -> Group:
    """The numbers of several runs: one row for each; or, if `width` has no room for the rows, one column for each, in as many tables as needed."""
    figures = [dict(record.summary.figures()) for record in records]
    whats = list(dict.fromkeys(what for of in figures for what in of))  # not every run has each figure
    best = best_loss(records)
    head, lines = ["run", *whats, "score", "numbers are"], list[list[str]]()
    for record, of in zip(records, figures):
        score = record.score(best).value
        values = [*(of.get(what, NOTHING) for what in whats), NOTHING if score is None else f"{score:.3f}"]
        lines.append([record.name, *values, record.summary.provenance])
    rooms = [max(map(cell_len, (*name.split(), *cells))) + 2 for name, *cells in list(zip(head, *lines))[1:]]
    if sum(rooms) + 10 <= width:
        return Group(_table([head, *lines], [8, *(0 for _ in rooms)]))
    labels = max(cell_len(word) for name in head for word in name.split())
    tables, left = list[list[list[str]]](), 0
    for name, *values in lines:
        room = max(map(cell_len, values)) + 2
        if room > left:
            tables.append([head])
            left = width - labels - 2
        tables[-1].append([name, *values])
        left -= room
    each = [_table([*zip(*one)], [labels, *(max(map(cell_len, run[1:])) for run in one[1:])]) for one in tables]
    return Group(*[part for one in each for part in (one, Text())][:-1])  # a blank line between two


def _table(lines: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    """A table of `lines`, the first of which is its head, with columns of at least `widths`."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for place, (head, least) in enumerate(zip(lines[0], widths)):
        left = place == 0 or head == "numbers are"
        table.add_column(head, justify="left" if left else "right", overflow="fold", min_width=least or None)
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table
