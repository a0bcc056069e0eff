"""Synthetic event logs with plausible random numbers, so that records and reports have something to read and draw."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.records.events import Event, Tail

RUN_TOML = """\
steps = {steps}
seed = 0
data = "bundled"

[strategy]
name = "streaming_diloco"
every = {every}
fragments = 4
delay = {delay}
merge = 0.5
codec = "E3M0(block=128)"

[link]
rate = "{mbit} Mbit/s"
latency = "50 ms"
"""

SIZES = [1_050_000, 1_820_000, 1_820_000, 2_410_000]


def start(replica: int = 0, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    fields = {
        "event": "start",
        "seconds": 0.0,
        "step": 0,
        "wall_time": 1.7e9,
        "replica": replica,
        "replicas": replicas,
        "run": {"steps": 100},
        "strategy": "streaming_diloco(every=30, fragments=4, delay=5, merge=0.5)",
        "parameters": sum(SIZES),
        "fragments": [{"name": f"blocks {i}, {i + 4}" if i else "embedding", "numel": n} for i, n in enumerate(SIZES)],
        "link": {"bits_per_second": 2e7, "delay_seconds": 0.05},
        "carrier": "processes (gloo)",
        "machine": {"cpu": "AMD EPYC 7B13", "cores": 2, "torch": "2.13.0", "python": "3.11.9", "thinwire": "0.1.0"}
        | {"commit": "3f1c2aa"},
    }
    return fields | changes


def write_events(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def read_events(path: str | Path) -> list[Event]:
    """The events of a file, without a last line that has no end."""
    return Tail(path).read()


class _Pen:
    """Writes the session of one replica."""

    def __init__(self, replica: int, replicas: int, seed: int, options: dict[str, Any]) -> None:
        self.replica, self.replicas, self.options = replica, replicas, options
        self.random = random.Random(seed * 1000 + replica)
        self.clock, self.free = 0.4, 0.0
        self.events: list[dict[str, Any]] = []
        self.air: list[tuple[int, int, int, float]] = []  # (step of landing, fragment, round, time when ready)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append({"event": kind, "seconds": round(self.clock, 6), "step": step, **fields})

    def inner_step(self, step: int) -> None:
        begin, spent = self.clock, self.options["seconds"] * self.random.uniform(0.95, 1.12)
        self.clock += spent
        loss = 1.6 + 2.6 * math.exp(-step / 90) + 1.1 * math.exp(-step / 15) + self.random.gauss(0, 0.05)
        self.write(
            "step", step, loss=loss, lr=1e-3, grad_norm=1.0, tokens=4096, begin=begin, compute_seconds=spent * 0.985
        )

    def depart(self, step: int, fragment: int) -> None:
        nbytes = int(SIZES[fragment] * 4.0625 / 8) * (self.replicas - 1)
        every = self.options["every"]
        round_, seconds = (step - fragment * every // 4) // every, nbytes * 8 / self.options["rate"]
        self.write("depart", step, fragment=fragment, round=round_, nbytes=nbytes, seconds_spent=0.004)
        queued = max(0.0, self.free - self.clock)
        seconds *= self.random.uniform(1.0, 1.15)
        ready = self.clock + queued + seconds + 0.06
        self.free = self.clock + queued + seconds
        self.write(
            *("flight", step),
            **{"fragment": fragment, "round": round_, "nbytes": nbytes, "begin": self.clock, "end": ready},
            **{"queued_seconds": queued, "transfer_seconds": seconds},
        )
        self.air.append((step + self.options["delay"], fragment, round_, ready))

    def land(self, step: int) -> None:
        for flight in [flight for flight in self.air if flight[0] == step]:
            self.air.remove(flight)
            _, fragment, round_, ready = flight
            if (round_ + fragment) % 9 == 7:
                self.write("refused", step, fragment=fragment, round=round_, by=[1], reason="infinity in the delta")
            begin = self.clock
            stall = max(0.0, ready - begin)
            self.clock += stall + 0.01
            self.write(
                *("land", step),
                **{"fragment": fragment, "round": round_, "begin": begin},
                **{"stall_seconds": stall, "seconds_spent": 0.01},
            )

    def session(self, first: int, last: int, finish: bool) -> None:
        every = self.options["every"]
        for step in range(first, last + 1):
            self.inner_step(step)
            for fragment in range(4):
                if (step - fragment * every // 4) % every == 0 and step >= every // 4:
                    self.depart(step, fragment)
            self.land(step)
            if step % 25 == 0 and self.replica == 0:
                self.clock += 0.3
                loss = 1.62 + 2.6 * math.exp(-step / 85)
                self.write("eval", step, loss=loss, tokens=4096 * step, seconds_spent=0.3, of="anchors")
            if step % 100 == 0:
                self.clock += 0.2
                path = f"checkpoints/replica-{self.replica}/step-{step:08d}"
                self.write("checkpoint", step, path=path, nbytes=10**7, seconds_spent=0.2)
        if finish:
            self.write("end", last, summary={"provenance": "emulated"})


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return draw_run


def draw_run(folder: Path, replicas: int = 2, steps: int = 200, killed_at: int = 0, **options: Any) -> Path:
    """Returns a run folder. `killed_at` kills the run and resumes it at the last hundred before that step."""
    options = {"every": 30, "delay": 5, "seconds": 0.18, "rate": 2e7, "seed": 0} | options
    folder.mkdir(parents=True)
    toml = RUN_TOML.format(steps=steps, mbit=int(options["rate"] / 1e6), **options)
    (folder / "run.toml").write_text(toml)
    for replica in range(replicas):
        path = folder / "events" / f"replica-{replica}.jsonl"
        link = {"bits_per_second": options["rate"], "delay_seconds": 0.05}
        strategy = f"streaming_diloco(every={options['every']}, fragments=4, delay={options['delay']}, merge=0.5)"
        head = start(replica, replicas, link=link, strategy=strategy)
        pen = _Pen(replica, replicas, options["seed"], options)
        pen.session(1, killed_at or steps, finish=not killed_at)
        write_events(path, [head, *pen.events])
        if killed_at:
            resumed = killed_at // 100 * 100
            pen = _Pen(replica, replicas, options["seed"] + 1, options)
            note = {"event": "resume", "seconds": 0.1, "step": resumed, "from_step": resumed}
            where = f"checkpoints/replica-{replica}/step-{resumed:08d}"
            pen.session(resumed + 1, steps, finish=True)
            write_events(path, [head | {"step": resumed}, note | {"path": where, "skipped": []}, *pen.events])
    return folder


@pytest.fixture(scope="session", name="start")
def start_fixture() -> Callable[..., dict[str, Any]]:
    return start


@pytest.fixture(scope="session", name="write_events")
def write_events_fixture() -> Callable[[Path, list[dict[str, Any]]], None]:
    return write_events
