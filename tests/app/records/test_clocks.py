"""Clock offsets of replicas, estimated from the times of their messages: known offsets are recovered, and the report uses them."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.records.clocks import Bounds, Pair, common_bounds, offsets_of, solve
from thinwire.app.records.events import EventLog
from thinwire.app.records.history import History
from thinwire.app.records.run_record import RunRecord
from thinwire.exchange.record import Flow, Record

AHEAD = {"0": 0.0, "1": 5.0, "2": -3.25, "3": 0.002}  # seconds


def test_agreed_intersects_the_bounds_that_most_pairs_share() -> None:
    assert common_bounds([Bounds(0, 4), Bounds(1, 5), Bounds(2, 3), Bounds(50, 51)]) == Bounds(2, 3)
    assert common_bounds([Bounds(0, 2), Bounds(1, 3), Bounds(10, 20), Bounds(12, 13)]) == Bounds(1, 2)
    assert common_bounds([Bounds(2, 1)]) is None and common_bounds([]) is None


def test_offsets_are_recovered_from_noisy_pairs_and_one_wrong_pair_is_ignored() -> None:
    chance = random.Random(0)
    theta = {f"replica-{n}": chance.uniform(-10, 10) if n else 0.0 for n in range(8)}
    pairs = []
    for one in theta:
        for other in theta:
            if one < other and chance.random() < 0.8:
                error = chance.uniform(0.002, 0.05)
                pairs.append(Pair(one, other, theta[other] - theta[one] + chance.gauss(0, error / 2), error))
    plain = solve(pairs, "replica-0")
    assert plain.keys() == theta.keys()
    for name, found in plain.items():
        assert abs(found.seconds - theta[name]) <= 3 * found.error + 1e-9
    wrong = [*pairs[:4], Pair(pairs[4].one, pairs[4].other, pairs[4].seconds + 60, 0.002), *pairs[5:]]
    for name, found in solve(wrong, "replica-0").items():  # least squares alone would err by seconds
        assert abs(found.seconds - theta[name]) < 0.2
    assert solve([pairs[0], Pair("x", "y", 1, 1)], pairs[0].one).keys() == {pairs[0].one, pairs[0].other}


def write(folder: Path, swapped: bool = False) -> None:
    """Writes a run of four replicas whose clocks differ. Links take 20 to 60 ms; one is 100 ms slower in one direction."""
    chance, rounds = random.Random(1), 40
    left = [{name: 3.0 * number + chance.uniform(0, 0.5) for name in AHEAD} for number in range(rounds)]  # true seconds
    opened = {name: chance.uniform(-2, 2) for name in AHEAD}
    way = {(a, b): chance.uniform(0.02, 0.06) + 0.1 * (a + b == "01") for a in AHEAD for b in AHEAD}
    for name in AHEAD:

        def own(at: float, name: str = name) -> float:
            return at - opened[name]

        now = [0.0]
        start = {"run": {}, "strategy": "s", "parameters": 4, "fragments": [], "link": None, "carrier": "threads"}
        with EventLog(folder / f"events/replica-{name}.jsonl", clock=lambda: now[0]) as log:  # noqa: B023
            wall = 1e9 + opened[name] + AHEAD[name]
            log.emit("start", 0, **start, wall_time=wall, replica=int(name), replicas=4, machine={})
            now[0] = 125.0
            for number in range(rounds):
                peers = [other for other in AHEAD if other != name]
                took = {(a, b): way[a, b] + chance.expovariate(1 / 0.01) for a in AHEAD for b in AHEAD}
                sent = [Flow(peer, 0, 9, 1, 1, own(left[number][name]), {0: own(left[number][name])}) for peer in peers]
                came = [
                    Flow(
                        *(peer, 0, 9, 1, 1, own(left[number][name])),
                        {0: own(left[number][peer] + took[peer, name])},
                        frozenset({0}),
                    )
                    for peer in peers
                ]
                log.emit("wire", 1, **Record(name, 0, number, 0.1, True, tuple(sent), tuple(came)).facts())
            fields = {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "tokens": 1, "progress": 1, "sent": 9}
            log.emit("step", 1, **fields, begin=own(120.0), compute_seconds=1.0)


def test_a_run_on_several_machines_is_drawn_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    files = {path.stem: History.read(path).timed for path in sorted(tmp_path.glob("events/*.jsonl"))}
    found = offsets_of(files)
    assert list(found) == [f"replica-{name}" for name in AHEAD]
    for name, ahead in AHEAD.items():
        clock = found[f"replica-{name}"]
        assert abs(clock.seconds - ahead) <= clock.error < 0.1 or name == "0"
    record = RunRecord.load(tmp_path)
    begins = [float(replica.begin[0]) for replica in record.replicas]  # all steps begin together on the common clock
    assert max(begins) - min(begins) < 0.1
    assert record.clocks == found
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert re.search(r"replica-2 3\.\d* s behind \(± \d", (tmp_path / "page.html").read_text())
    capsys.readouterr()
    assert main(["top", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["clocks"]["replica-1"]["seconds"] == pytest.approx(5.0, abs=0.1)
    assert "Clocks compared with that of replica-0" in told.err


def test_the_times_of_messages_are_by_the_clock_of_the_log() -> None:
    """They were those since the start of the machine, so the clocks of two machines seemed to be as far apart as their starts."""

    def replica(group: tw.comm.Group) -> None:
        ahead = 1e6 * (group.rank + 1)
        told = list[tuple[str, float, dict[str, Any]]]()
        model = torch.nn.Linear(3, 1)
        strategy = tw.diloco(every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def clock() -> float:
            return time.monotonic() + ahead

        def observe(event: str, step: int, **fields: Any) -> None:
            told.append((event, clock(), fields))

        begun = clock()
        with tw.Replica(strategy, model, optimizer, group, observer=observe, clock=clock):
            for _ in range(4):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
        records = [(seconds, Record.of(fields)) for event, seconds, fields in told if event == "wire"]
        assert records
        for seconds, record in records:
            assert all(begun - 1e-4 <= flow.begin <= seconds for flow in record.sent + record.received)

    tw.run_threads(2, replica)
