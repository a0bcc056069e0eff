"""The end of an elastic run: who gets the final state, and what one that comes later is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_folders import read_events

from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.member import MemberSpec
from thinwire.app.trainer.place import ElasticPlace
from thinwire.app.trainer.run import Run
from thinwire.errors import EndedError, LinkError
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous


def all_take_part(cluster: SimulatedCluster, run: Run, tmp_path: Path) -> dict[str, Callable[[str], Any]]:
    """Returns replicas that run on separate machines with separate folders; each returns its result or the error that ended it."""

    def replica(name: str) -> Any:
        return take_part(cluster, run, tmp_path, name)

    return {f"replica-{index}": replica for index in range(run.placement.replicas)}


def take_part(cluster: SimulatedCluster, run: Run, tmp_path: Path, name: str, resume: bool = False) -> Any:
    run_folder.new_folder(run, tmp_path / name, resume)
    try:
        return launch.train_here(
            run, ElasticPlace(MemberSpec(ThreadRendezvous(cluster, name), name), tmp_path / name, resume)
        )
    except (LinkError, EndedError) as error:
        return error


def models(tmp_path: Path) -> dict[str, bytes]:
    """Returns what the replicas saved as the final model."""
    return {path.parent.name: path.read_bytes() for path in sorted(tmp_path.glob("*/model.safetensors"))}


def told(tmp_path: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(tmp_path / name / f"events/{name}.jsonl") if e["event"] == kind]


def freeze_for(cluster: SimulatedCluster, name: str, seconds: float) -> Callable[[], None]:
    def freeze() -> None:
        cluster.freeze(name)
        cluster.later(seconds, lambda: cluster.thaw(name))

    return freeze


def wait_until(cluster: SimulatedCluster, name: str, seconds: float) -> None:
    with cluster.time:
        cluster.wait(name, lambda: False, seconds - cluster.time.now)


def test_a_replica_that_arrives_while_the_final_state_is_kept_gets_it(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    """One replica was frozen, one was killed and restarted, and one is new."""
    run = run.changed(replicas=4, steps=12)

    def back_late(name: str) -> Any:
        try:
            return take_part(cluster, run, tmp_path, name)
        except Killed:
            cluster.revive(name)
        wait_until(cluster, name, 110.0)
        return take_part(cluster, run, tmp_path, name, resume=True)

    def new(name: str) -> Any:
        wait_until(cluster, name, 90.0)
        return take_part(cluster, run, tmp_path, name)

    cluster.at("replica-2", "put", freeze_for(cluster, "replica-2", 100.0), 5)
    cluster.at("replica-1", "put", lambda: cluster.kill("replica-1"), 4)
    others = {"replica-1": back_late, "rome": new}
    ended = cluster.play(all_take_part(cluster, run, tmp_path) | others)
    assert len(ended) == 5 and all(isinstance(end, dict) and not end["stopped"] for end in ended.values()), ended
    assert len({end["weights"] for end in ended.values()}) == 1 and cluster.time.now < 150
    assert len(models(tmp_path)) == 5 and len(set(models(tmp_path).values())) == 1
    (keeps,) = told(tmp_path, "replica-0", "keeps")
    assert keeps["late"] == ["replica-1", "replica-2"]
    assert told(tmp_path, "replica-2", "caught_up")[-1]["donor"] == "replica-0"
    assert told(tmp_path, "replica-1", "back")[0]["path"]
    for name in ended:
        (steps,) = RunRecord.load(tmp_path / name).steps
        assert (
            steps.trained == len(told(tmp_path, name, "step")) and steps.trained + steps.jumped == run.optimizer.steps
        )
        if name in ("replica-0", "replica-3"):
            assert steps.counted == steps.trained == run.optimizer.steps
        assert steps.counted <= steps.trained and (steps.trained > 0) == (name != "rome")


def test_a_replica_that_arrives_later_gets_an_error_and_saves_no_model(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    run = run.changed(timeout=60.0, steps=12)
    came: list[float] = []

    def twice(name: str) -> list[Any]:
        ends = []
        for resume in (False, True):
            ends.append(take_part(cluster, run, tmp_path, name, resume))
            came.append(cluster.time.now)
        return ends

    cluster.at("replica-2", "put", freeze_for(cluster, "replica-2", 300.0), 5)
    ended = cluster.play(all_take_part(cluster, run, tmp_path) | {"replica-2": twice})
    for error in ended["replica-2"]:
        assert isinstance(error, EndedError) and "the run has ended without replica 'replica-2'" in str(error), error
    assert "where replica-0, replica-1 ended" in str(ended["replica-2"][0])
    # it ends neither after training all its steps, nor after the timeout
    assert came[0] < 330 and came[1] - came[0] < 10
    assert list(models(tmp_path)) == ["replica-0", "replica-1"] and not list(tmp_path.glob("replica-2/*.safetensors"))
    assert RunRecord.load(tmp_path / "replica-2").status.startswith("stopped: the run has ended without")


def test_a_replica_alone_at_the_end_reports_it_and_resumes_with_the_others(
    cluster: SimulatedCluster, run: Run, tmp_path: Path
) -> None:
    """The only other replica dies, so what both agreed on is no final model."""
    run = run.changed(replicas=2, timeout=60.0, steps=12)

    def dies_and_returns(name: str) -> Any:
        try:
            return take_part(cluster, run, tmp_path, name)
        except Killed:
            cluster.revive(name)
        wait_until(cluster, name, 500.0)
        return take_part(cluster, run, tmp_path, name, resume=True)

    def stays(name: str) -> list[Any]:
        ends = [take_part(cluster, run, tmp_path, name)]
        assert list(models(tmp_path)) == [] and (tmp_path / name / "model.stale.safetensors").exists()
        wait_until(cluster, name, 500.0)
        return [*ends, take_part(cluster, run, tmp_path, name, resume=True)]

    cluster.at("replica-1", "put", lambda: cluster.kill("replica-1"), 4)
    ended = cluster.play({"replica-0": stays, "replica-1": dies_and_returns})
    alone, together = ended["replica-0"]
    assert isinstance(alone, LinkError) and "model.stale.safetensors and are not the final model" in str(alone), alone
    assert together["weights"] == ended["replica-1"]["weights"] and len(set(models(tmp_path).values())) == 1
    assert len(models(tmp_path)) == 2 and not list(tmp_path.glob("*/model.stale.safetensors"))
