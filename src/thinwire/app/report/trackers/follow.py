"""Follows the event files of a run, live or afterwards, and sends metrics to its trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.app.records.events import Event, Tail, event_files
from thinwire.app.records.sessions import whole
from thinwire.app.report.trackers.sinks import Sink, open_sinks, parse_sinks
from thinwire.app.report.trackers.table import MetricValues

Say = Callable[[str], object]


class Follower:
    """Reads new events in the files of `folder` and writes metrics to `sinks`. A sink that fails is left out, with one message."""

    def __init__(self, folder: Path, sinks: Mapping[str, Sink], say: Say) -> None:
        self._folder, self._sinks, self._say = folder, dict(sinks), say
        self._tails: dict[str, Tail] = {}
        self._values: dict[str, MetricValues] = {}

    def pass_over(self) -> None:
        """Count the events of earlier sessions without sending them, because these sessions have sent them."""
        for replica, event in self._events():
            self._values[replica].take(event)

    def start_over(self) -> None:
        """Send the events of all sessions, in place of what earlier commands have sent."""
        self._each(lambda sink: sink.start_over())

    def update(self) -> None:
        """Send new metrics. Raises nothing."""
        for replica, event in self._events():
            if event["event"] in ("resume", "back"):
                step = whole(event["from_step"]) if event["event"] == "resume" else event["step"]
                self._each(lambda sink: sink.rewind(replica, step))  # noqa: B023  # called at once
            if changed := self._values[replica].take(event):
                self._each(lambda sink: sink.write(replica, event["step"], changed))  # noqa: B023
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        self.update()
        self._each(lambda sink: sink.close())

    def _events(self) -> Iterator[tuple[str, Event]]:
        for path in event_files(self._folder):
            tail = self._tails.setdefault(path.stem, Tail(path))
            self._values.setdefault(path.stem, MetricValues())
            with suppress(OSError):  # the folder is gone, or full: the run says so
                for event in tail.events():
                    yield path.stem, event

    def _each(self, tell: Callable[[Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                tell(sink)
            except Exception as error:  # whatever a tracker raises: training continues
                del self._sinks[name]
                self._say(f"log: {name} failed and is left out: {type(error).__name__}: {' '.join(str(error).split())}")


@contextmanager
def following(log: str | None, folder: Path, settings: Mapping[str, Any], say: Say) -> Iterator[Follower | None]:
    """A context with a follower for the trackers in `log`, or None without trackers. Raises `ConfigurationError`."""
    asked = parse_sinks(log)
    if not asked:
        yield None
        return
    sinks = open_sinks(asked, folder, settings)
    for name, sink in sinks.items():
        say(f"log: {name}: {sink.where}")
    follower = Follower(folder, sinks, say)
    try:
        yield follower
    finally:
        follower.close()
