"""The report page of the verbs, with sections from packages above `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.app.plan.figure import rates_of_runs
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.report import Section
from thinwire.app.report.report import write_report as write

COMPARISON = "comparison.json"  # the file that `thinwire compare` writes beside its runs
_TEXT = (
    "The share of the time in inner steps against the rate of the uplink, from each run's strategy, fragments and median inner step. It "
    "shows where a faster link would help, and how slow a link may be."
)


def write_report(records: Sequence[RunRecord], out: str | Path) -> Path:
    """Like `report.report.write_report`, with the utilization at other rates of the link."""
    return write(records, out, _rates)


def _rates(records: Sequence[RunRecord]) -> Sequence[Section]:
    chart = rates_of_runs(records)
    return [] if chart is None else [Section("rates", "What another link would give", _TEXT, "predicted", chart)]
