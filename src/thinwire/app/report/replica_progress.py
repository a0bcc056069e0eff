"""The progress of one replica for a live display, from its events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.app.records.events import Event, Tail, being_written
from thinwire.app.records.printable import printable
from thinwire.app.records.sessions import number, whole
from thinwire.app.records.start import Start
from thinwire.app.records.units import (
    NOTHING,
    known,
    text_of_count,
    text_of_loss,
    text_of_nbytes,
    text_of_seconds,
    text_of_share,
)
from thinwire.comm.uplink import Link, Uplink

RECENT = 64  # number of inner steps for speed and link use
FLIGHTS = 512  # number of last departures, more than in these steps


@dataclass(frozen=True, slots=True)
class _Step:
    """An inner step; `paused_seconds` were spent on evaluations and checkpoints before it."""

    begin: float
    spent: float
    tokens: float
    paused_seconds: float


@dataclass
class ReplicaProgress:
    """The state of one replica, from its events since its last start."""

    step: int = 0
    progress: int = 0  # the run's
    own_steps: bool = False  # whether a step told another number of the run's
    loss: float | None = None  # None until a step tells one
    stall_seconds: float = 0.0
    packets: int = 0  # bytes
    sent: int | None = None  # all bytes, by its last step; None for a log that does not tell
    refused: int = 0
    clipped: int = 0
    skipped: int = 0
    ended: str = ""
    late: int = 0
    uplink: Uplink | None = None  # of an emulated link
    on_link: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=FLIGHTS))
    air: dict[tuple[object, object], object] = field(default_factory=dict)
    foreseen: dict[tuple[object, object], int] = field(default_factory=dict)  # bytes of what is in the air
    paused_seconds: float = 0.0
    recent: deque[_Step] = field(default_factory=lambda: deque(maxlen=RECENT))

    @classmethod
    def of(cls, start: Start, step: int = 0) -> ReplicaProgress:
        """At the start of its process."""
        rate = start.bits_per_second
        return cls(uplink=Uplink(Link(rate)) if known(rate) else None, step=step, progress=step)

    def take(self, event: Event) -> None:
        """Learn from one event."""
        kind = event["event"]
        if kind == "step":
            if event["loss"] is not None:
                loss = number(event["loss"])
                # a loss that is not finite is shown as it is, and the mean begins again after it
                self.loss = 0.9 * self.loss + 0.1 * loss if known(self.loss) and known(loss) else loss
            self.step = event["step"]
            self._tell(event.get("progress", self.step), event.get("sent"))
            self.own_steps |= self.progress != self.step
            begin, spent, tokens = (number(event[name]) for name in ("begin", "compute_seconds", "tokens"))
            self.recent.append(_Step(begin, spent, tokens, self.paused_seconds))
        elif kind == "depart":
            self.packets += whole(event["nbytes"])
            self.foreseen[str(event["fragment"]), event["round"]] = whole(event["nbytes"])
            if self.uplink:
                start, end = self.uplink.book(number(event["seconds"]), whole(event["nbytes"]))
                self.on_link.append((start, end))
            self.air[str(event["fragment"]), event["round"]] = event["fragment"]
        elif kind in ("flight", "land", "refused"):
            self.air.pop((str(event["fragment"]), event["round"]), None)
            if kind == "flight":
                foreseen = self.foreseen.pop((str(event["fragment"]), event["round"]), None)
                self.packets += 0 if foreseen is None else whole(event["nbytes"]) - foreseen
            self.stall_seconds += number(event["stall_seconds"]) if kind == "land" else 0.0
            self.refused += kind == "refused"
        elif kind == "clipped":
            self.clipped += 1
        elif kind == "resume":
            self.step = self.progress = whole(event["from_step"])
        elif kind in ("eval", "checkpoint"):
            self.paused_seconds += number(event["seconds_spent"])
        elif kind in ("stop", "end"):
            self.ended = self.ended or ("ended" if kind == "end" else "stopped")
            if kind == "end" and isinstance(event["summary"], dict):
                self._tell(event["summary"].get("steps"), event["summary"].get("wire_bytes_sent"))
        elif kind == "round":
            self.packets += whole(event["nbytes"])
            if self.uplink:
                self.on_link.append(self.uplink.book(number(event["seconds"]), whole(event["nbytes"])))
            fragment = event["fragment"]
            self.air = {key: other for key, other in self.air.items() if other != fragment}
            self.refused += event["committed"] is False and whole(fragment) >= 0
        elif kind == "late":
            self.late += 1
        elif kind == "skip":
            self.step, self.skipped = event["step"], self.skipped + 1

    def _tell(self, progress: object, sent: object) -> None:
        """Take the run's step and all bytes, as far as they are told."""
        if known(number(progress)):
            self.progress = whole(progress)
        if known(number(sent)):
            self.sent = whole(sent)

    @property
    def nbytes(self) -> int:
        return self.packets if self.sent is None else self.sent

    @property
    def _seconds(self) -> float:
        """From the first of the recent steps to the end of the last; NaN before there are any."""
        return (
            self.recent[-1].begin + self.recent[-1].spent - self.recent[0].begin or math.nan
            if self.recent
            else math.nan
        )

    @property
    def steps_per_second(self) -> float:
        return len(self.recent) / self._seconds

    @property
    def _loop_seconds(self) -> float:
        """The same without evaluations and checkpoints, as the summary counts."""
        paused = self.recent[-1].paused_seconds - self.recent[0].paused_seconds if self.recent else 0.0
        return (self._seconds - paused) or math.nan

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.recent) / self._loop_seconds

    @property
    def compute_utilization(self) -> float:
        return sum(step.spent for step in self.recent) / self._loop_seconds

    @property
    def link_use(self) -> float:
        """Share of the recent steps' time in which the emulated uplink was busy; NaN where there is none.

        A departure is not yet on the link: the books of the uplink say from when to when each one is.
        """
        if self.uplink is None or not self.recent:
            return math.nan
        begin, end = self.recent[0].begin, self.recent[-1].begin + self.recent[-1].spent
        busy = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in self.on_link)
        return busy / self._seconds

    @property
    def in_the_air(self) -> str:
        return ", ".join(printable(fragment, 20) for fragment in self.air.values()) or NOTHING

    def cells(self) -> dict[str, str]:
        """Its columns of a screen."""
        return {
            "loss": text_of_loss(self.loss), "tokens/s": text_of_count(self.tokens_per_second),
            "compute": text_of_share(self.compute_utilization), "stalled": text_of_seconds(self.stall_seconds),
            "in the air": self.in_the_air, "sent": text_of_nbytes(self.nbytes or None), "link": text_of_share(self.link_use),
            "refused": str(self.refused),
        }  # fmt: skip


