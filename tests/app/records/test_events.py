"""The event log: events are read as they were written, also after damage, a full disk and a second session."""

from __future__ import annotations

import ast
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import read_events

from thinwire.app.records import events
from thinwire.app.records.events import EVENTS, EventLog, Tail, being_written, recent_events
from thinwire.errors import DataError

SOURCE = Path(events.__file__).parents[1]


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events" / "replica-0.jsonl") as log:
        log.emit("warning", 3, message='a "quoted"\nline')
        log.emit("checkpoint", 4, path=tmp_path / "x", nbytes=5, seconds_spent=0.25)
    first, second = read_events(log.path)
    assert (first["event"], first["step"], first["message"]) == ("warning", 3, 'a "quoted"\nline')
    assert second["path"] == str(tmp_path / "x")
    assert 0 <= first["seconds"] <= second["seconds"]


def test_non_finite_numbers_survive_strict_json(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log.jsonl") as log:
        summary = {"eval_loss": math.nan, "bounds": [-math.inf, math.inf, 1.5]}
        log.emit("end", 1, summary=summary)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(log.path.read_text(), parse_constant=refuse)
    read = read_events(log.path)[0]["summary"]
    assert math.isnan(read["eval_loss"]) and read["bounds"] == [-math.inf, math.inf, 1.5]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("lunch", {}, "No event is called"),
        ("skip", {}, "needs exactly"),
        ("skip", {"reason": "x", "colour": "y"}, "needs exactly"),
    ],
)
def test_events_outside_the_schema_are_refused(tmp_path: Path, kind: str, fields: dict[str, str], said: str) -> None:
    with EventLog(tmp_path / "log.jsonl") as log, pytest.raises(ValueError, match=said):
        log.emit(kind, 1, **fields)
    assert read_events(log.path) == []


def _emitted(source: str) -> Iterator[tuple[str, set[str] | None]]:
    """Yields kind and field names of each `.emit("kind", …)` and `._observe("kind", …)`; None for fields passed as `**fields`."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        kind = call.args[0]
        if call.func.attr in ("emit", "_observe") and isinstance(kind, ast.Constant) and isinstance(kind.value, str):
            names = [keyword.arg for keyword in call.keywords]
            yield kind.value, None if None in names else {str(name) for name in names} - {"step"}


def test_every_emit_call_follows_the_schema() -> None:
    assert list(_emitted("log.emit('stop', 3, reason='x')")) == [("stop", {"reason"})]
    for path in SOURCE.rglob("*.py"):
        if "membership" in path.parts:
            continue  # events for the observer of a membership are not events of a run
        for kind, names in _emitted(path.read_text()):
            assert kind in EVENTS, f"{path.name} emits {kind}"
            assert names is None or names == set(EVENTS[kind]), f"{path.name} emits {kind} with {names}"


def test_the_documented_schema_equals_the_schema() -> None:
    lines = [line.split() for line in (events.__doc__ or "").splitlines() if line.startswith("    ")]
    documented: dict[str, tuple[str, ...]] = {line[0]: tuple(line[1:]) for line in lines}
    assert documented == EVENTS


def test_a_torn_last_line_is_skipped_and_ended_by_the_next_session(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with EventLog(path) as log:
        log.emit("stop", 1, reason="first")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [event["reason"] for event in read_events(path)] == ["first"]
    with EventLog(path) as log:
        log.emit("stop", 2, reason="second")
    assert [event["reason"] for event in read_events(path)] == ["first", "second"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\x00",
        b"[]",
        b'{"event": "stop"}',
        b'{"event":"stop","seconds":"x","step":1,"reason":""}',
        b'{"event":"late","seconds":1,"step":1,"fragment":[0]}',
        b'{"event":"given","seconds":1,"step":1,"to":[],"nbytes":1e300}',
        b'{"event":"late","seconds":1,"step":1,"fragment":' + b"9" * 400 + b"}",
        b"[" * 100_000,
    ],
)
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line + b'\n{"event":"stop","seconds":1,"step":1,"reason":"good"}\n')
    assert [event["reason"] for event in read_events(path)] == ["good"]


def test_a_damaged_line_among_many_leaves_the_others(tmp_path: Path) -> None:
    # Several groups.
    good = [b'{"event":"stop","seconds":1,"step":%d,"reason":"so"}\n' % step for step in range(20_000)]
    for damage in (good[0].strip() + b"," + good[1], good[0][:20] + b"\n", b"]\n", b"[\n", b"\xff\n"):
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"".join([*good[:9_000], damage, *good[9_000:]]))
        tail = Tail(path)
        assert [event["step"] for event in tail.read()] == list(range(20_000)) and tail.damaged == 1, damage


def test_recent_events_are_the_last_ones(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with EventLog(path) as log:
        for step in range(7):
            log.emit("stop", step, reason="x" * step)
    every, size = read_events(path), path.stat().st_size
    for most in range(size + 2):
        recent = recent_events(path, most)
        assert recent == every[len(every) - len(recent) :]
        assert sum(len(line) for line in path.read_bytes().splitlines(True)[-len(recent) :]) <= most or not recent
    assert recent == every


def test_a_full_disk_does_not_stop_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    with EventLog(tmp_path / "replica-0.jsonl") as log:
        log._file = full.open("ab", buffering=0)
        for step in range(3):
            log.emit("stop", step, reason="x")
        assert log.lost == 3
    assert capfd.readouterr().err.count("events are lost") == 1
    log.emit("stop", 9, reason="after closing")
    assert log.lost == 4


def test_an_event_after_the_end_is_lost_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Such as that of a round which fails because its replica was revoked."""
    with EventLog(tmp_path / "replica-0.jsonl") as log:
        pass
    log.emit("stop", 9, reason="after closing")
    assert log.lost == 1 and not any(capfd.readouterr())


