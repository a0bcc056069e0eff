"""Bookkeeping beside rounds in the air: the duration of a step, and what the ranks of a site have seen."""

from __future__ import annotations

import threading

import thinwire as tw
from thinwire.runtime.pipeline import WEIGHTS, StepTimer, or_flags
from thinwire.testing.toy import adamw, batch, inner_step, toy


def test_seconds_per_step_are_measured_since_the_last_departure() -> None:
    timer = StepTimer()
    told = [timer.departs(step, seconds) for step, seconds in ((2, 5.0), (4, 6.0), (4, 7.0), (3, 9.0), (13, 14.0))]
    assert told == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_a_ranks_finding_counts_for_its_whole_site() -> None:
    flags = [(0, 4, 1), (0, 0, 2), (8, 0, 0)]
    assert tw.run_threads(3, lambda site: or_flags(site, flags[site.rank], WEIGHTS), timeout=600.0) == [(8, 4, 3)] * 3
    assert or_flags(None, (0, 4), WEIGHTS) == (0, 4)


def test_close_does_not_wait_for_a_round_in_flight() -> None:
    """The other replica sends its part only after this one has closed."""
    closed = threading.Event()

    def replica(group: tw.Group) -> list[int]:
        model = toy()
        attached = tw.Replica(tw.streaming_diloco(every=2, fragments=1, delay=1), model, adamw(model), group)
        for step in (1, 2) if group.rank == 0 else ():
            inner_step(model, attached.optimizer, *batch(0, 0, step))
        if group.rank == 1:
            assert closed.wait(600.0)
        flying = attached.in_flight
        attached.close()
        closed.set()
        return flying

    assert tw.run_threads(2, replica, timeout=600.0) == [[0], []]
