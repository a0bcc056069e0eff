"""The record of a run folder: its numbers, computed from logs whose answers are known."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.app.records.history import History
from thinwire.app.records.replica_record import smoothed
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.start import Start as Begun
from thinwire.app.records.units import text_of_loss, text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.errors import DataError

Write = Callable[[Path, list[dict[str, Any]]], None]
Start = Callable[..., dict[str, Any]]


def event(kind: str, seconds: float, step: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "seconds": seconds, "step": step, **fields}


def step(number: int, begin: float, spent: float, loss: float = 1.0) -> dict[str, Any]:
    return event(
        "step", begin + spent, number, loss=loss, lr=0.1, grad_norm=1.0, tokens=10, begin=begin, compute_seconds=spent
    )


def depart(number: int, round_: int, nbytes: int, fragment: int = 0) -> dict[str, Any]:
    return event("depart", 0.0, number, fragment=fragment, round=round_, nbytes=nbytes, seconds_spent=0.0)


def flight(number: int, round_: int, begin: float, end: float, queued: float, transfer: float) -> dict[str, Any]:
    nbytes = {0: 500, 1: 700}.get(round_, 0)
    fields = {"fragment": 0, "round": round_, "nbytes": nbytes, "begin": begin, "end": end}
    return event("flight", end, number, **fields, queued_seconds=queued, transfer_seconds=transfer)


def land(number: int, round_: int, begin: float, stall: float, spent: float) -> dict[str, Any]:
    fields = {"fragment": 0, "round": round_, "begin": begin, "stall_seconds": stall, "seconds_spent": spent}
    return event("land", begin + stall + spent, number, **fields)


def by_hand(start: Start) -> list[dict[str, Any]]:
    """Returns events of 4 s of loop: three inner steps of 1 s, a stall and an outer step of 0.5 s each; and an evaluation of 2 s."""
    link = {"bits_per_second": 8000, "delay_seconds": 0.1}
    return [
        start(0, 1, parameters=1000, fragments=[{"name": "all", "numel": 1000}], link=link),
        step(1, 1.0, 1.0, loss=3.0),
        depart(1, 0, 500),
        flight(1, 0, 2.0, 3.4, 0.2, 1.0),
        step(2, 2.0, 1.0, loss=2.0),
        land(2, 0, 3.0, 0.5, 0.5),
        event("eval", 6.0, 2, loss=2.5, tokens=20, seconds_spent=2.0, of="anchors"),
        step(3, 6.0, 1.0, loss=1.0),
        depart(3, 1, 700),
    ]


@pytest.fixture
def hand(tmp_path: Path, write_events: Write, start: Start) -> RunRecord:
    write_events(tmp_path / "events" / "replica-0.jsonl", by_hand(start))
    return RunRecord.load(tmp_path)


def test_the_numbers_of_a_handwritten_log_are_as_computed_by_hand(hand: RunRecord) -> None:
    replica, summary = hand.replicas[0], hand.summary
    assert replica.nbytes.tolist() == [500, 500, 1200]
    assert replica.seconds.tolist() == [2.0, 3.0, 7.0]
    assert (summary.wall_seconds, summary.stall_seconds, summary.compute_utilization) == (4.0, 0.5, 0.75)
    assert (summary.steps, summary.tokens, summary.parameters) == (3, 30, 1000)
    assert summary.wire_bytes_sent == 1200
    assert summary.bits_per_parameter_per_step == pytest.approx(8 * 1200 / 3000)
    assert summary.eval_loss == 2.5
    assert hand.evaluations.nbytes.tolist() == [500]
    assert hand.status == "still running or killed"
    assert any("killed" in remark for remark in hand.remarks)


def test_bytes_on_the_link_are_counted_when_they_were_sent(hand: RunRecord) -> None:
    sent = hand.replicas[0].sent_between(np.array([0.0, 2.0, 2.2, 2.7, 3.2, 9.0]))
    assert sent == pytest.approx([0, 0, 250, 250, 0])
    assert hand.bits_per_second == 8000


def test_a_resume_drops_the_steps_that_are_repeated(tmp_path: Path, write_events: Write, start: Start) -> None:
    head = start(0, 1, parameters=1000)
    killed = [
        head,
        step(1, 0.0, 1.0),
        depart(1, 0, 100),
        step(2, 1.0, 1.0),
        step(3, 2.0, 1.0, loss=9.0),
        depart(3, 1, 40),
    ]
    evaluation = event("eval", 3.5, 3, loss=9.0, tokens=30, seconds_spent=0.1, of="anchors")
    warning = event("warning", 3.6, 3, message="a slow link")
    resume = event("resume", 0.2, 2, from_step=2, path="checkpoints/x", skipped=[{"path": "y", "reason": "torn"}])
    resumed = [head, resume, step(3, 1.0, 2.0, loss=0.5), depart(3, 1, 40), step(4, 3.0, 1.0)]
    path = tmp_path / "events" / "replica-0.jsonl"
    write_events(path, [*killed, evaluation, warning, *resumed])
    record = RunRecord.load(tmp_path)
    replica = record.replicas[0]
    assert replica.step.tolist() == [1, 2, 3, 4]
    assert replica.loss.tolist() == [1.0, 1.0, 0.5, 1.0]
    assert replica.begin == pytest.approx([0.0, 1.0, 3.6 + 1.0, 3.6 + 3.0])
    assert replica.nbytes.tolist() == [100, 100, 140, 140]
    assert len(record.evaluations.step) == 0
    assert [note.kind for note in record.notes] == ["warning", "resume"]
    assert "y (torn)" in record.notes[1].text
    (lost,) = replica.lost
    assert (lost.steps, lost.nbytes) == (1, 40)
    # neither lost steps nor the restart count as time of the loop
    assert record.summary.wall_seconds == pytest.approx(2.0 + 3.0)
    assert record.summary.compute_utilization == pytest.approx(1.0)
    assert any("lost in restarts" in remark for remark in record.remarks)


def test_events_after_the_checkpoint_within_its_step_are_dropped(
    tmp_path: Path, write_events: Write, start: Start
) -> None:
    head = start(0, 1)
    checkpoint = event("checkpoint", 2.0, 2, path="x", nbytes=1, seconds_spent=0.0)
    resume = event("resume", 0.1, 2, from_step=2, path="x", skipped=[])
    first = [head, step(1, 0.0, 1.0), step(2, 1.0, 1.0), depart(2, 0, 30), checkpoint, land(2, 0, 2.0, 0.0, 0.1)]
    write_events(
        tmp_path / "events" / "replica-0.jsonl", [*first, depart(2, 1, 50), head, resume, land(2, 0, 1.0, 0.0, 0.1)]
    )
    replica = RunRecord.load(tmp_path).replicas[0]
    assert replica.step.tolist() == [1, 2]
    assert (replica.nbytes_sent, replica.landed[0]) == (30, 1)


def test_sessions_killed_before_they_resumed_change_nothing(tmp_path: Path, write_events: Write, start: Start) -> None:
    head = start(0, 1)
    resume = event("resume", 0.1, 2, from_step=2, path="x", skipped=[])
    events = [head, step(1, 0.0, 1.0), step(2, 1.0, 1.0), head, head, resume, step(3, 1.0, 1.0)]
    write_events(tmp_path / "events" / "replica-0.jsonl", events)
    assert RunRecord.load(tmp_path).replicas[0].step.tolist() == [1, 2, 3]


def test_a_run_restarted_from_step_0_replaces_the_earlier_one(
    tmp_path: Path, write_events: Write, start: Start
) -> None:
    events = [start(0, 1), step(1, 0.0, 1.0), step(2, 1.0, 1.0), start(0, 1), step(1, 0.0, 1.0, loss=7.0)]
    write_events(tmp_path / "events" / "replica-0.jsonl", events)
    assert RunRecord.load(tmp_path).replicas[0].loss.tolist() == [7.0]


def test_a_refused_round_does_not_count_as_landed(tmp_path: Path, write_events: Write, start: Start) -> None:
    refused = event("refused", 3.0, 2, fragment=0, round=0, by=[0], reason="NaN")
    events = [start(0, 1), step(1, 0.0, 1.0), depart(1, 0, 10), refused, land(2, 0, 3.0, 0.5, 0.0)]
    write_events(tmp_path / "events" / "replica-0.jsonl", events)
    replica = RunRecord.load(tmp_path).replicas[0]
    assert (replica.departed[0], replica.landed.get(0, 0), replica.refused[0]) == (1, 0, 1)
    assert replica.stall_seconds == 0.5


def test_clipped_deltas_of_all_replicas_are_counted(tmp_path: Path, write_events: Write, start: Start) -> None:
    clipped = event("clipped", 3.0, 2, fragment=0, round=0, norm=9.0, limit=3.0)
    for replica in range(2):
        events = [start(replica, 2), step(1, 0.0, 1.0), clipped]
        write_events(tmp_path / "events" / f"replica-{replica}.jsonl", events)
    summary = RunRecord.load(tmp_path).summary
    assert summary.deltas_clipped == 2 and ("deltas clipped", "2") in summary.figures()


def test_the_summary_of_a_finished_run_takes_precedence(tmp_path: Path, write_events: Write, start: Start) -> None:
    for replica, nbytes in enumerate((1000, 3000)):
        said = {"wire_bytes_sent": nbytes, "eval_loss": 1.25, "provenance": "measured", "strategy": "short", "steps": 3}
        events = [*by_hand(start), event("end", 7.0, 3, summary=said)]
        events[0] = events[0] | {"replica": replica, "replicas": 2}
        write_events(tmp_path / "events" / f"replica-{replica}.jsonl", events)
    (tmp_path / "summary.json").write_text(json.dumps({"wall_seconds": 3.5, "eval_loss": "no number"}))
    record = RunRecord.load(tmp_path)
    assert record.status == "finished"
    assert record.summary.wire_bytes_sent == 2000  # the mean of the replicas
    assert (record.summary.eval_loss, record.summary.provenance, record.summary.wall_seconds) == (1.25, "measured", 3.5)
    assert record.summary.strategy.startswith("streaming_diloco(")


def test_the_training_loop_of_a_run_is_that_of_its_slowest_replica(
    tmp_path: Path, write_events: Write, start: Start
) -> None:
    """As it is before the replicas have told their own at the end."""
    for replica, seconds in enumerate((3.0, 9.0)):
        events = [start(replica, 2), step(1, 0.0, seconds), event("end", 9.0, 1, summary={"wall_seconds": seconds})]
        write_events(tmp_path / "events" / f"replica-{replica}.jsonl", events)
    assert RunRecord.load(tmp_path).summary.wall_seconds == 9.0


def test_a_run_that_ended_without_a_lost_replica_is_finished(tmp_path: Path, write_events: Write, start: Start) -> None:
    """With methods whose replicas do not wait for each other. The numbers are those of the replicas that ended."""
    for replica, steps in ((0, 6), (1, 2), (2, 6)):
        events = [start(replica, 3), *(step(number, number - 1.0, 1.0) for number in range(1, steps + 1))]
        said = {"wall_seconds": 9.0, "steps": 6, "wire_bytes_sent": 100 * (replica + 1), "eval_loss": 1.5}
        end = [event("end", 9.0, 6, summary=said)] if steps == 6 else []
        write_events(tmp_path / "events" / f"replica-{replica}.jsonl", [*events, *end])
    record = RunRecord.load(tmp_path)
    assert record.status == "finished" and record.summary.steps == 6
    assert (record.summary.wall_seconds, record.summary.wire_bytes_sent, record.summary.eval_loss) == (9.0, 200, 1.5)
    assert (
        "There is no end event of replica 1: lost, or still active. The numbers are those of the others."
        in record.remarks
    )


def test_numbers_in_virtual_time_are_simulated(start: Start) -> None:
    begun = start(0, 1)
    assert Begun.of(begun).provenance == "emulated"
    assert Begun.of(begun | {"link": None}).provenance == "measured"
    assert Begun.of(begun | {"carrier": "virtual time"}).provenance == "simulated"
    assert Begun.of(begun | {"link": None, "run": {"slow": [1.0, 2.0]}}).provenance == "emulated"


def test_shards_count_as_one_replica(tmp_path: Path, write_events: Write, start: Start) -> None:
    for shard in range(2):
        write_events(tmp_path / "events" / f"replica-0.shard-{shard}.jsonl", by_hand(start))
    record = RunRecord.load(tmp_path)
    assert (record.summary.replicas, record.summary.wire_bytes_sent) == (1, 2400)
    assert [replica.name for replica in record.replicas] == ["replica 0, shard 0", "replica 0, shard 1"]


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run"):
        RunRecord.load(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        RunRecord.load(tmp_path / "nowhere")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "replica-0.jsonl").touch()
    with pytest.raises(DataError, match="no event yet"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("content", [b"torn", b"\x00\xff\n" * 1000, b'{"event": "stop"}\n'])
def test_a_damaged_log_is_named(
    tmp_path: Path, write_events: Write, start: Start, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    damaged, whole = (tmp_path / "events" / f"replica-{number}.jsonl" for number in (1, 0))
    damaged.parent.mkdir()
    damaged.write_bytes(content)
    assert main(["report", str(tmp_path)]) == 1
    assert f"{damaged} is damaged: it holds no start of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--diagnose"]) == 1 and str(damaged) in capsys.readouterr().err
    write_events(whole, by_hand(start))
    assert main(["report", str(tmp_path)]) == 0
    assert f"{damaged} is damaged: it holds no start of a run." in RunRecord.load(tmp_path).remarks


@pytest.mark.parametrize("field", ["begin", "compute_seconds"])
def test_a_step_without_its_times_is_a_damaged_line(
    tmp_path: Path, write_events: Write, start: Start, field: str
) -> None:
    """It ended the report with a traceback."""
    events = [start(0, 1), step(1, 0.0, 1.0), step(2, 1.0, 1.0) | {field: "NaN"}, step(3, 2.0, 1.0)]
    write_events(tmp_path / "events" / "replica-0.jsonl", events)
    assert main(["report", str(tmp_path)]) == 0
    assert "1 damaged line was passed over" in (tmp_path / "report.html").read_text()
    assert RunRecord.load(tmp_path).replicas[0].step.tolist() == [1, 3]


def test_damaged_fields_do_not_hide_the_rest(tmp_path: Path, write_events: Write, start: Start) -> None:
    odd = step(2, 1.0, 1.0) | {"loss": "three", "tokens": None}
    write_events(tmp_path / "events" / "replica-0.jsonl", [start(0, 3, link="?", fragments=7), step(1, 0.0, 1.0), odd])
    with (tmp_path / "events" / "replica-0.jsonl").open("a") as file:
        file.write("garbage\n")
    (tmp_path / "run.toml").write_text("= broken")
    record = RunRecord.load(tmp_path)
    assert math.isnan(record.replicas[0].loss[1]) and math.isnan(record.replicas[0].smooth[1])
    assert [word in " ".join(record.remarks) for word in ("run.toml", "1 of 3 replicas", "1 damaged line was")] == [
        True
    ] * 3


def test_smoothing_has_no_start_up_bias() -> None:
    assert smoothed([math.nan, 2.0, 2.0])[1:].tolist() == pytest.approx([2.0, 2.0])
    assert smoothed([0.0, 1.0], keep=0.5).tolist() == pytest.approx([0.0, 2 / 3])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_of_nbytes(0), "0 B"),
        (text_of_nbytes(999), "999 B"),
        (text_of_nbytes(999_990), "1.00 MB"),
        (text_of_nbytes(1_250_000), "1.25 MB"),
        (text_of_nbytes(None), "–"),
        (text_of_rate(20e6), "20.0 Mbit/s"),
        (text_of_loss(1.25), "1.2500"),
        (text_of_loss(0.0), "0.0000"),
        (text_of_loss(2.4071e-6), "2.407e-06"),
        (text_of_loss(math.inf), "inf"),
        (text_of_seconds(0.0123), "12.3 ms"),
        (text_of_seconds(5.7e-6), "5.7 µs"),
        (text_of_seconds(0.9999), "1.0 s"),
        (text_of_seconds(59.97), "1 min 0 s"),
        (text_of_seconds(90061), "1 d 1 h"),
        (text_of_seconds(math.nan), "–"),
        (text_of_seconds(8.64e24), "1e+20 d"),
        (text_of_nbytes(1e300), "1e+285 PB"),
    ],
)
def test_quantities_are_printed_with_units(text: str, expected: str) -> None:
    assert text == expected


def test_a_long_run_takes_less_memory_than_its_log(tmp_path: Path, write_events: Write, start: Start) -> None:
    """A run of weeks has millions of events. As dicts they took more than three times the bytes of the log."""
    path = tmp_path / "events" / "replica-0.jsonl"
    steps = (event for number in range(1, 20_001) for event in (step(number, number, 0.9), depart(number, number, 10)))
    write_events(path, [start(0, 1), *steps])
    tracemalloc.start()
    try:
        history = History.read(path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.columns["step"]) == len(history.columns["depart"]) == 20_000
    assert held < path.stat().st_size
