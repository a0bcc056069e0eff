"""What stands beside rounds in the air: how long a step takes, and what the ranks of a site have seen."""

from __future__ import annotations

import thinwire as tw
from thinwire.runtime.pipeline import WEIGHTS, StepTimer, or_flags


def test_seconds_a_step_are_those_since_the_departure_before() -> None:
    timer = StepTimer()
    told = [timer.departs(step, seconds) for step, seconds in ((2, 5.0), (4, 6.0), (4, 7.0), (3, 9.0), (13, 14.0))]
    assert told == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_what_one_rank_has_seen_counts_for_all() -> None:
    flags = [(0, 4, 1), (0, 0, 2), (8, 0, 0)]
    assert tw.run_threads(3, lambda site: or_flags(site, flags[site.rank], WEIGHTS), timeout=600.0) == [(8, 4, 3)] * 3
    assert or_flags(None, (0, 4), WEIGHTS) == (0, 4)
