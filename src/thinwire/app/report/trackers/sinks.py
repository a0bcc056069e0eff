"""Sinks for metrics, one for each tracker, with one file and one row of `SINKS` each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import ConfigurationError


class Sink(Protocol):
    """One tracker, of one run. Made with the run's folder, its settings, and what stood behind `=` in `--log`."""

    where: str  # where people find it

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        """Metrics of `replica` (replica-0) as they are after inner step `step`."""

    def rewind(self, replica: str, step: int) -> None:
        """`replica` resumes from `step`, and later steps are done again. Does nothing by default: the later of two values at a step counts."""
        return

    def start_over(self) -> None:
        """All metrics come again from the first on: remove those that are there. Does nothing by default: the later of two values counts."""
        return

    def flush(self) -> None:
        """Send written metrics; called about once a second. Does nothing by default, for sinks whose `write` sends them."""
        return

    def close(self) -> None:
        """Called when the run has ended."""


@dataclass(frozen=True)
class Row:
    """A tracker: the module and class of its sink, and the extra that brings the package it needs."""

    module: str
    sink: str
    extra: str = ""
    live: bool = False  # of use only during a run


SINKS = {
    "wandb": Row("thinwire.app.report.trackers.wandb", "Wandb", "wandb"),
    "mlflow": Row("thinwire.app.report.trackers.mlflow", "Mlflow", "mlflow"),
    "tensorboard": Row("thinwire.app.report.trackers.tensorboard", "TensorBoard", "tensorboard"),
    "prometheus": Row("thinwire.app.report.trackers.prometheus", "Prometheus", "prometheus", live=True),
    "jsonl": Row("thinwire.app.report.trackers.jsonl", "JsonLines"),
}


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
    row = SINKS[name]
    try:
        sink: Sink = getattr(importlib.import_module(row.module), row.sink)(folder, settings, given)
    except ConfigurationError:
        raise
    except ImportError as error:
        raise ConfigurationError(
            f"log={name}: its package is not installed ({error}); pip install 'thinwire[{row.extra}]', or leave {name} out."
        ) from error
    except Exception as error:  # whatever a tracker raises
        raise ConfigurationError(
            f"log={name}: it does not begin ({type(error).__name__}: {' '.join(str(error).split())}); mend that, or leave {name} out: RUN/events "
            f"holds the same numbers, and `thinwire report RUN --log {name}` sends them later."
        ) from error
    return sink
