"""MLflow (`pip install 'thinwire[mlflow]'`): one run with the metrics of all replicas, where MLFLOW_TRACKING_URI says; without it, where mlflow
itself keeps runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from thinwire.app.report.trackers.remembered import remembered
from thinwire.app.report.trackers.sinks import Sink

MOST_METRICS = 1000  # most metrics that a store takes at once
LONGEST_SETTING = 500  # most characters of a setting


class Mlflow(Sink):
    """`replica-0/loss` and so on over the inner step, in the experiment `thinwire` or `--log mlflow=EXPERIMENT`."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        self._to, self._due = MlflowClient(), list[Metric]()
        self.id = remembered(folder / "mlflow-run.txt", lambda: self._begin(folder, settings, given or "thinwire"))
        self._to.update_run(self.id, status="RUNNING")
        self.where = f"run {self.id} in {self._to.tracking_uri}"

    def _begin(self, folder: Path, settings: Mapping[str, Any], experiment: str) -> str:
        found = self._to.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._to.create_experiment(experiment)
        run = self._to.create_run(number, run_name=folder.resolve().name)
        texts = {name: str(value)[:LONGEST_SETTING] for name, value in settings.items() if value is not None}
        self._to.log_batch(run.info.run_id, params=[Param(name, text) for name, text in texts.items()])
        return str(run.info.run_id)

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._due += [Metric(f"{replica}/{name}", value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        while self._due:
            self._to.log_batch(self.id, metrics=self._due[:MOST_METRICS])
            del self._due[:MOST_METRICS]

    def close(self) -> None:
        self.flush()
        self._to.set_terminated(self.id)
