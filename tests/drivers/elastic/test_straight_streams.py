"""An elastic run whose packets go straight, with real processes: whatever breaks, all sums are right, and the next view goes straight again."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Fault
from stage_straight import StraightStage

pytestmark = pytest.mark.slow


def test_a_run_with_straight_streams_loses_nothing(tmp_path: Path) -> None:
    """A replica is killed and returns; a route to one is lost in silence and comes back; the hub is killed and returns; one that does not
    listen joins late.
    """
    stage = StraightStage(tmp_path)
    try:
        stage.begin()
        stage.until_straight("abc")
        stage.fault(Fault("kill -9", "a", 60, 2, 0))
        stage.until_straight("bc")
        stage.nobody_is_away()
        stage.until_straight("abc")
        stage.fault(Fault("straight route lost", "b", 60, 0, 0))
        stage.until_all_take_part()
        stage.until_straight("abc")
        stage.fault(Fault("server killed", "", 60, 0, 0))
        stage.until_straight("abc")
        stage.names = "abcd"
        stage.restart("d")
        stage.until_straight("abcd")
        stage.end()
        lost = stage.check_anchors()
        assert all(steps < 0.01 for name, steps in lost.items() if name != "a"), lost
    finally:
        stage.clear()
