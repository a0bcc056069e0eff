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
    eval        loss tokens seconds_spent of progress sent samples
    checkpoint  path nbytes seconds_spent
    resume      from_step path skipped
    skip        reason
    stop        reason
    warning     message
    end         summary

`wire` has the messages of a round (exchange/record.py). The kinds from `round` to `dropped` are those of an elastic run. A member
with `keeps` has ended and keeps the final state for `late`; `retry` has the reason that delays a round; after `back` it has resumed from
its own checkpoint, which contained `round` rounds. `left_out` is a member that spoils rounds, for `seconds`; `dropped` are steps or tokens
that this replica `trained`, and their `samples`, that no delta holds.

`read` and `data` have positions in the data (docs/data.md): `read` those that this replica has read since the last such event, as
[begin, end]; `data` those that a round has settled, as [name, begin, end].

`progress` of a step and of an evaluation is the number of inner steps of the run, which differs from this replica's own if replicas have
different speeds; `sent` of both are all bytes that it has sent so far, for any purpose, in earlier sessions too.
`samples` counts those of all replicas, as this one knows them (docs/data.md).

`weighed` has the weight that each neighbour got, by rank (a replica's own is 1); one that is missing has sent NaN or infinity.

`nbytes` of a departure are the bytes that this replica foresees to send for it, to all peers together; `nbytes` of a flight are those
that it has sent, fewer only if the codec's size varies. In a `round` they are `foreseen` and `nbytes`. `begin` and `end` are on the
clock of `seconds`. NaN and the infinities, which JSON lacks, are written as the strings "NaN", "Infinity" and
"-Infinity"; reading restores them. A process killed in the middle of a line leaves it torn; readers pass over it. A
run that resumes appends to the same file with a new `start` and a `resume`.

A file of more than `MOST_NBYTES` is thinned: of its older part, two `step` events that follow each other become one, with `merged` (the number
of inner steps), the sum of tokens and compute_seconds, and the mean loss. All other events stay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO

from thinwire.choices import listed
from thinwire.errors import DataError
from thinwire.files import held_by, lock, open_regular, open_to_append

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
    "eval": ("loss", "tokens", "seconds_spent", "of", "progress", "sent", "samples"),
    "checkpoint": ("path", "nbytes", "seconds_spent"),
    "resume": ("from_step", "path", "skipped"),
    "skip": ("reason",),
    "stop": ("reason",),
    "warning": ("message",),
    "end": ("summary",),
}

