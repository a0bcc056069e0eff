"""Sends the metrics of a run to trackers, live or afterwards: `--log wandb,mlflow,tensorboard,prometheus,jsonl`.

A tracker is a `Sink` and a row of `SINKS`. Its package is imported when it is asked for.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from thinwire.app.records.events import Event, Tail, event_files
from thinwire.app.records.sessions import whole
from thinwire.app.report.metrics import METRICS, MetricValues
from thinwire.errors import ConfigurationError
from thinwire.files import contents

Say = Callable[[str], object]
PROMETHEUS_HOST, PROMETHEUS_PORT = "127.0.0.1", 29540
MOST_METRICS = 1000  # most metrics that a store of MLflow takes at once
LONGEST_SETTING = 500  # most characters of a setting there


class Sink(Protocol):
    """One tracker, of one run. Made with the run's folder, its settings, and what stood behind `=` in `--log`.

    What it does by default is for trackers in which the later of two values at a step counts, and whose `write` sends them.
    """

    where: str  # where people find it
    live: bool = False  # of use only during a run

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None: ...

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        """Metrics of `replica` (replica-0) as they are after inner step `step`."""

    def rewind(self, replica: str, step: int) -> None:
        """`replica` resumes from `step`, and later steps are done again."""
        return

    def start_over(self) -> None:
        """All metrics come again from the first on: remove those that are there."""
        return

    def flush(self) -> None:
        """Send written metrics; called about once a second."""
        return

    def close(self) -> None:
        """Called when the run has ended."""
        return


class JsonLines(Sink):
    """RUN/metrics.jsonl: `{"replica": "replica-0", "step": 7, "loss": 3.1, ...}`; values that are not finite are null."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        self._file = (folder / "metrics.jsonl").open("a")
        self.where = self._file.name

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"replica": replica, "step": step, **finite}) + "\n")

    def start_over(self) -> None:
        self._file.truncate(0)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Sink):
    """Scalars in RUN/tensorboard, a subfolder for each replica. Steps that a resume does again replace the ones before it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self.where = f"tensorboard --logdir {self._folder}"
        self._writers: dict[str, Any] = {}
        self._first: int | None = None  # TensorBoard drops what is there from this step on; None: nothing

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._writers.get(replica) or self._begin(replica, self._first)
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def start_over(self) -> None:
        self._first = 0

    def rewind(self, replica: str, step: int) -> None:
        before = self._writers.get(replica)
        if before:
            before.close()
        self._begin(replica, step + 1 if before or self._first is None else self._first)

    def _begin(self, replica: str, purge_step: int | None) -> Any:
        self._writers[replica] = self._make(str(self._folder / replica), purge_step=purge_step)
        return self._writers[replica]

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Wandb(Sink):
    """One run of Weights & Biases with `replica-0/loss` and so on over `inner_step`; a resumed run keeps its id. What wandb reads from its own
    surroundings (WANDB_MODE=offline, WANDB_PROJECT, WANDB_API_KEY) holds.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        import wandb

        self._run = wandb.init(
            project=given or None,
            name=folder.resolve().name,
            id=_remembered(folder / "wandb-run.txt", lambda: secrets.token_hex(4)),
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("inner_step")
        self._run.define_metric("*", step_metric="inner_step")
        self.where = self._run.url or f"wandb sync {self._run.settings.sync_dir}"

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"inner_step": step} | {f"{replica}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


class Mlflow(Sink):
    """One run of MLflow, where MLFLOW_TRACKING_URI says, with `replica-0/loss` and so on over the inner step, in the experiment `thinwire` or
    `--log mlflow=EXPERIMENT`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._to, self._metric, self._due = MlflowClient(), Metric, list[Any]()
        self.id = _remembered(folder / "mlflow-run.txt", lambda: self._begin(folder, settings, given or "thinwire"))
        self._to.update_run(self.id, status="RUNNING")
        self.where = f"run {self.id} in {self._to.tracking_uri}"

    def _begin(self, folder: Path, settings: Mapping[str, Any], experiment: str) -> str:
        from mlflow.entities import Param

        known = self._to.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._to.create_experiment(experiment)
        run = str(self._to.create_run(number, run_name=folder.resolve().name).info.run_id)
        texts = {name: str(value)[:LONGEST_SETTING] for name, value in settings.items() if value is not None}
        self._to.log_batch(run, params=[Param(name, text) for name, text in texts.items()])
        return run

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._due += [self._metric(f"{replica}/{name}", value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        while self._due:
            self._to.log_batch(self.id, metrics=self._due[:MOST_METRICS])
            del self._due[:MOST_METRICS]

    def close(self) -> None:
        self.flush()
        self._to.set_terminated(self.id)


class Prometheus(Sink):
    """An endpoint to scrape: `thinwire_NAME{run, replica}`, counters with `_total`; `thinwire_step` is the inner step. It listens at this machine
    alone, unless `--log prometheus=HOST:PORT` says otherwise.
    """

    live = True

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        from prometheus_client import CollectorRegistry, core, start_http_server

        host, _, port = given.rpartition(":")
        if not (port or "0").isdigit():
            raise ConfigurationError(f"log=prometheus={given}: PORT or HOST:PORT is needed, such as prometheus=9100.")
        self._families: dict[str, Any] = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        self._run, self._now = folder.resolve().name, dict[str, dict[str, float]]()
        registry, host = CollectorRegistry(), host or PROMETHEUS_HOST
        registry.register(self)
        self._server, self._thread = start_http_server(int(port or PROMETHEUS_PORT), host, registry)
        self.where = f"http://{host}:{self._server.server_port}/metrics"

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        known = self._now.get(replica, {})
        self._now[replica] = {**known, "step": float(step), **values}  # a new one: it may be read meanwhile

    def collect(self) -> Iterator[Any]:
        """What a scrape gets; called on a thread of the server."""
        now = dict(self._now)
        rows = [("step", "gauge", "inner steps of the run that this replica has behind it")]
        for name, kind, about in [*rows, *((metric.name, metric.kind, metric.about) for metric in METRICS)]:
            family = self._families[kind](f"thinwire_{name}", about, labels=["run", "replica"])
            for replica, values in now.items():
                if name in values:
                    family.add_metric([self._run, replica], values[name])
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# by name, which is also that of the extra with the package that it needs
SINKS: dict[str, type[Sink]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "jsonl": JsonLines,
}


def _remembered(path: Path, make: Callable[[], str]) -> str:
    """The name of a run at a tracker: the line in the file at `path`, so that a resumed run continues under it, or the one that `make` returns."""
    if path.exists():
        return contents(path).strip()
    name = make()
    path.write_text(name + "\n")
    return name


def parse_sinks(log: str | None) -> dict[str, str]:
    """The sinks that `--log` names, each with what stands behind its `=`. Raises `ConfigurationError`.

    >>> parse_sinks("jsonl,prometheus=9100")
    {'jsonl': '', 'prometheus': '9100'}
    """
    asked = dict(part.strip().partition("=")[::2] for part in (log or "").split(",") if part.strip())
    if log is not None and not asked:
        raise ConfigurationError(f"log={log!r}: some of {','.join(SINKS)} are needed.")
    if unknown := [name for name in asked if name not in SINKS]:
        raise ConfigurationError(f"log={log!r}: {', '.join(unknown)} not known; some of {','.join(SINKS)} are needed.")
    return asked


def open_sinks(asked: Mapping[str, str], folder: Path, settings: Mapping[str, Any]) -> dict[str, Sink]:
    """Open the sinks. Raises `ConfigurationError` for a missing package, and for a tracker that does not start."""
    made: dict[str, Sink] = {}
    try:
        for name, given in asked.items():
            made[name] = _opened(name, given, folder, settings)
    except BaseException:
        for sink in made.values():
            sink.close()
        raise
    return made


def _opened(name: str, given: str, folder: Path, settings: Mapping[str, Any]) -> Sink:
    try:
        return SINKS[name](folder, settings, given)
    except ConfigurationError:
        raise
    except ImportError as error:
        raise ConfigurationError(
            f"log={name}: its package is not installed ({error}); pip install 'thinwire[{name}]', or leave {name} out."
        ) from error
    except Exception as error:  # whatever a tracker raises
        raise ConfigurationError(
            f"log={name}: it does not begin ({_in_a_line(error)}); mend that, or leave {name} out: RUN/events "
            f"holds the same numbers, and `thinwire report RUN --log {name}` sends them later."
        ) from error


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Follower:
    """Reads new events in the files of `folder` and writes metrics to `sinks`. A sink that fails is left out, with one message."""

    def __init__(self, folder: Path, sinks: Mapping[str, Sink], say: Say) -> None:
        self._folder, self._sinks, self._say = folder, dict(sinks), say
        self._tails: dict[str, Tail] = {}
        self._values: dict[str, MetricValues] = {}

    def pass_over(self) -> None:
        """Count the events of earlier sessions without sending them, because these sessions have sent them."""
        for replica, event in self._events():
            self._values[replica].take(event)

    def start_over(self) -> None:
        """Send the events of all sessions, in place of what earlier commands have sent."""
        self._each(lambda sink: sink.start_over())

    def update(self) -> None:
        """Send new metrics. Raises nothing."""
        for replica, event in self._events():
            if event["event"] in ("resume", "back"):
                step = whole(event["from_step"]) if event["event"] == "resume" else event["step"]
                self._each(lambda sink: sink.rewind(replica, step))  # noqa: B023  # called at once
            if changed := self._values[replica].take(event):
                self._each(lambda sink: sink.write(replica, event["step"], changed))  # noqa: B023
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        self.update()
        self._each(lambda sink: sink.close())

    def _events(self) -> Iterator[tuple[str, Event]]:
        for path in event_files(self._folder):
            tail = self._tails.setdefault(path.stem, Tail(path))
            self._values.setdefault(path.stem, MetricValues())
            with suppress(OSError):  # the folder is gone, or full: the run says so
                for event in tail.events():
                    yield path.stem, event

    def _each(self, tell: Callable[[Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                tell(sink)
            except Exception as error:  # whatever a tracker raises: training continues
                del self._sinks[name]
                self._say(f"log: {name} failed and is left out: {_in_a_line(error)}")


@contextmanager
def following(log: str | None, folder: Path, settings: Mapping[str, Any], say: Say) -> Iterator[Follower | None]:
    """A context with a follower for the trackers in `log`, or None without trackers. Raises `ConfigurationError`."""
    asked = parse_sinks(log)
    if not asked:
        yield None
        return
    sinks = open_sinks(asked, folder, settings)
    for name, sink in sinks.items():
        say(f"log: {name}: {sink.where}")
    follower = Follower(folder, sinks, say)
    try:
        yield follower
    finally:
        follower.close()
