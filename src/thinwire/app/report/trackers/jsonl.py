"""RUN/metrics.jsonl: one line of JSON for each event that changes a metric. Needs no package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.app.report.trackers.sinks import Sink


class JsonLines(Sink):
    """`{"replica": "replica-0", "step": 7, "loss": 3.1, ...}`; values that are not finite are null."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        path = folder / "metrics.jsonl"
        self.where = str(path)
        self._file = path.open("a")

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"replica": replica, "step": step, **finite}) + "\n")

    def start_over(self) -> None:
        self._file.truncate(0)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
