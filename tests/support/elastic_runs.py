"""Replicas of the real trainer that come and go, as threads in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inline import Inline

from thinwire.app.trainer import launch, run_folder, trainer
from thinwire.app.trainer.member import MemberSpec
from thinwire.app.trainer.place import ElasticPlace
from thinwire.app.trainer.run import Run
from thinwire.drivers.elastic import round_thread
from thinwire.exchange import send_queue
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous

NAMES = ("replica-0", "replica-1", "replica-2")


def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedCluster:
    """A place to meet; an inner step lasts a second of its time."""
    monkeypatch.setattr(send_queue, "JobThread", Inline)
    monkeypatch.setattr(send_queue.threading, "Lock", threading.RLock)
    monkeypatch.setattr(round_thread, "ThreadPoolExecutor", Inline)
    there, inner_step = SimulatedCluster(), trainer.Trainer._inner_step

    def slowly(self: trainer.Trainer) -> None:
        with there.time:
            there.wait(self.place.name, lambda: False, 1.0)
        inner_step(self)

    monkeypatch.setattr(trainer.Trainer, "_inner_step", slowly)
    return there


def living(cluster: SimulatedCluster, run: Run, folder: Path, resume: bool = False) -> Callable[[str], Any]:
    """A replica that is started again, with --resume, when it was killed."""

    def life(name: str) -> Any:
        again = resume
        while True:
            try:
                torch.manual_seed(0)
                return launch.train_here(
                    run, ElasticPlace(MemberSpec(ThreadRendezvous(cluster, name), name), folder, again)
                )
            except Killed:
                cluster.revive(name)
                again = True

    return life


def played(cluster: SimulatedCluster, run: Run, folder: Path, resume: bool = False) -> dict[str, Any]:
    run_folder.new_folder(run, folder, resume)
    ended = cluster.play({name: living(cluster, run, folder, resume) for name in NAMES[: run.placement.replicas]})
    for outcome in ended.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return ended


def elastic_run(tmp_path: Path) -> Run:
    """The settings of a small run of three replicas, with its text."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    return Run.of(
        carrier="elastic", replicas=3, text=(str(text),), model="nano", steps=24, every=6, delay=4, batch=2, sequence=16,
        checkpoint_every=5, eval_batches=1, eval_every=12, keep=9,
    )  # fmt: skip
