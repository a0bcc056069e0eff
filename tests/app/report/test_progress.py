"""The live display of a run, and the tables after it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from thinwire.app.records.events import EventLog
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.start import CARRIER
from thinwire.app.records.start import Start as Begun
from thinwire.app.records.units import NOTHING
from thinwire.app.report import progress as module
from thinwire.app.report.progress import Progress, compare_table, final_table
from thinwire.app.report.replica_progress import ReplicaProgress
from thinwire.app.report.report import write_report
from thinwire.app.report.top import Top

Write = Callable[[Path, list[dict[str, Any]]], None]
Start = Callable[..., dict[str, Any]]
Make = Callable[..., Path]


def console(terminal: bool = False, width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width, color_system="standard" if terminal else None), out


def steps(first: int, last: int, spent: float = 0.4) -> list[dict[str, Any]]:
    fields = {"event": "step", "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 100, "compute_seconds": spent}
    return [fields | {"step": n, "seconds": n + 0.5, "begin": n * 0.5} for n in range(first, last + 1)]


def of_kind(event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "seconds": 9.0, "step": 5} | fields


def depart(seconds: float, fragment: int, nbytes: int) -> dict[str, Any]:
    return of_kind("depart", seconds=seconds, fragment=fragment, round=0, nbytes=nbytes, seconds_spent=0)


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [tmp_path / "events" / f"replica-{index}.jsonl" for index in range(2)]


PAUSE = of_kind("eval", loss=1.5, tokens=1, seconds_spent=10.0, of="anchors")
RESUME = of_kind("resume", from_step=50, path="x", skipped=[])


def begun(**changes: Any) -> dict[str, Any]:
    return {"event": "start"} | changes


@pytest.mark.parametrize(
    ("last", "events", "expected"),
    [
        # 500 tokens and 2.0 s of compute in 2.4 s; with the evaluation 12.4 s
        (
            100,
            [*steps(1, 2), PAUSE, *(e | {"begin": e["begin"] + 10} for e in steps(3, 5))],
            "208 tokens/s · compute 83.3 %",
        ),
        (100, [begun(replicas=3), *steps(1, 5)], "208 tokens/s here · compute"),  # `thinwire join` sees its own replica
        (90, steps(1, 92), "step 90/90 · "),  # replicas with different speeds may take more of them together
        (100, [*steps(1, 90), begun(), RESUME, *steps(51, 52)], "resume: from step 50\nstep 52/100"),
    ],
    ids=["an evaluation is no training", "one of several", "no more steps than the run's", "a new session"],
)
def test_the_line_tells_of_the_last_session(
    last: int,
    events: list[dict[str, Any]],
    expected: str,
    tmp_path: Path,
    logs: list[Path],
    write_events: Write,
    start: Start,
) -> None:
    shown, out = console()
    write_events(logs[0], [start(0, 1), *(start(0, 1) | e if e["event"] == "start" else e for e in events)])
    with Progress(tmp_path, steps=last, replicas=1, console=shown):
        pass
    assert expected in out.getvalue()


@pytest.mark.parametrize(
    ("departures", "rate", "use"),
    [
        # Occupies the link for 20 s, of which 1.4 s have passed when the steps end.
        ([(1.0, 10_000_000)], 4e6, "73.7 %"),
        ([(0.0, 10_000_000), (1.0, 10_000_000)], 4e6, "100.0 %"),
        ([(0.5, 100_000), (0.5, 100_000)], 4e6, "21.1 %"),  # 0.2 s each, one after the other
        ([(0.5, 100_000)], 0, "–"),
        ([(0.5, 100_000)], "NaN", "–"),
    ],
)
def test_the_link_is_used_only_by_bytes_that_have_left(
    departures: list[tuple[float, int]], rate: object, use: str, start: Start
) -> None:
    """A packet departs at once and leaves slowly."""
    begin = start(0, 1, link={"bits_per_second": math.nan if rate == "NaN" else rate, "delay_seconds": 0.5})
    shown = ReplicaProgress.of(Begun.of(begin))
    events = [depart(seconds, index, nbytes) for index, (seconds, nbytes) in enumerate(departures)]
    for event in [*events, *steps(1, 4)]:
        shown.take(event)
    assert shown.cells()["link"] == use


def test_lines_come_after_ten_seconds_and_name_the_phase_before_the_first_step(
    tmp_path: Path, logs: list[Path], write_events: Write, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    shown, out = console()
    progress = Progress(tmp_path, steps=1000, replicas=2, console=shown)
    now = 112.0
    progress.update()
    for index, log in enumerate(logs):
        write_events(log, [start(index, 2)])
    now = 125.0
    progress.update()
    progress.update()
    for log in logs:
        write_events(log, steps(1, 2))
    now = 126.0
    progress.update()
    assert out.getvalue().splitlines() == ["starting · 12.0 s", "compiling, meeting the others · 25.0 s"]
    now = 136.0
    progress.update()
    assert out.getvalue().splitlines()[2].startswith("step 2/1000")


def test_the_line_has_the_speed_of_the_replicas_that_train(
    tmp_path: Path, logs: list[Path], write_events: Write, start: Start
) -> None:
    """One has no step yet: the others' speed was shown as unknown. One has ended: its speed counted on."""
    shown, out = console()
    with Progress(tmp_path, steps=100, replicas=2, console=shown) as progress:
        write_events(logs[0], [start(0, 2) | {"carrier": CARRIER}, *steps(1, 10)])
        write_events(logs[1], [start(1, 2) | {"carrier": CARRIER}])
        progress.update(last=True)
        write_events(logs[0], steps(11, 20))
        write_events(logs[1], [*steps(1, 10), of_kind("stop", reason="asked to stop")])
        progress.update(last=True)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split(" · ")[2] for line in lines] == ["204 tokens/s", "202 tokens/s"]