def test_a_write_cut_short_leaves_the_next_event_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "log.jsonl")

    class Filling:
        closed = False
        room = 20

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = data[: self.room], 0
            return int(real.write(taken))

    real = log._file
    monkeypatch.setattr(log, "_file", Filling())
    log.emit("stop", 1, reason="torn")
    monkeypatch.setattr(log, "_file", real)
    log.emit("stop", 2, reason="whole")
    log.close()
    assert log.lost == 1
    assert [event["reason"] for event in read_events(log.path)] == ["whole"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log.jsonl") as log:

        def write(index: int) -> None:
            for step in range(200):
                log.emit("warning", step, message=f"{index}" * 300)

        threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = read_events(log.path)
    assert len(read) == 800
    assert all(len(set(event["message"])) == 1 for event in read)


def test_tail_continues_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "later" / "log.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with EventLog(path) as log:
        log.emit("stop", 1, reason="a")
        assert [event["reason"] for event in tail.read()] == ["a"]
        assert tail.read() == []
        line = b'{"event":"stop","seconds":1,"step":2,"reason":"b"}'
        with path.open("ab") as file:
            file.write(line[:20])
            file.flush()
            assert tail.read() == []
            file.write(line[20:] + b"\ngarbage\n")
        assert [event["reason"] for event in tail.read()] == ["b"]
        assert tail.damaged == 1
    path.write_bytes(b'{"event":"stop","seconds":1,"step":1,"reason":"new"}\n')
    assert [event["reason"] for event in tail.read()] == ["new"]


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be opened"):
        EventLog(tmp_path / "file" / "log.jsonl")


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.jsonl"
    with EventLog(path) as log:
        assert being_written(path)
        with pytest.raises(DataError, match="a run is active in this folder"):
            EventLog(path)
        log.emit("warning", 1, message="still writing")
    assert not being_written(path)
    EventLog(path).close()
    assert [event["message"] for event in read_events(path)] == ["still writing"]


def test_what_a_file_holds_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    tail.pass_over()  # there is no file yet
    with EventLog(path) as log:
        log.emit("stop", 1, reason="before")
        tail.pass_over()
        assert tail.read() == []
        log.emit("stop", 2, reason="after")
    assert [event["reason"] for event in tail.read()] == ["after"]


def test_a_long_log_is_thinned_and_loses_no_sum_and_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_NBYTES", 60_000)
    monkeypatch.setattr(events, "_RECENT", 6_000)
    rest = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 8, "compute_seconds": 0.5, "progress": 0, "sent": 0}
    with EventLog(tmp_path / "replica-0.jsonl") as log:
        seen, tail = 0, Tail(log.path)
        for step in range(1, 5001):
            log.emit("step", step, begin=float(step), **rest)
            if step % 20 == 0:
                log.emit("warning", step, message="stays")
                seen += sum(event["event"] == "step" for event in tail.read())
            assert log.path.stat().st_size < 200_000
        assert being_written(log.path)
    read = read_events(log.path)
    steps = [event for event in read if event["event"] == "step"]
    assert seen == 5000  # each once, by a reader beside it
    assert len(steps) < 2500
    assert sum(event["tokens"] for event in steps) == 8 * 5000
    assert sum(event["compute_seconds"] for event in steps) == 0.5 * 5000
    assert sum(events.steps_in(event) for event in steps) == 5000
    assert sum(event["event"] == "warning" for event in read) == 250
    assert [path.name for path in tmp_path.iterdir()] == [log.path.name]
