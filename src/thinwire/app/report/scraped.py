"""One screen for all replicas of a run on another machine, from the endpoint that `--log prometheus` opens there."""

from __future__ import annotations

import importlib
import math
import re
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from rich.console import Group
from rich.text import Text

from thinwire.app.records.losses import for_json
from thinwire.app.records.printable import printable
from thinwire.app.records.units import (
    text_of_count,
    text_of_loss,
    text_of_nbytes,
    text_of_seconds,
    text_of_share,
)
from thinwire.app.report.progress import SILENT_SECONDS
from thinwire.app.report.terminal import screen
from thinwire.errors import ConfigurationError, DataError

LONGEST_PAGE = 16 << 20  # most bytes of a page
MISSED = 5  # reads without an answer in a row, after which the run has ended
RECENT = 30  # reads over which speeds are taken
TIMEOUT_SECONDS = 10.0
_COLUMNS = ("replica", "state", "step", "loss", "tokens/s", "compute", "stalled", "in the air", "sent", "evaluation")


@dataclass
class _Seen:
    """One replica: the last samples of its metrics, each with its time."""

    looks: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=RECENT))
    moved: float = math.nan  # when a metric was last seen to change

    def take(self, at: float, values: dict[str, float]) -> None:
        if not self.looks or self.looks[-1][1] != values:
            self.moved = at
        self.looks.append((at, values))

    def now(self, name: str) -> float:
        return self.looks[-1][1].get(name, math.nan)

    def rate(self, name: str) -> float:
        """The rate of a counter per second, over the kept samples."""
        (begin, first), (end, last) = self.looks[0], self.looks[-1]
        return (last.get(name, math.nan) - first.get(name, 0.0)) / (end - begin) if end > begin else math.nan


class ScrapedTop:
    """The run at `address`, HOST:PORT or http://HOST:PORT/metrics. Raises `ConfigurationError`, and `DataError` without an answer."""

    def __init__(self, address: str) -> None:
        if find_spec("prometheus_client") is None:
            raise ConfigurationError(
                f"top {address}: Prometheus' package is needed; pip install 'thinwire[prometheus]'."
            )
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:
            wrong = True
        if wrong:
            raise ConfigurationError(f"top {address}: a run folder, HOST:PORT or http://HOST:PORT/metrics is needed.")
        self.address, self._url = address, parts._replace(path=parts.path or "/metrics").geturl()
        self._run, self._seen, self._missed = "", dict[str, _Seen](), 0

    @property
    def over(self) -> bool:
        """Whether the endpoint no longer answers; it ends with its run."""
        return self._missed >= MISSED

    def read(self, now: float) -> None:
        """Read the metrics once. Raises `DataError` if the endpoint has never answered."""
        parser: Any = importlib.import_module("prometheus_client.parser")
        values: dict[str, dict[str, float]] = {}
        try:
            for family in parser.text_string_to_metric_families(self._page()):
                for sample in family.samples:
                    name = sample.name.removeprefix("thinwire_").removesuffix("_total")
                    if sample.name != name and "replica" in sample.labels and len(values) < 1024:
                        self._run = sample.labels.get("run", "")
                        values.setdefault(sample.labels["replica"], {})[name] = float(sample.value)
        except Exception as error:  # any error of HTTP, or of parsing a foreign page
            if self._seen:
                self._missed += 1
                return
            raise DataError(
                f"{self.address} cannot be read ({getattr(error, 'reason', error)}); a run that trains with --log prometheus is needed. "
                "Its endpoint ends with it."
            ) from None
        self._missed = 0
        for name, its in values.items():
            self._seen.setdefault(name, _Seen()).take(now, its)

    def _page(self) -> str:
        with urllib.request.urlopen(self._url, timeout=TIMEOUT_SECONDS) as answer:
            page: bytes = answer.read(LONGEST_PAGE + 1)
        if answer.status != 200 or len(page) > LONGEST_PAGE:
            raise ValueError(f"it answers {answer.status} with {len(page)} bytes")
        return page.decode()

    def facts(self, now: float) -> dict[str, Any]:
        """What the screen shows, for JSON."""
        return {
            "run": self._run, "address": self.address, "step": self._step,
            "replicas": [
                {"name": name, "state": self._state(one, now), "step": _whole(one.now("step")), "loss": for_json(one.now("loss")),
                 "tokens_per_second": for_json(one.rate("tokens")), "nbytes": _whole(one.now("sent_bytes"))}
                for name, one in sorted(self._seen.items())
            ],
        }  # fmt: skip

    def picture(self, now: float, width: int = 160) -> Group:
        """The screen at `now`, seconds since 1970."""
        rows = [
            (
                printable(name.removeprefix("replica-"), 40), self._state(one, now), str(_whole(one.now("step"))),
                text_of_loss(one.now("loss")), text_of_count(one.rate("tokens")), text_of_share(one.rate("compute_seconds")),
                text_of_seconds(one.now("stall_seconds")), text_of_seconds(one.now("flight_seconds")),
                text_of_nbytes(_whole(one.now("sent_bytes"))), text_of_loss(one.now("evaluation_loss")),
            )
            for name, one in sorted(self._seen.items())
        ]  # fmt: skip
        table = screen({name: [row[place] for row in rows] for place, name in enumerate(_COLUMNS)}, _COLUMNS[:2])
        head = printable(f"{self._run}, {self.address}: step {self._step}, {len(self._seen)} replicas", 400)
        about = f"Speeds are means over at most {RECENT} looks. Of a job of your own, tokens are samples or batches."
        return Group(Text(head), table, Text(about, style="dim"))

    @property
    def _step(self) -> int:
        return min((_whole(one.now("step")) for one in self._seen.values()), default=0)

    def _state(self, one: _Seen, now: float) -> str:
        still = now - one.moved
        return f"silent for {text_of_seconds(still)}" if still > SILENT_SECONDS else "trains"


def is_address(text: str) -> bool:
    """Whether `text` names an endpoint: HOST:PORT or a URL."""
    return "://" in text or bool(re.fullmatch(r"[A-Za-z0-9_.-]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5}", text))


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else 0
