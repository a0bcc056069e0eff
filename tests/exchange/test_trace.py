"""The times that a trace records, by hand."""

from __future__ import annotations

from thinwire.exchange.record import RESOLUTION, Flow, Record, Trace


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
