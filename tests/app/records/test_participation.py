"""Statistics of elastic runs, computed from logs whose answers are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from thinwire.app.cli.summary import exit_code_of, without_result
from thinwire.app.records.losses import useless
from thinwire.app.records.participation import (
    MembershipLog,
    Participation,
    RoundSeen,
    Steps,
    explained_steps,
    jumped_by_all,
    merge_rounds,
    numbers,
    session_begins,
)
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.sessions import Span
from thinwire.app.report.progress import Progress
from thinwire.app.report.report import write_report
from thinwire.app.report.timeline import timeline_chart

Write = Callable[[Path, list[dict[str, Any]]], None]
Start = Callable[..., dict[str, Any]]
ALL = ["replica-0", "replica-1", "replica-2"]


def seen(number: int, members: str = "abc", counted: str | None = None, committed: bool | None = True) -> RoundSeen:
    counted = members if counted is None else counted
    return RoundSeen(number, number % 2, float(number), tuple(members), tuple(counted), committed, "")


def told(
    number: int, seconds: float, members: list[str], committed: bool | None = True, reason: str = ""
) -> dict[str, Any]:
    counted = members if committed else []
    fields = {"round": number, "fragment": number % 4, "members": members, "counted": counted, "committed": committed}
    return {
        "event": "round",
        "seconds": seconds,
        "step": number,
        **fields,
        "foreseen": 100,
        "nbytes": 100,
        "seconds_spent": 0.5,
        "reason": reason,
    }


def step(number: int, begin: float) -> dict[str, Any]:
    fields = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 10, "begin": begin, "compute_seconds": 0.9}
    return {"event": "step", "seconds": begin + 0.9, "step": number, **fields}


def end(weights: str = "w") -> dict[str, Any]:
    return {"event": "end", "seconds": 30.0, "step": 30, "summary": {"steps": 25, "tokens": 250, "weights": weights}}


@pytest.fixture
def folder(tmp_path: Path, start: Start, write_events: Write) -> Path:
    """Three replicas for 30 s. replica-1 is dead from 10 to 20 s, and takes part in no round from 20 to 25 s."""
    for index, name in enumerate(ALL):
        head = start(index, 3, carrier="elastic", wall_time=1000.0)
        lines = [head]
        for second in range(30):
            if index == 1 and second == 10:
                lines += [start(1, 3, carrier="elastic", wall_time=1020.0)]
            if index == 1 and 10 <= second < 20:
                continue
            at = second if index != 1 or second < 10 else second - 20
            lines += [step(second + 1, float(at))]
            there = ALL if second < 10 or second >= 25 else [ALL[0], ALL[2]]
            if name in there:
                dropped = second == 9
                why = (
                    "LinkError: could not receive from replica 1 (packet, tag 7): it has left. See the end of its log."
                )
                lines += [told(second, at + 0.95, there, committed=not dropped, reason=why if dropped else "")]
        ended = end() | ({"seconds": 10.0} if index == 1 else {})
        write_events(tmp_path / f"run/events/{name}.jsonl", [*lines, ended])
    return tmp_path / "run"


def test_the_summary_has_living_taking_part_and_committed_rounds(folder: Path) -> None:
    record = RunRecord.load(folder)
    assert record.summary.living == pytest.approx((30 + 30 + 20) / 30, abs=0.05)
    assert record.summary.rounds_committed == 29
    # three replicas take part until 9 s, then two, then three as soon as replica-1 is counted again
    assert record.summary.taking_part == pytest.approx((9 * 3 + 15 * 2 + 5 * 3) / 29)
    assert record.summary.tokens == 800 and record.summary.steps == 30 and record.status == "finished"
    assert ("rounds committed", "29") in record.summary.figures()


def test_all_live_again_after_the_resume_of_a_whole_run(tmp_path: Path, start: Start, write_events: Write) -> None:
    """Each process needs 20 s from opening its log until its start, and an hour is between the sessions."""
    for index in range(2):
        lines = []
        for session in range(2):
            begun = start(index, 2, carrier="elastic", wall_time=1000.0 + 3600 * session) | {"seconds": 20.0}
            lines += [begun, *(step(10 * session + number, 20.0 + number) for number in range(1, 11))]
        write_events(tmp_path / f"run/events/replica-{index}.jsonl", lines)
    assert RunRecord.load(tmp_path / "run").summary.living == pytest.approx(2.0)


def test_steps_trained_jumped_and_counted_are_reported_separately(folder: Path, tmp_path: Path) -> None:
    """replica-1 trained 20 of 30 steps, because it was away for 10."""
    record = RunRecord.load(folder)
    assert [(steps.trained, steps.jumped) for steps in record.steps] == [(30, 0), (20, 10), (30, 0)]
    assert (record.summary.steps, record.summary.steps_trained, record.summary.steps_jumped) == (30, 80, 10)
    assert {("steps trained", "80"), ("steps jumped", "10"), ("steps counted", "0")} <= set(record.summary.figures())
    page = write_report([RunRecord.load(folder)], tmp_path / "page.html").read_text()
    assert (
        "Jumped steps were not trained by that replica" in page and "replica-1 20 trained, 10 jumped, 0 counted" in page
    )


@pytest.mark.parametrize(
    ("members", "first", "rounds", "jumped"),
    [
        ("here", 1, 2, True),  # all jumped from step 3 to the last one
        ("elsewhere", 1, 2, True),  # the others, too: of so many steps there would have been more rounds
        ("elsewhere", 1, 40, False),  # a slow member, or one that was away
        ("elsewhere", 90, 45, False),  # one that came late
    ],
)
def test_a_run_that_was_mostly_jumped_is_not_finished(
    tmp_path: Path, start: Start, write_events: Write, members: str, first: int, rounds: int, jumped: bool
) -> None:
    """100 steps, a round of 4 fragments at every second one."""
    names = ALL if members == "here" else ALL[:1]
    for index, name in enumerate(names):
        begun = start(index, 3, carrier="elastic", fragments=[{"name": f"{i}", "parameters": 9} for i in range(4)])
        begun["run"] = {"made_of": {"every": 8}}
        trained = [*range(first, first + 3), *range(96 if rounds < 40 else 60, 101)][: 8 if rounds < 40 else None]
        lines = [step(number, float(second)) for second, number in enumerate(dict.fromkeys(trained))]
        ended = end() | {"step": 100, "seconds": 60.0}
        write_events(tmp_path / f"run/events/{name}.jsonl", [begun, *lines, told(rounds, 59.0, ALL), ended])
    record = RunRecord.load(tmp_path / "run")
    assert record.status.startswith("jumped") == jumped and useless(record.status) == jumped
    assert bool(without_result([record])) == jumped and exit_code_of(record.status) == jumped


def test_no_step_is_jumped_that_any_replica_trained() -> None:
    one, two = Steps("a"), Steps("b")
    for steps, trained in ((one, [1, 2, 3, 11, 12]), (two, [1, 6, 7])):
        for at in trained:
            steps.take({"event": "step", "step": at})
    assert jumped_by_all([one, two]) == 2 + 3  # 4 and 5, 8 to 10
    assert jumped_by_all([one]) == 7 and jumped_by_all([]) == 0


def test_steps_are_counted_by_fragment_and_again_from_the_checkpoint_after_a_restart() -> None:
    steps = Steps("a")

    def hear(kind: str, at: int, **fields: Any) -> None:
        steps.take({"event": kind, "step": at, **fields})

    def round_(fragment: int, counted: str = "ab", committed: bool = True) -> None:
        hear("round", 0, fragment=fragment, counted=list(counted), committed=committed)

    hear("start", 0, fragments=[{}, {}])
    for at in (1, 2):
        hear("step", at)
    hear("depart", 3, fragment=0)  # after step 3, whose event is written after the departure
    hear("step", 3)
    round_(0)
    round_(1)  # counted, but without a delta of this replica
    assert (steps.trained, steps.jumped, steps.counted) == (3, 0, 2)  # 3 steps of one fragment, 0 of the other
    hear("checkpoint", 3)
    hear("step", 4)
    hear("depart", 4, fragment=1)
    round_(1, committed=False)
    hear("depart", 4, fragment=1)
    round_(1, counted="b")
    assert steps.counted == 2
    hear("start", 0, fragments=[{}, {}])  # step 4 is lost
    hear("back", 10, path="checkpoints/a/step-3")
    assert (steps.trained, steps.jumped) == (4, 6)
    hear("step", 11)
    hear("depart", 11, fragment=1)
    round_(1)
    hear("depart", 11, fragment=0)
    round_(0)
    hear("step", 20)  # trained one step, then jumped to the step of the others
    assert (steps.trained, steps.jumped, steps.counted) == (6, 14, 4)  # 4 steps of each fragment


def test_the_summary_of_a_fixed_group_has_no_membership_figures(
    tmp_path: Path, start: Start, write_events: Write
) -> None:
    write_events(tmp_path / "fixed/events/replica-0.jsonl", [start(0, 1), step(1, 0.0)])
    record = RunRecord.load(tmp_path / "fixed")
    assert record.steps == [] and record.summary.steps_trained is None and explained_steps(record.steps) == ""


def test_notes_name_the_replicas_that_joined_and_left(folder: Path) -> None:
    notes = [(note.kind, note.text) for note in RunRecord.load(folder).notes]
    assert ("left", "replica-1; 2 of 3 are there") in notes
    assert ("joined", "replica-1; 3 of 3 are there") in notes
    assert (
        "dropped",
        "round 9, fragment 1: LinkError: could not receive from replica-1 (packet, tag 7): it has left",
    ) in notes
    (away,) = [text for kind, text in notes if kind == "away"]
    assert away.startswith("its process ended; back after 10")


def test_the_time_between_two_incarnations_is_drawn(folder: Path, tmp_path: Path) -> None:
    bars = next(
        trace for trace in timeline_chart(RunRecord.load(folder)).views[0].data if trace["name"] == "not living"
    )
    assert (
        len(bars["x"]) == 1
        and bars["base"][0] == pytest.approx(10, abs=0.2)
        and bars["x"][0] == pytest.approx(10, abs=0.2)
    )
    page = write_report([RunRecord.load(folder)], tmp_path / "page.html").read_text()
    assert "taking part" in page and "rounds committed" in page and "2 of 3 are there" in page


def test_runs_with_and_without_the_three_numbers_share_a_page(
    folder: Path, tmp_path: Path, start: Start, write_events: Write
) -> None:
    write_events(tmp_path / "fixed/events/replica-0.jsonl", [start(0, 1), step(1, 0.0)])
    page = write_report(
        [RunRecord.load(tmp_path / "fixed"), RunRecord.load(folder)], tmp_path / "both.html"
    ).read_text()
    assert "taking part" in page and "2 runs side by side" in page


def test_a_remark_reports_different_final_weights(folder: Path, write_events: Write) -> None:
    assert "different" not in " ".join(RunRecord.load(folder).remarks)
    write_events(folder / "events/replica-2.jsonl", [end("other")])
    log = folder / "events/replica-2.jsonl"
    log.write_text("\n".join(line for line in log.read_text().splitlines() if '"weights": "w"' not in line) + "\n")
    assert "different outer weights" in " ".join(RunRecord.load(folder).remarks)


def test_the_display_shows_members_dropped_rounds_and_steps(folder: Path) -> None:
    console = Console(record=True, width=200, file=None, force_terminal=False)
    with Progress(folder, steps=30, replicas=3, console=console):
        pass
    said = console.export_text()
    assert "replica-0, replica-1, replica-2 joined; 3 of 3 are there" in said
    assert "replica-1 left; 2 of 3 are there" in said and "round 9 was dropped and changed nothing" in said
    assert "29 rounds committed" in said and "steps: 80 trained, 10 jumped, 0 counted" in said


def test_a_living_replica_that_is_not_counted_is_idle() -> None:
    participation = Participation(fragments=2)
    for number in range(8):
        participation.take(seen(number, "abc", counted="ab"))
    assert (
        participation.members == ("a", "b", "c")
        and participation.taking_part == ("a", "b")
        and participation.committed == 8
    )
    assert participation.idle == ("c",)
    assert participation.take(seen(3, "ab")) == ([], [])  # an earlier round: no news
    assert participation.take(seen(8, "bcd", committed=False)) == (["d"], ["a"]) and participation.committed == 8


def test_a_round_counts_once_and_a_known_outcome_replaces_an_unknown_one() -> None:
    rounds = [seen(0), seen(1, committed=None), seen(1, committed=True), seen(0), seen(2, committed=False)]
    assert [(one.number, one.committed) for one in merge_rounds(rounds)] == [(0, True), (1, True), (2, False)]
    found = numbers(merge_rounds(rounds), {"a": (Span(0.0, 10.0, 0),)}, fragments=1)
    assert (found.committed, found.dropped, found.taking_part) == (2, 1, 3.0)
    assert found.living == pytest.approx(3.0)  # b and c appear in rounds only, not in a span


def test_sessions_are_placed_by_wall_clock_without_long_pauses() -> None:
    first = [(100.0, 150.0), (120.0 + 86_400, 150.0 + 86_400)]
    second = [(110.0, 115.0), (130.0, 150.0), (125.0 + 86_400, 155.0 + 86_400)]
    assert session_begins([first, second]) == [[0.0, 50.0], [10.0, 30.0, 55.0]]


def test_the_log_reports_each_change_once() -> None:
    members = MembershipLog(fragments=1, asked=3)
    alone = {"event": "alone", "step": 5, "reason": "no lighthouse"}
    assert members.take("a", alone) == ["a trains on, in no round: no lighthouse"] and members.take("a", alone) == []
    assert members.take("b", alone | {"step": 0}) == ["b waits for the others: no lighthouse"]
    assert members.take("a", {"event": "round", **told(1, 1.0, ["a", "b"])}) == ["a, b joined; 2 of 3 are there"]
    assert members.line(["a"], ["a"]) == "2 living, 2 taking part, 1 rounds"
    why = "LinkError: replica 1 (oslo-2) has died, or its link is cut. Read the end of its log."
    dropped = members.take("a", {"event": "round", **told(2, 2.0, ["a", "oslo-2"], False, why)})
    assert dropped[-1] == "round 2 was dropped and changed nothing: LinkError: oslo-2 has died, or its link is cut"
