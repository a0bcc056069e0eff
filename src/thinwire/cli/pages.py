"""The report page, as verbs write it: with what only rooms above the report know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.plan.figure import rates_of_runs
from thinwire.records.run_record import RunRecord
from thinwire.report.report import Section
from thinwire.report.report import write_report as write

_TEXT = (
    "Time in inner steps against the rate of the uplink, from each run's strategy, fragments and median inner step: where a faster link "
    "would help, and how slow it may become."
)


def write_report(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Like `report.report.write_report`, with the utilisation at other rates of the link."""
    return write(folders, out, _rates)


def _rates(records: Sequence[RunRecord]) -> Sequence[Section]:
    chart = rates_of_runs(records)
    return [] if chart is None else [Section("rates", "What another link would give", _TEXT, "predicted", chart)]
