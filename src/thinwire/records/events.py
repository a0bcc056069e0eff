"""The event log of a run: one JSON object per line, one file per replica, `RUN/events/replica-0.jsonl`.

Every line holds `event` (its kind), `seconds` since this process opened the log (monotonic), `step`, and the fields
of its kind:

    start       wall_time replica replicas run strategy parameters fragments link carrier machine
    step        loss lr grad_norm tokens begin compute_seconds progress sent
    depart      fragment round nbytes seconds_spent
    flight      fragment round nbytes begin end queued_seconds transfer_seconds
    land        fragment round begin stall_seconds seconds_spent
    refused     fragment round by reason
    clipped     fragment round norm limit
    weighed     fragment round weights
    wire        name fragment round own_seconds over sent received scheduled
    round       round fragment members counted committed foreseen nbytes seconds_spent reason
    given       to nbytes
    caught_up   round donor
    alone       reason
    doubt       round reason
    keeps       late at_most_seconds
    late        fragment
    retry       reason
    back        round path skipped
    evicted     name by reason
    left_out    name seconds reason
    dropped     trained samples reason
    read        ranges
    data        round trained lost returned
    eval        loss tokens seconds_spent of progress sent
    checkpoint  path nbytes seconds_spent
    resume      from_step path skipped
    skip        reason
    stop        reason
    warning     message
    end         summary

`wire` has the messages of a round (diagnosis/records.py). The kinds from `round` to `dropped` are those of an elastic run. A member
with `keeps` has ended and keeps the final state for `late`; `retry` has the reason that delays a round; after `back` it has resumed from
its own checkpoint, which contained `round` rounds. `left_out` is a member that spoils rounds, for `seconds`; `dropped` are steps or tokens
that this replica `trained`, and their `samples`, that no delta holds.

`read` and `data` have positions in the data (docs/data.md): `read` those that this replica has read since the last such event, as
[begin, end]; `data` those that a round has settled, as [name, begin, end].

`progress` of a step and of an evaluation is the number of inner steps of the run, which differs from this replica's own if replicas have
different speeds; `sent` of both are all bytes that it has sent so far, for any purpose, in earlier sessions too.

`weighed` has the weight that each neighbour got, by rank (a replica's own is 1); one that is missing has sent NaN or infinity.

`nbytes` of a departure are the bytes that this replica foresees to send for it, to all peers together; `nbytes` of a flight are those
that it has sent, fewer only if the codec's size varies. In a `round` they are `foreseen` and `nbytes`. `begin` and `end` are on the
clock of `seconds`. NaN and the infinities, which JSON lacks, are written as the strings "NaN", "Infinity" and
"-Infinity"; reading restores them. A process killed in the middle of a line leaves it torn; readers pass over it. A
run that resumes appends to the same file with a new `start` and a `resume`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from thinwire.errors import DataError
from thinwire.records.choices import listed
from thinwire.records.files import lock, open_regular

Event = dict[str, Any]

EVENTS: dict[str, tuple[str, ...]] = {
    "start": (
        *("wall_time", "replica", "replicas", "run", "strategy", "parameters"),
        *("fragments", "link", "carrier", "machine"),
    ),
    "step": ("loss", "lr", "grad_norm", "tokens", "begin", "compute_seconds", "progress", "sent"),
    "depart": ("fragment", "round", "nbytes", "seconds_spent"),
    "flight": ("fragment", "round", "nbytes", "begin", "end", "queued_seconds", "transfer_seconds"),
    "land": ("fragment", "round", "begin", "stall_seconds", "seconds_spent"),
    "refused": ("fragment", "round", "by", "reason"),
    "clipped": ("fragment", "round", "norm", "limit"),
    "weighed": ("fragment", "round", "weights"),
    "wire": ("name", "fragment", "round", "own_seconds", "over", "sent", "received", "scheduled"),
    "round": ("round", "fragment", "members", "counted", "committed", "foreseen", "nbytes", "seconds_spent", "reason"),
    "given": ("to", "nbytes"),
    "caught_up": ("round", "donor"),
    "alone": ("reason",),
    "doubt": ("round", "reason"),
    "keeps": ("late", "at_most_seconds"),
    "late": ("fragment",),
    "retry": ("reason",),
    "back": ("round", "path", "skipped"),
    "evicted": ("name", "by", "reason"),
    "left_out": ("name", "seconds", "reason"),
    "dropped": ("trained", "samples", "reason"),
    "read": ("ranges",),
    "data": ("round", "trained", "lost", "returned"),
    "eval": ("loss", "tokens", "seconds_spent", "of", "progress", "sent"),
    "checkpoint": ("path", "nbytes", "seconds_spent"),
    "resume": ("from_step", "path", "skipped"),
    "skip": ("reason",),
    "stop": ("reason",),
    "warning": ("message",),
    "end": ("summary",),
}

_LATER = {"progress", "sent"}  # fields that logs of older versions lack
LONGEST_LINE = 4 << 20  # most bytes of a line
_GROUP = 1 << 18  # bytes of lines that are parsed at once
_COUNTS = ("fragment", "round", "nbytes", "tokens")
_FIELDS = {kind: frozenset(fields) - _LATER for kind, fields in EVENTS.items()}
_NO_FIELDS = frozenset[str]()
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EventLog:
    """Appends events to one replica's file; safe to call from any thread.

    A file has one writer at a time, so that two runs cannot share a folder. Each line is one unbuffered write, so whatever
    was emitted before a kill -9 is in the file. A full or missing disk never stops training: the first lost event is
    announced on stderr, and `lost` counts all.

    Args:
        path: the file; its folder is made.
        clock: seconds, monotonic; or a simulation's.

    Raises:
        DataError: the file cannot be opened, or another run writes to it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder, "replica-0.jsonl")) as log:
    ...     log.emit("warning", step=3, message="the link is slow")
    ...     len(log.path.read_text().splitlines())
    1
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self.lost = 0
        self._lock, self._clock = threading.Lock(), clock
        self._opened = clock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # a FIFO is an error, not a wait
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.fdopen(os.open(self.path, flags, 0o666), "ab", buffering=0)
            self._torn = not _ends_with_newline(self.path)
            locked = lock(self._file, wait=False)
            for _ in range(4 * (not locked)):  # one who asks `being_written` holds it for a moment
                time.sleep(0.02)
                locked = locked or lock(self._file, wait=False)
        except OSError as error:
            raise DataError(
                f"The event log {self.path} cannot be opened ({error}); a run needs a folder it may write to. "
                "Choose another run folder, or free this one."
            ) from error
        if not locked:
            self._file.close()
            raise DataError(
                f"{self.path} is being written: a run is active in this folder. Wait until it has stopped, or choose "
                "another run folder."
            )

    def seconds(self) -> float:
        """Seconds since the log was opened: the clock on which `begin` and `end` are given."""
        return self._clock() - self._opened

    def emit(self, event: str, step: int, **fields: object) -> None:
        """Write one event. Raises `ValueError` for an unknown kind, and for fields that are not its kind's."""
        expected = EVENTS.get(event)
        if expected is None:
            raise ValueError(f"No event is called {event!r}; there are {listed(EVENTS)}. Add it to EVENTS first.")
        if fields.keys() != set(expected):
            raise ValueError(
                f"Event {event!r} was given the fields {sorted(fields)}, it needs exactly {sorted(expected)}. "
                "Change the call or EVENTS, so that what is written is what is read."
            )
        with self._lock:
            record = {"event": event, "seconds": round(self.seconds(), 6), "step": step, **fields}
            self._append(_line(record))

    def close(self) -> None:
        """Close the log. Idempotent; later events are lost, and counted."""
        with self._lock:
            self._file.close()

    def _append(self, line: bytes) -> None:
        data = memoryview(b"\n" + line if self._torn else line)
        try:
            while data:
                if self._file.closed:  # training has ended
                    self.lost += 1
                    return
                written = self._file.write(data)
                self._torn = True  # until the rest is there too
                data = data[written:]
            self._torn = False
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                with contextlib.suppress(OSError, ValueError):  # stderr may be gone as well
                    print(f"thinwire: events are lost: {self.path}: {error}. Training continues.", file=sys.stderr)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Tail:
    """Reads the lines added to an event file since the last read; the file need not exist yet.

    `damaged` counts the lines that were no events; one of more than LONGEST_LINE bytes is passed over unread. A line is taken when its
    end is there. The first read begins at byte `offset`.
    """

    def __init__(self, path: str | Path, offset: int = 0) -> None:
        self.path = Path(path)
        self.damaged = 0
        self._offset = offset
        self._rest = b""
        self._overlong = False  # the line that is being read

    def read(self) -> list[Event]:
        """The events that were completed since the last call."""
        return list(self.events())

    def events(self) -> Iterator[Event]:
        """The same, one after the other: a file of weeks does not fit in memory."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as file:
            for lines in _together(self._lines(file)):
                yield from self._events(lines)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(0, 2)
        if file.tell() < self._offset:  # the file was replaced by a new one
            self._offset, self._rest, self._overlong = 0, b"", False
        file.seek(self._offset)
        while part := file.readline(LONGEST_LINE):
            self._offset += len(part)
            self._rest = b"" if self._overlong else self._rest + part
            if len(self._rest) > LONGEST_LINE:
                self._rest, self._overlong = b"", True
                self.damaged += 1
            if part.endswith(b"\n"):
                whole, self._rest = self._rest, b""
                if not self._overlong:
                    yield whole
                self._overlong = False

    def _events(self, lines: Sequence[bytes]) -> list[Event]:
        events = _parsed(lines)
        self.damaged += sum(event is None and bool(line.strip()) for event, line in zip(events, lines))
        return [event for event in events if event is not None]

    def pass_over(self) -> None:
        """Leave out what the file holds by now."""
        with contextlib.suppress(FileNotFoundError):
            self._offset, self._rest = self.path.stat().st_size, b""

    def last(self) -> Event | None:
        """The event in a last line without its end, if it lacks nothing else."""
        return _parsed([self._rest])[0]


def recent_events(path: Path, most: int) -> list[Event]:
    """The events in the last `most` bytes of a file."""
    return Tail(path, max(0, path.stat().st_size - most)).read()


def _together(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines in groups of about `_GROUP` bytes."""
    group, size = [], 0
    for line in lines:
        group.append(line)
        size += len(line)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _parsed(lines: Sequence[bytes]) -> list[Event | None]:
    """Each line as an event; None if it is torn, foreign, or lacks a field of its kind.

    Parsed at once they share the names of their fields: half the memory, and half the time.
    """
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):  # one of them is damaged
        values = [_value(line) for line in lines]
    return [_event(value, line) for value, line in zip(values, lines)]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _event(event: Any, line: bytes) -> Event | None:
    """The event that was parsed from a line, if it is one."""
    if b'"NaN"' in line or b'Infinity"' in line:
        event = _restored(event)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if (
        type(event.get("step")) is not int
        or not 0 <= event["step"] < 2**62
        or type(event.get("seconds")) not in (int, float)
    ):
        return None
    if any([_is_no_count(event[name]) for name in _COUNTS if name in event]):
        return None
    return event if event.keys() >= _FIELDS.get(event["event"], _NO_FIELDS) else None


def _is_no_count(value: object) -> bool:
    """Whether this is neither a name nor a number that an array can hold."""
    return isinstance(value, list | dict) or (isinstance(value, int | float) and 2**62 <= abs(value) < math.inf)


def _line(record: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, default=_text_of_path, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_strict(record), allow_nan=False, default=_text_of_path, separators=(",", ":"))
    return text.encode() + b"\n"


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # json's own spelling of what JSON lacks, as a string
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


def _text_of_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"An event field holds a {type(value).__name__}; events hold numbers, text, lists and dicts.")


def being_written(path: Path) -> bool:
    """Whether a process has this event file open in an `EventLog`."""
    with open_regular(path) as file:
        return not lock(file, wait=False)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"