class Watched:
    """One replica whose log is followed: `progress` of its last session, and what outlasts a session."""

    def __init__(self, path: Path) -> None:
        self.tail, self.progress = Tail(path), ReplicaProgress()
        self.start: Start | None = None
        self.heard = -math.inf  # when its last event was, in seconds since 1970
        self.waits = ""  # what it has waited for since its last step
        self.saved: tuple[int, float] | None = None  # the step and the time of the last checkpoint
        self.evaluated: tuple[int, float] | None = None  # the run's step and the loss
        self.counted: Event = {}  # the newest event that counts samples

    @property
    def name(self) -> str:
        return self.tail.path.stem

    def events(self) -> Iterator[Event]:
        """The new events, each taken."""
        for event in self.tail.events():
            self._take(event)
            yield event

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.start, self.waits = Start.of(event), ""
            self.progress = ReplicaProgress.of(self.start, self.progress.step)
        self.progress.take(event)
        if self.start:
            self.heard = self.start.opened + number(event["seconds"])
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

    def lives(self) -> bool:
        """Whether a process is writing its log."""
        try:
            return not self.progress.ended and being_written(self.tail.path)
        except OSError:
            return False


def step_of_run(replicas: Sequence[ReplicaProgress], elastic: bool) -> int:
    """The run's inner steps, as the slowest replica knows them; in an elastic run, the fastest. Where each takes its own number of steps,
    a lost one knows no more: then as the fastest knows them, or at the end those that ended.
    """
    known = [one.progress for one in replicas]
    if any(one.own_steps for one in replicas):
        return min((one.progress for one in replicas if one.ended), default=max(known))
    return (max if elastic else min)(known, default=0)
