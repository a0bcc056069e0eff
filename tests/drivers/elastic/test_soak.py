"""Many random faults, with real processes and in virtual time; `-s` prints a summary."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from elastic_toy import RecordedRun, Toy, agree, one_thread, order_faults, train
from faults import draw, schedule
from namespaces import missing
from nat import DEVICE
from stage import HubStage, Stage
from stage_nat import NatStage

from thinwire.errors import LinkError
from thinwire.membership.testing import SimulatedCluster

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.slow
SEED = 2026  # of the order of faults; another seed gives another order
NO_NAT = missing() or (None if Path(DEVICE).exists() else f"no {DEVICE} here")


def test_random_faults_in_virtual_time_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done, ended, rounds, runs = Counter[str](), Counter[str](), Counter[str](), 0
    while done.total() < 200 and runs < 60:
        runs += 1
        print(f"seed {SEED} and run {runs}")
        chance = random.Random(f"{SEED} {runs}")
        names = "abcd"[: 3 + runs % 2]
        cluster, record = SimulatedCluster(order=runs), RecordedRun()
        print(order_faults(cluster, chance, 8, names, done))
        least = len(names) // 2 + 1
        settings = {"steps": 60, "least": least, "tokens": chance.choice([None, 8.0])}
        results = cluster.play({name: train(cluster, record, **settings) for name in names})
        assert all(isinstance(result, Toy | LinkError) for result in results.values()), results
        if any(isinstance(result, Toy) for result in results.values()):  # otherwise too many died too close to the end
            agree(results, record)
        ended.update(type(result).__name__ for result in results.values())
        rounds.update(str(f["committed"]) for _, event, f in record.events if event == "round" and f["fragment"] >= 0)
    assert done.total() >= 200 and ended["Toy"] >= 2 * runs
    with capsys.disabled():
        print(f"\nsoak in virtual time, seed {SEED}: {done.total()} faults in {runs} runs: {dict(done.most_common())}")
        print(
            f"rounds, as each member saw them: {rounds['True']} committed, {rounds['False']} dropped, {rounds['None']} in doubt"
        )
        print(
            f"{ended['Toy']} replicas ended with the same bits and all sums right, {ended['LinkError']} came when the others had finished"
        )


@pytest.mark.parametrize("kind_of_stage", [Stage, HubStage])
def test_every_kind_of_fault_in_turn_loses_nothing(kind_of_stage: type[Stage], tmp_path: Path) -> None:
    """After each fault all replicas take part again. At the end no step is lost, and the faults are in the logs."""
    stage, chance = kind_of_stage(tmp_path), random.Random(1)
    try:
        stage.begin()
        for kind in stage.kinds:
            stage.fault(draw(kind, chance, stage.names))
            stage.nobody_is_away()
            stage.until_all_take_part()
        stage.end()
        stage.check_anchors()
        everything = [line for name in "abc" for line in stage.lines(name)]
        assert any("damaged" in line["reason"] for line in everything if line["kind"] == "round")
        (refused,) = [line for line in everything if line["kind"] == "not saved"]
        assert "was not written" in refused["reason"] and refused["kept"]
        errors = "".join(file.read_text() for file in tmp_path.glob("*.err"))
        assert "model: 2 tensors" in errors and "has the name" in errors
        assert any(line["kind"] == "caught_up" for line in everything) and any(
            line["kind"] == "resumed" for line in everything
        )
    finally:
        stage.clear()


@pytest.mark.parametrize(
    ("kind_of_stage", "faults"),
    [
        (Stage, 40),
        pytest.param(
            NatStage, 110, marks=pytest.mark.skipif(NO_NAT is not None, reason=f"no network namespaces: {NO_NAT}")
        ),
    ],
)
def test_random_faults_of_real_processes_lose_nothing(
    kind_of_stage: type[Stage], faults: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = kind_of_stage(tmp_path)
    try:
        said = stage.soak(schedule(SEED, faults, stage.kinds, stage.names))
        with capsys.disabled():
            print(f"\nsoak of processes, {kind_of_stage.__name__}, seed {SEED}:\n{said}")
    finally:
        stage.clear()
