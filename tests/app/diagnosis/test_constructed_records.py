"""The diagnosis of slow and stopped replicas and links, on constructed records; malformed records and rules are refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.cli import main
from thinwire.app.diagnosis import Flow, Record, Rules, Seen, Watch, stuck
from thinwire.app.diagnosis.attribute import attribute
from thinwire.app.records.events import EventLog
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report import top
from thinwire.app.report.diagnosis import diagnose
from thinwire.errors import ConfigurationError, DataError


def round_of(
    number: int,
    names: str,
    seconds: dict[str, float] | None = None,
    own: dict[str, float] | None = None,
    zeros: dict[str, float] | None = None,
) -> list[Record]:
    """Returns a round in which all send at 0 and a message takes 0.1 s, or its entry of `seconds` ("ab": a to b). `zeros`: offsets of clocks."""
    zeros = zeros or {}

    def record(name: str) -> Record:
        zero, peers = zeros.get(name, 0.0) + 10.0 * number, [n for n in names if n != name]
        sent = tuple(Flow(p, 0, 9, 1, 1, zero, {0: zero}) for p in peers)
        received = tuple(
            Flow(p, 0, 9, 1, 1, zero, {0: zero + (seconds or {}).get(p + name, 0.1)}, frozenset({0})) for p in peers
        )
        return Record(name, 0, number, (own or {}).get(name, 0.1), True, sent, received)

    return [record(name) for name in names]


def watched(rounds: list[list[Record]]) -> list[str]:
    watch = Watch()
    return [f"{f.syndrome}: {f.culprit}" for f in [watch.add(records) for records in rounds][-1]]


@pytest.mark.parametrize(
    ("names", "bad", "found"),
    [
        ("abcd", ["ab"], ["communication slow: the link from replica a to replica b"]),
        ("abcd", ["ab", "ba"], ["communication slow: the link between replica a and replica b"]),
        (
            "abcd",
            ["ab", "cd"],
            [f"communication slow: the link from replica {a} to replica {b}" for a, b in ("ab", "cd")],
        ),
        ("abcd", ["ab", "ac", "ad"], ["communication slow: the sender side of replica a"]),
        ("abcd", ["ab", "ac"], ["communication slow: the sender side of replica a"]),
        ("abcd", ["ba", "ca", "da"], ["communication slow: the receiver side of replica a"]),
        ("abcd", ["ab", "ac", "ad", "ba", "ca", "da"], ["communication slow: replica a"]),
        ("abc", ["ab", "ac"], ["communication slow: the sender side of replica a"]),
        ("abc", ["ab"], ["communication slow: the link from replica a to replica b"]),
        # All links are equally slower, so none is blamed.
        ("abcd", [a + b for a in "abcd" for b in "abcd" if a != b], []),
        (
            "ab",
            ["ab"],
            [
                "communication slow: the way from replica a to replica b (two replicas cannot tell: replica a, replica b, or the link)"
            ],
        ),
    ],
)
def test_slow_links_are_attributed_to_a_link_a_side_or_a_replica(names, bad, found):
    rounds = [round_of(number, names) for number in range(6)]
    rounds += [round_of(number, names, dict.fromkeys(bad, 0.5)) for number in range(6, 14)]
    assert watched(rounds[:11]) == []  # five slow rounds may be chance
    assert watched(rounds) == found
    # the finding ends with the fault
    assert watched([*rounds, *(round_of(number, names) for number in range(14, 19))]) == []


def test_unscheduled_rounds_are_not_compared_with_scheduled_ones():
    """The last rounds of a run depart together and share the link, so they do not show its usual time."""
    rounds = [round_of(number, "ab") for number in range(6)]
    last = [round_of(number, "ab", {"ab": 2.0}) for number in range(6, 18)]
    assert watched(rounds + last) != []
    assert watched(rounds + [[replace(record, scheduled=False) for record in records] for records in last]) == []


def busy(seed: int) -> list[list[Record]]:
    """Returns a healthy run on a busy machine. Any message and any step may be delayed by several steps (heavy tails).
    About every dozen rounds, a replica is starved of CPU for up to three rounds.
    """
    chance = random.Random(seed)
    names, step, usual = "abcd"[: chance.choice((2, 2, 3, 4))], chance.uniform(0.01, 0.5), chance.uniform(0.001, 0.05)
    since, rounds = {name: chance.randrange(12) for name in names}, []  # rounds since each replica was starved

    def noise() -> float:
        return step * min(30.0, chance.paretovariate(1.5) - 1)

    for number in range(120):
        own = {}
        for name in names:
            since[name] = 0 if since[name] > 12 and chance.random() < 0.3 else since[name] + 1
            own[name] = step + noise() / 4 + (3 * step if since[name] < 3 else 0.0)
        way = {
            a + b: usual + noise() / 4 + (noise() / 2 if min(since[a], since[b]) < 3 else 0.0)
            for a in names
            for b in names
        }
        rounds.append(round_of(number, names, way, own))
    return rounds


def test_a_healthy_run_on_a_busy_machine_gives_no_finding():
    for seed in range(200):
        watch = Watch()
        found = [(number, str(f)) for number, records in enumerate(busy(seed)) for f in watch.add(records)]
        assert not found, f"seed {seed}: {found[0]}"


def test_a_finished_run_is_not_reported_as_hanging_now(tmp_path):
    rounds = [round_of(number, "012") for number in range(3)]
    failed = [short(record, "1") if record.name != "1" else record for record in round_of(3, "012")]
    said = "\n".join(diagnose(RunRecord.load(write(tmp_path, [*rounds, failed]))).lines())
    assert " now" not in said and "-" not in said.replace("non-", "")


def test_a_name_with_the_word_replica_is_not_prefixed_again():
    (found,) = stuck([Seen(f"replica-{n}", {(0, 1): 1.0} if n else {}, {}, {}, 90.0) for n in range(3)])
    assert found.culprit == "replica-0" and found.seconds == 89.0 and found.began == 1.0
    gone_on = [Seen(name, {(0, 1): 1.0, (0, 2): 3.0}, {(0, 2): 4.0}, {}, 90.0) for name in "ab"]
    assert stuck(gone_on) == []  # the round was dropped, and a later one completed


def test_a_replica_slow_in_two_of_three_rounds_is_found():
    rounds = [round_of(number, "abc") for number in range(6)]
    rounds += [round_of(n, "abc", own={"b": 0.6} if n % 3 else {}) for n in range(6, 27)]
    assert watched(rounds) == ["non-communication slow: replica b"]


def test_clocks_that_drift_and_jump_give_no_finding():
    rounds = [
        round_of(n, "abc", zeros={"a": 1e6 * 1.001**n, "b": -50.0 * n, "c": 1e5 if n > 7 else 0.0}) for n in range(14)
    ]
    assert watched(rounds) == []


def test_a_constant_delay_is_not_slow():
    assert watched([round_of(number, "abcd", {"ab": 0.75, "cd": 0.0004}) for number in range(12)]) == []


def test_links_of_a_slow_replica_are_not_blamed():
    """c computes four times as long, so messages to it wait, and its own messages reach all others late."""
    rounds = [round_of(number, "abcd") for number in range(5)]
    rounds += [round_of(number, "abcd", own={"c": 4.0}) for number in range(5, 13)]
    assert watched(rounds) == ["non-communication slow: replica c"]
    assert watched(rounds[:5] + [round_of(number, "ab", own={"b": 4.0}) for number in range(5, 13)]) == [
        "non-communication slow: replica b"
    ]


def short(record: Record, *peers: str) -> Record:
    received = tuple(Flow(f.peer, 0, 9, 1, 0 if f.peer in peers else 1, 0.0, {}) for f in record.received)
    return Record(record.name, 0, record.round, 1.0, False, record.sent, received)


def stopped(
    missing: dict[str, str], absent: str = "", dark: str = "", names: str = "abcd", over: str = "", now: float = 9.0
) -> list[str]:
    """Returns the findings if round 1 stops. `absent` replicas have not begun it; a replica with a `missing` entry failed
    because messages from these were missing; `dark` ones wrote nothing since; `over` ones have finished it."""
    seen = []
    for record in round_of(1, names):
        name = record.name
        began = {(0, 0): 0.0} | ({} if name in absent else {(0, 1): 1.0})
        done = {(0, 0): 0.5} | ({(0, 1): 1.5} if name in over else {})
        failed = {(0, 1): short(record, *missing[name])} if name in missing else {}
        seen.append(Seen(name, began, done, failed, now if name not in dark else 1.0))
    return [f"{f.syndrome}: {f.culprit}" for f in stuck(seen)]


def test_a_stopped_round_is_attributed_to_the_missing_replica_or_link():
    assert stopped({}, over="abcd") == stopped({}, now=1.2) == stuck([]) == []
    assert stopped({}, absent="c") == ["non-communication hang: replica c"]
    assert stopped({"a": "c", "b": "c", "d": "c"}, absent="c") == ["non-communication hang: replica c"]
    assert stopped({"a": "c", "b": "c", "d": "c"}, dark="c") == ["communication hang: replica c"]
    assert stopped({"a": "b", "b": "a"}, over="cd") == ["communication hang: the link between replica a and replica b"]
    assert stopped({"a": "b", "c": "b", "d": "b", "b": ""}) == ["communication hang: the sender side of replica b"]
    assert stopped({"b": "acd"}, over="acd") == ["communication hang: the receiver side of replica b"]
    assert stopped({"b": "a"}, over="a", names="ab")[0].startswith(
        "communication hang: the way from replica a to replica b (two"
    )


def test_a_side_is_blamed_if_all_its_links_but_one_are_slow():
    names = [str(number) for number in range(8)]
    row = [("0", other) for other in names[1:]]
    assert [cause.side.value for cause in attribute(row[:6], names)] == ["sender side"]
    assert {cause.side.value for cause in attribute(row[:5], names)} == {"link"}
    assert attribute(row[:5], names, perhaps=row[5:])[0].side.value == "sender side"
    assert attribute(row[:1], names, perhaps=row[1:2]) == []  # too early to tell a link from a side


@pytest.mark.parametrize(
    "rules", [{"ratio": 1.0}, {"ratio": math.nan}, {"rounds": 1}, {"score": 0.0}, {"known": 1}, {"seconds": -1.0}]
)
def test_impossible_rules_are_refused(rules):
    with pytest.raises(ConfigurationError, match="needed"):
        Rules(**rules)


def write(folder: Path, rounds: list[list[Record]], replicas: int = 3) -> Path:
    start: dict[str, Any] = dict.fromkeys(("wall_time", "parameters"), 0) | {
        "run": {},
        "strategy": "s",
        "fragments": [],
        "link": None,
    }
    for name in sorted({record.name for records in rounds for record in records}):
        with EventLog(folder / "events" / f"replica-{name}.jsonl") as log:
            log.emit("start", 0, **start, replica=int(name), replicas=replicas, carrier="threads", machine={})
            for records in rounds:
                record = next(record for record in records if record.name == name)
                log.emit("depart", 1, fragment=0, round=record.round, nbytes=9, seconds_spent=0.0)
                log.emit("wire", 1, **record.facts())
                log.emit("land", 1, fragment=0, round=record.round, begin=0.0, stall_seconds=0.0, seconds_spent=0.0)
    return folder


def test_the_report_command_diagnoses_a_run_from_its_files(tmp_path, capsys):
    rounds = [round_of(number, "012", {"01": 0.5, "02": 0.5} if number > 6 else {}) for number in range(15)]
    folder = write(tmp_path, rounds)
    assert main(["report", str(folder), "--diagnose", "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert facts["verdict"] == "communication slow: the sender side of replica 0" and facts["rounds"] == 15
    assert facts["findings"][0]["suspect"] == "0" and facts["findings"][0]["first"] == 7
    assert {(w["sender"], w["receiver"]) for w in facts["ways"] if w["seconds"] > 2 * w["usual"]} == {
        ("0", "1"),
        ("0", "2"),
    }
    assert "500 ms ×5.0" in said.err and "5.0 times as long" in said.err and "uplink" in said.err
    (folder / "events/replica-1.jsonl").rename(folder / "events/oslo.jsonl")  # as of a replica with --name
    assert diagnose(RunRecord.load(folder)).verdict == facts["verdict"]


def test_top_diagnoses_the_end_of_long_logs(tmp_path, monkeypatch):
    late = [round_of(number, "012", {"01": 0.5, "02": 0.5} if number > 40 else {}) for number in range(50)]
    folder = write(tmp_path, late)
    monkeypatch.setattr(top, "RECENT_ROUNDS", 25)
    shown = top.Top(folder)
    shown.read(0.0)
    found = shown.facts(0.0)["findings"]
    assert [(one["suspect"], one["seconds"]) for one in found] == [("0", 0.5)]
    assert [one["suspect"] for one in diagnose(RunRecord.load(folder)).facts()["findings"]] == ["0"]


def test_the_diagnosis_states_what_it_cannot_tell(tmp_path, capsys):
    two = diagnose(RunRecord.load(write(tmp_path / "two", [round_of(n, "01") for n in range(8)], replicas=2)))
    assert two.verdict == "no slow replica or link was found" and "a third replica would" in two.doubts[-1]
    few = diagnose(RunRecord.load(write(tmp_path / "few", [round_of(0, "012")])))
    assert "after 4 rounds of one fragment; this run has 1 in all" in few.doubts[0]
    lone = diagnose(
        RunRecord.load(write(tmp_path / "lone", [[record] for record in (round_of(n, "012")[0] for n in range(9))]))
    )
    assert lone.verdict == "cannot tell" and "1 of 3 replicas left an event log" in lone.doubts[0]
    for log in write(tmp_path / "own loop", [round_of(0, "012")]).glob("events/*.jsonl"):  # as of scaffold or plexus
        log.write_text("".join(line for line in log.read_text().splitlines(True) if '"wire"' not in line))
    assert "its method has its own loop" in diagnose(RunRecord.load(tmp_path / "own loop")).doubts[0]
    with pytest.raises(DataError, match="Give the folder"):
        diagnose(RunRecord.load(tmp_path / "nothing"))
    assert main(["report", str(tmp_path), str(tmp_path), "--diagnose"]) == 2
    assert "one is needed" in capsys.readouterr().err


def test_damaged_records_are_counted_and_skipped(tmp_path):
    folder = write(tmp_path, [round_of(n, "012") for n in range(6)])
    path = folder / "events" / "replica-0.jsonl"
    path.write_text(path.read_text().replace('"round":5,"own_seconds":0.1', '"round":5,"own_seconds":"x"'))
    assert "1 records could not be read." in diagnose(RunRecord.load(folder)).doubts
