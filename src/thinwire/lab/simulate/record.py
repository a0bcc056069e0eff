"""Writes a simulated run as the event logs of a real one, so that `thinwire report` draws its timeline and its link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from thinwire.app.records.events import EventLog
from thinwire.lab.simulate.layers import Floats
from thinwire.lab.simulate.replicas import SimulatedRound, SimulationResult
from thinwire.lab.simulate.scenario import Scenario
from thinwire.lab.simulate.uplinks import Flags, Integers

REPLICAS = 16  # most replicas with a log; the report draws eight


class Recorder:
    """Observes a simulation and writes the event logs `FOLDER/events/replica-*.jsonl` of its first 16 replicas.

    Steps between two events share their time evenly. The logs hold no loss.

    Args:
        folder: the run's folder; made if it is missing.
        scenario: the simulated one.
        about: fields of the `start` event that a scenario does not have: run, strategy, parameters, fragments, machine.
        tokens: number of tokens in an inner step, for the logs.

    >>> import tempfile, thinwire as tw
    >>> from thinwire.lab.simulate.replicas import simulate
    >>> scenario = Scenario.alike(replicas=2, step_seconds=0.1, link=tw.comm.Link(1e9))
    >>> about = {"run": "first", "strategy": "diloco", "parameters": 1000, "fragments": [1000], "machine": {}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(Path(folder), scenario, about, tokens=1024) as recorder:
    ...         outcome = simulate(tw.diloco(every=10), [1000], scenario, steps=20, observer=recorder)
    ...         recorder.end(outcome, steps=20, summary={})
    ...     len(list(Path(folder, "events").glob("*.jsonl")))
    2
    """

    def __init__(self, folder: Path, scenario: Scenario, about: Mapping[str, Any], tokens: int) -> None:
        count = min(scenario.replicas, REPLICAS)
        self.now, self.tokens = 0.0, tokens
        self.sent = [0] * count
        self.logs = [EventLog(folder / "events" / f"replica-{r}.jsonl", lambda: self.now) for r in range(count)]
        for rank in range(count):
            link = scenario.wires[rank if scenario.shares is None else scenario.shares[rank]].link
            self._emit(
                rank, 0.0, "start", 0, wall_time=0.0, replica=rank, replicas=scenario.replicas, carrier="virtual time",
                link={"bits_per_second": link.bits_per_second, "delay_seconds": link.delay_seconds},
                **about,
            )  # fmt: skip

    def stepped(self, first: int, done: Integers, begin: Floats, end: Floats) -> None:
        fields = {"loss": None, "lr": None, "grad_norm": None, "tokens": self.tokens}
        for rank in range(len(self.logs)):
            edges = np.linspace(begin[rank], end[rank], int(done[rank]) + 1).tolist()
            for number, (left, right) in enumerate(pairwise(edges), first):
                times = {"begin": round(left, 6), "compute_seconds": round(right - left, 6)}
                self._emit(rank, right, "step", number, **fields, **times, progress=number, sent=self.sent[rank])

    def departed(self, round_: SimulatedRound, away: Flags) -> None:
        fields = {"fragment": round_.fragment, "round": round_.number, "seconds_spent": 0.0}
        for rank in self._there(away):
            nbytes = int(round_.messages.nbytes[rank])
            self.sent[rank] += nbytes
            self._emit(rank, float(round_.departed[rank]), "depart", round_.step, **fields, nbytes=nbytes)

    def landed(self, round_: SimulatedRound, step: int, begin: Floats, stall: Floats, away: Flags) -> None:
        assert round_.landed is not None
        fields = {"fragment": round_.fragment, "round": round_.number}
        for rank in self._there(away):
            now, left = float(begin[rank] + stall[rank]), float(round_.departed[rank])
            if math.isfinite(round_.messages.asked[rank]):
                on_link = {
                    "queued_seconds": float(round_.messages.begin[rank]) - left,
                    "transfer_seconds": float(round_.messages.arrival[rank] - round_.messages.begin[rank]),
                }
                end = float(round_.landed[rank])
                nbytes = int(round_.messages.nbytes[rank])
                self._emit(rank, now, "flight", step, **fields, nbytes=nbytes, begin=left, end=end, **on_link)
            waited = {"begin": float(begin[rank]), "stall_seconds": float(stall[rank]), "seconds_spent": 0.0}
            self._emit(rank, now, "land", step, **fields, **waited)

    def changed(self, replicas: Integers, step: int, seconds: Floats, what: str) -> None:
        for rank, now in zip(replicas.tolist(), seconds.tolist(), strict=True):
            if rank < len(self.logs):
                self._emit(rank, now, "warning", step, message=what)

    def end(self, outcome: SimulationResult, steps: int, summary: Mapping[str, Any]) -> None:
        """Write the `end` events, with each replica's own numbers."""
        for rank, log in enumerate(self.logs):
            own = {
                "wire_bytes_sent": int(outcome.nbytes_sent[rank]),
                "compute_utilization": float(outcome.compute_seconds[rank] / outcome.wall_seconds[rank]),
                "wall_seconds": float(outcome.wall_seconds[rank]),
                "stall_seconds": float(outcome.stall_seconds[rank]),
            }
            self._emit(rank, float(outcome.wall_seconds[rank]), "end", steps, summary=dict(summary) | own)
            log.close()

    def _there(self, away: Flags) -> list[int]:
        return [rank for rank in range(len(self.logs)) if not away[rank]]

    def _emit(self, rank: int, now: float, event: str, step: int, **fields: Any) -> None:
        self.now = now
        self.logs[rank].emit(event, step, **fields)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for log in self.logs:
            log.close()