@pytest.mark.parametrize(
    ("run", "unit"), [({"unit": "batches"}, "batches"), ({}, "tokens"), ({"unit": "<b>"}, "tokens")]
)
def test_top_says_what_a_job_counts_and_dates_events_from_the_opening_of_their_log(
    tmp_path: Path, logs: list[Path], write_events: Write, start: Start, run: dict[str, str], unit: str
) -> None:
    """The start is written some seconds after the log was opened, and `seconds` count from the opening."""
    saved = of_kind("checkpoint", step=2, path="p", nbytes=1, seconds_spent=0.1)
    with EventLog(logs[0]):  # so it is alive
        write_events(logs[0], [start(0, 1, run=run) | {"seconds": 8.0, "wall_time": 1008.0}, *steps(1, 2), saved])
        shown, out = console(width=200)
        top = Top(tmp_path)
        top.read(1010.0)
        shown.print(top.picture(1010.0))
    assert "step 2, 1.0 s ago" in out.getvalue() and out.getvalue().count(f"{unit}/s ") == 2


def test_progress_lines_are_printed_without_a_terminal(tmp_path: Path, write_events: Write, start: Start) -> None:
    shown, out = console()
    log = tmp_path / "events" / "replica-0.jsonl"
    with Progress(tmp_path, steps=100, replicas=1, console=shown) as progress:
        progress.update()
        assert out.getvalue() == ""  # no file yet
        write_events(log, [start(0, 1), *steps(1, 4)])
        progress.update()
        assert out.getvalue() == ""  # less than a twentieth of the steps, and less than ten seconds
        write_events(log, steps(5, 5))
        progress.update()
        assert out.getvalue().startswith("step 5/100 · loss 2.0000 · ")
        assert "packets" not in out.getvalue()  # the log tells of none: there was none yet, or the method records none
        warning = of_kind("warning", message="slow\x1b[31m link\n[bold]x")
        skip = of_kind("skip", step=6, reason="the gradient's norm is nan")
        write_events(log, [warning, warning, skip, skip | {"step": 7}, PAUSE, *steps(6, 7)])
    lines = out.getvalue().splitlines()
    assert lines[1] == r"warning (replica 0, step 5): slow\x1b[31m link\n[bold]x"
    assert lines[2].startswith(
        "warning (replica 0, step 6): the step changed no weights, because the gradient's norm is nan. If"
    )
    assert "evaluation 1.5000 at step 5" in lines[3] and "skipped steps: 2" in lines[3] and len(lines) == 4
    assert all(letter.isprintable() or letter == "\n" for letter in out.getvalue())


def test_the_terminal_shows_one_row_for_each_replica(tmp_path: Path, write_events: Write, start: Start) -> None:
    shown, out = console(terminal=True)
    link = {"bits_per_second": 4e6, "delay_seconds": 0}
    skip = of_kind("skip", reason="NaN")
    first = [start(0, 2, link=link), *steps(1, 2), depart(1.0, 3, 250_000), *steps(3, 4), skip]
    write_events(tmp_path / "events" / "replica-0.jsonl", first)
    write_events(tmp_path / "events" / "replica-1.jsonl", [start(1, 2), *steps(1, 3, spent=0.25)])
    with Progress(tmp_path, steps=10, replicas=2, console=shown):
        pass
    screen = out.getvalue()
    row = next(line.split() for line in screen.splitlines() if line.strip().startswith("0 "))
    # columns: replica, step, loss, tokens/s, compute, stalled, in the air, sent, link, refused
    assert row[:5] == ["0", "5", "2.0000", "211", "84.2"]  # four steps in 1.9 s, with 1.6 s of compute
    assert row[row.index("3")] == "3" and "250 kB" in " ".join(row)
    assert "26.3 %" in " ".join(row) and row[-1].startswith("skipped")  # 2 Mbit in 1.9 s on 4 Mbit/s
    assert "step 3/10" in screen  # the slowest replica's step