_LATER = {"progress", "sent", "samples"}  # fields that not every writer knows
MOST_NBYTES = (
    64 << 20
)  # of a log, after which its older steps are merged in pairs; twice what is left then, if that is more
_RECENT = 1 << 20  # bytes at the end of a log that stay as they are, so that readers find their place
MOST_FILES = 512  # event files of a run that are read
LONGEST_LINE = 4 << 20  # most bytes of a line
_GROUP = 1 << 18  # bytes of lines that are parsed at once
# fields that hold a number, or nothing, and the most that one of seconds may be: the year 33,658
_NUMBERS = (
    *(
        "wall_time",
        "seconds_spent",
        "compute_seconds",
        "stall_seconds",
        "queued_seconds",
        "transfer_seconds",
        "own_seconds",
    ),
    *("begin", "end", "at_most_seconds", "lr", "grad_norm", "norm", "limit"),
)
_LATEST = 1e12
_HUGE = re.compile(rb"[\[:,]-?[0-9]{20}")  # a whole number that no column holds
_COUNTS = ("fragment", "round", "nbytes", "tokens")
_NUMBERS_OF = {kind: tuple(name for name in fields if name in _NUMBERS) for kind, fields in EVENTS.items()}
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
            self._file = os.fdopen(open_to_append(self.path), "ab", buffering=0)
            self._torn = not _ends_with_newline(self.path)
            self._nbytes, self._most = os.fstat(self._file.fileno()).st_size, MOST_NBYTES
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
            holder = held_by(self.path)
            self._file.close()
            raise DataError(
                f"{self.path} is being written: a run is active in this folder{holder}. Wait until it has stopped, or choose "
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
                self._nbytes += written
                self._torn = True  # until the rest is there too
                data = data[written:]
            self._torn = False
            if self._nbytes > self._most:
                self._thin()
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                with contextlib.suppress(OSError, ValueError):  # stderr may be gone as well
                    print(f"thinwire: events are lost: {self.path}: {error}. Training continues.", file=sys.stderr)

    def _thin(self) -> None:
        """Put a thinned file in the place of the log. If it cannot be written, the log stays as it is, and is thinned later."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            thinned = os.fdopen(open_to_append(draft), "ab", buffering=0)
            try:
                lock(thinned, wait=False)  # first, so that the log is never without its writer
                with open_regular(self.path) as file:
                    for lines in _together(_merged_steps(file)):
                        _write(thinned, b"".join(lines))
                draft.replace(self.path)
            except BaseException:
                thinned.close()
                raise
            self._file.close()
            before, self._file, self._nbytes = self._nbytes, thinned, os.fstat(thinned.fileno()).st_size
            self._most = max(MOST_NBYTES, 2 * self._nbytes)
            if MOST_NBYTES < 2 * self._nbytes < 1.9 * before:  # pairs of pairs
                self._thin()
        except OSError:
            self._most *= 2
            draft.unlink(missing_ok=True)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _merged_steps(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a log, without its newest bytes merged; see the head of this file."""
    until = os.fstat(file.fileno()).st_size - _RECENT
    at, held = 0, b""
    for line in file:
        at += len(line)
        if at > until or not line.startswith(b'{"event":"step",') or len(line) > LONGEST_LINE:
            yield from filter(None, (held, line))
            held = b""
        elif not held:
            held = line
        else:
            both = _merged(_parsed([held])[0], _parsed([line])[0])
            yield from (held, line) if both is None else (both,)
            held = b""
    yield from filter(None, (held,))


def _merged(first: Event | None, second: Event | None) -> bytes | None:
    """One line for two step events; None if they do not follow each other."""
    if first is None or second is None or first["step"] != second["step"] - steps_in(second):
        return None
    sums = {name: (first[name], second[name]) for name in ("tokens", "compute_seconds", "loss")}
    if any(type(value) not in (int, float) for pair in sums.values() for value in pair):
        return None
    counts = steps_in(first), steps_in(second)
    loss = sum(count * value for count, value in zip(counts, sums.pop("loss"))) / sum(counts)
    added = {name: sum(pair) for name, pair in sums.items()}
    return _line({**second, "begin": first["begin"], **added, "loss": loss, "merged": sum(counts)})


def steps_in(event: Event) -> int:
    """The inner steps that a step event stands for."""
    merged = event.get("merged", 1)
    return merged if type(merged) is int and 0 < merged < 2**31 else 1


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
        self._last, self._behind = b"", 0  # the last line that was read, and its end in the file

    def read(self) -> list[Event]:
        """The events that were completed since the last call."""
        return list(self.events())

    def events(self) -> Iterator[Event]:
        """The same, one after the other: a file of weeks does not fit in memory."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as file:
            for lines in _together(self._lines(file)):
                yield from self._events(lines)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        size = file.seek(0, 2)
        file.seek(max(0, self._behind - len(self._last)))
        if (
            self._last and file.read(len(self._last)) != self._last
        ):  # perhaps it was thinned, and has that line elsewhere
            begin = max(0, size - 2 * _RECENT)
            file.seek(begin)
            place = file.read(2 * _RECENT).rfind(self._last)
            if place >= 0:
                self._offset, self._rest, self._overlong = begin + place + len(self._last), b"", False
        if size < self._offset:  # the file was replaced by a new one
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
                    self._last, self._behind = whole, self._offset
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


def event_files(folder: Path) -> list[Path]:
    """The event files of the run in `folder`, by name; the newest `MOST_FILES` if there are more."""
    paths = [path for path in folder.glob("events/*.jsonl") if path.is_file()]
    return sorted(sorted(paths, key=lambda path: path.stat().st_mtime)[-MOST_FILES:])


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
    if not -_LATEST < event["seconds"] < _LATEST or _HUGE.search(line):
        return None
    if any([_is_no_number(event.get(name)) for name in _NUMBERS_OF.get(event["event"], ())]):
        return None
    if any([_is_no_count(event[name]) for name in _COUNTS if name in event]):
        return None
    return event if event.keys() >= _FIELDS.get(event["event"], _NO_FIELDS) else None


def _is_no_count(value: object) -> bool:
    """Whether this is neither a name nor a number that an array can hold."""
    return isinstance(value, list | dict) or (isinstance(value, int | float) and 2**62 <= abs(value) < math.inf)


def _is_no_number(value: object) -> bool:
    """Whether this is neither nothing nor a number of seconds, or NaN or an infinity."""
    if type(value) not in (int, float):
        return value is not None
    return _LATEST <= abs(value) < math.inf  # type: ignore[arg-type]


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
