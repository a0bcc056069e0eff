"""The times that a trace records, by hand; and records as facts, which may come from anybody."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from thinwire.errors import PacketError
from thinwire.exchange.record import MOST_FLOWS, RESOLUTION, Flow, Record, Trace, recorded


def test_a_trace_notes_sends_and_receives_of_each_peer():
    trace, soon = Trace(), 20.0 + RESOLUTION / 2
    for index, now in enumerate((10.0, 11.0, 12.0, 13.0)):
        trace.left(1, index, 5 + index, [0, 2] if index < 3 else [2], now)
    trace.not_taken(2)
    trace.not_taken(2)  # the second call does not reduce it
    trace.expect(0, {0: [7, 8, 9], 2: [4], 3: []}, 9.0)
    trace.came(0, 0, [2, 0], 20.0, {0: 22.0, 2: soon})
    trace.came(0, 1, [0], 23.0, {0: 22.5})  # it was there before
    trace.came(0, 2, [0, 2], 23.0, {2: 23.5})  # the time of peer 0 is missing
    trace.expect(1, {0: [5]}, 0.0)
    trace.came(1, 0, [0], 0.0, {0: RESOLUTION})  # just long enough for a wait
    trace.left(1, 0, 9, [3], 10.0)  # a hub, which has no name
    trace.lies_there(0, 0)
    trace.shorter(0, 0, 3)
    assert trace.record(4, 6, ["a", "b", "c"], 1, 0.25, False) == Record(
        "b", 4, 6, 0.25, False,
        (
            Flow("a", 1, 18, 3, 3, 10.0, {0: 10.0, 1: 11.0, 2: 12.0}),
            Flow("c", 1, 26, 4, 3, 10.0, {0: 10.0, 1: 11.0, 2: 12.0}),  # only messages 0, 1, 2, 4, 8 ... have times
        ),
        (
            Flow("a", 0, 21, 3, 3, 9.0, {0: 22.0, 1: 22.5}, frozenset({0})),
            Flow("c", 0, 4, 1, 2, 9.0, {0: soon, 2: 23.5}, frozenset({2})),
            Flow("a", 1, 5, 1, 1, 0.0, {0: RESOLUTION}, frozenset({0})),
        ),
    )  # fmt: skip


FLOW = Flow("oslo", 1, 26, 4, 3, 10.0, {0: 10.0, 2: 12.5}, frozenset({2}))
RECORD = Record(
    "rome", 4, 6, 0.25, False, (FLOW,), (FLOW, replace(FLOW, peer="bern", at={}, waited=frozenset())), scheduled=False
)


def test_a_record_is_read_from_its_facts_and_shifted_to_another_clock():
    facts = json.loads(json.dumps(RECORD.facts()))
    assert Record.of(facts) == RECORD and Record.of(facts).facts() == facts
    del facts["scheduled"]
    assert Record.of(facts | {"over": True}) == replace(RECORD, over=True, scheduled=True)
    assert (RECORD.key, RECORD.group) == ((4, 6), {"rome", "oslo", "bern"})
    later = RECORD.shifted(100.0)
    for was, now in zip((*RECORD.sent, *RECORD.received), (*later.sent, *later.received), strict=True):
        assert now == replace(was, begin=110.0, at={index: at + 100.0 for index, at in was.at.items()})


def flow(**changes):
    """The facts of a flow with these changes."""
    names = ("peer", "stage", "nbytes", "parts", "there", "begin", "at")
    return [changes.get(name, fact) for name, fact in zip(names, FLOW.facts())]


@pytest.mark.parametrize("wrong", ["6", None, 1.0, True, -2, 1 << 62])
@pytest.mark.parametrize("name", ["fragment", "round", "stage", "nbytes", "parts", "there", "index"])
def test_what_is_no_whole_number_is_refused(name, wrong):
    facts = RECORD.facts()
    right = facts | {name: -1} if name in facts else facts | {"sent": [flow(**{name: (1 << 62) - 1})]}
    if name == "index":
        right, changed = facts, {"sent": [flow(at=[[wrong, 1.0, 0]])]}
    else:
        changed = {name: wrong} if name in facts else {"sent": [flow(**{name: wrong})]}
    Record.of(right)
    with pytest.raises(PacketError, match="a record of a round cannot be read"):
        Record.of(facts | changed)


@pytest.mark.parametrize("wrong", ["6", None, True, math.nan, math.inf])
def test_what_is_no_finite_number_is_refused(wrong):
    facts = RECORD.facts()
    for changed in ({"own_seconds": wrong}, {"sent": [flow(begin=wrong)]}, {"received": [flow(at=[[0, wrong, 0]])]}):
        with pytest.raises(PacketError, match="a record of a round cannot be read"):
            Record.of(facts | changed)


def test_the_memory_of_a_record_that_is_read_is_bounded():
    facts, times = RECORD.facts(), [[index, 0.0, 0] for index in range(65)]
    assert len(Record.of(facts | {"name": "r" * 99, "sent": [flow(peer="p" * 99, at=times[:64])]}).sent[0].peer) == 64
    assert len(Record.of(facts | {"name": "r" * 99}).name) == 64
    Record.of(facts | {"sent": [flow()] * (MOST_FLOWS - 2)})
    lacking = {name: fact for name, fact in facts.items() if name != "sent"}
    for wrong in ({"sent": [flow()] * (MOST_FLOWS - 1)}, {"sent": [flow(at=times)]}, {"sent": [flow()[:-1]]}):
        with pytest.raises(PacketError):
            Record.of(facts | wrong)
    with pytest.raises(PacketError):
        Record.of(lacking)


def test_fewer_rounds_are_recorded_the_longer_a_run_is():
    assert all(map(recorded, range(1024)))
    for power in range(10, 20):
        numbers = [number for number in range(1 << power, 2 << power) if recorded(number)]
        assert len(numbers) == 512 and numbers[0] == 1 << power