def test_the_loss_of_a_replica_is_empty_until_a_step_tells_one(start: Start) -> None:
    """A restart keeps the step. NaN is a loss."""
    (step,) = steps(5, 5)
    shown = ReplicaProgress.of(Begun.of(start(0, 1)), step=4)
    shown.take(step | {"loss": None})
    assert shown.loss is None and shown.step == 5
    shown.take(step | {"loss": math.nan})
    assert shown.loss is not None and math.isnan(shown.loss)
    for loss in (2.0, math.nan, 1.0):
        shown.take(step | {"loss": loss})
    assert shown.loss == 1.0  # the mean begins again after NaN


def test_tables_carry_their_provenance(make_run: Make, tmp_path: Path) -> None:
    records = [RunRecord.load(make_run(tmp_path / name, steps=40)) for name in ("one", "two[bold]")]
    shown, out = console()
    shown.print(final_table(records[1]))
    assert out.getvalue().count("emulated") == len(records[1].summary.figures()) + 1  # one line is the time
    assert "two[bold]" in out.getvalue() and "finished" in out.getvalue()
    shown, out = console()
    shown.print(compare_table(records))
    assert out.getvalue().count("emulated") == 2 and "two[bold]" in out.getvalue()


def test_figures_that_one_run_lacks_stay_empty_under_their_head(make_run: Make, tmp_path: Path) -> None:
    """One run has packets of varying size, and clipped deltas."""
    plain, more = (RunRecord.load(make_run(tmp_path / name, steps=40)) for name in ("plain", "more"))
    varies = replace(more.summary, wire_bytes_foreseen=2 * more.summary.wire_bytes_sent, deltas_clipped=3)
    more = replace(more, summary=varies)
    for records in ([plain, more], [more, plain]):
        figures = [dict(record.summary.figures()) for record in records]
        (table,) = compare_table(records).renderables
        assert isinstance(table, Table)
        cells = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
        assert {"foreseen at most", "deltas clipped"} <= cells.keys()
        for what in {*figures[0], *figures[1]}:
            assert cells[what] == [each.get(what, NOTHING) for each in figures], what


def test_no_figure_is_cut_in_a_narrow_terminal(make_run: Make, tmp_path: Path) -> None:
    """Columns of `report` become rows, of as many tables as needed, and `top` leaves some out. It showed `1.8…` for 1.85 MB."""
    record = RunRecord.load(make_run(tmp_path / "one", steps=40))
    top = Top(record.folder)
    top.read(0.0)
    for width, runs in ((60, 2), (80, 2), (40, 4), (80, 20)):
        shown, out = console(width=width)
        shown.print(compare_table([record] * runs, shown.width))
        shown.print(top.picture(0.0, shown.width))
        assert "…" not in out.getvalue()
        values = [value for _, value in record.summary.figures()]
        assert all(out.getvalue().count(value) >= runs * values.count(value) for value in values)


def test_messages_of_an_earlier_session_are_not_repeated(tmp_path: Path, write_events: Write, start: Start) -> None:
    shown, out = console()
    log = tmp_path / "events" / "replica-0.jsonl"
    warning = {"event": "warning", "seconds": 9.0, "step": 90, "message": "old"}
    write_events(log, [start(0, 1), *steps(1, 90), warning])
    with Progress(tmp_path, steps=100, replicas=1, console=shown) as progress:
        progress.pass_over()
        progress.update()
        assert out.getvalue() == ""
        damaged = [{"path": "x", "reason": "step-00000095 is damaged"}]
        resume = {"event": "resume", "seconds": 0, "step": 90, "from_step": 90, "path": "y", "skipped": damaged}
        write_events(log, [start(0, 1), resume, *steps(91, 92)])
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["passed over: step-00000095 is damaged", "resume: from step 90"]
    assert lines[2].startswith("step 92/100") and "old" not in out.getvalue()


def test_a_round_that_all_refused_counts_once(tmp_path: Path, write_events: Write, start: Start) -> None:
    """Every replica writes it."""
    shown, out = console()
    for replica in range(2):
        refused = {"event": "refused", "seconds": 3.0, "step": 3, "fragment": 0, "round": 0, "by": [1], "reason": "NaN"}
        events = [start(replica, 2), *steps(1, 3), depart(2.0, 0, 100), refused]
        write_events(tmp_path / "events" / f"replica-{replica}.jsonl", events)
    with Progress(tmp_path, steps=3, replicas=2, console=shown):
        pass
    assert "refused rounds: 1" in out.getvalue()
    page = write_report([RunRecord.load(tmp_path)], tmp_path / "report.html").read_text()
    (row,) = [one for one in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL) if "<th>embedding</th>" in one]
    assert re.findall(r">(\d*)</td>", row)[2:5] == ["1", "0", "1"], "departed, landed, refused"
