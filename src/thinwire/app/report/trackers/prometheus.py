"""An endpoint for Prometheus to scrape during a run (`pip install 'thinwire[prometheus]'`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from thinwire.app.report.trackers.sinks import Sink
from thinwire.app.report.trackers.table import METRICS
from thinwire.errors import ConfigurationError

HOST, PORT = "127.0.0.1", 29540


class Prometheus(Sink):
    """`thinwire_NAME{run, replica}`, counters with `_total`; `thinwire_step` is the inner step. It listens at this machine alone,
    unless `--log prometheus=HOST:PORT` says otherwise."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        host, _, port = given.rpartition(":")
        if not (port or "0").isdigit():
            raise ConfigurationError(f"log=prometheus={given}: PORT or HOST:PORT is needed, such as prometheus=9100.")
        self._run = folder.resolve().name
        self._now: dict[str, dict[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(int(port or PORT), host or HOST, registry)
        self.where = f"http://{host or HOST}:{self._server.server_port}/metrics"

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        known = self._now.get(replica, {})
        self._now[replica] = {**known, "step": float(step), **values}  # a new one: it may be read meanwhile

    def collect(self) -> Iterator[Any]:
        """What a scrape gets; called on a thread of the server."""
        now = dict(self._now)
        rows = [("step", "gauge", "inner steps of the run that this replica has behind it")]
        for name, kind, about in [*rows, *((one.name, one.kind, one.about) for one in METRICS)]:
            made = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                f"thinwire_{name}", about, labels=["run", "replica"]
            )
            for replica, values in now.items():
                if name in values:
                    made.add_metric([self._run, replica], values[name])
            yield made

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
