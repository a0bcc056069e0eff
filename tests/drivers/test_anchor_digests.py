"""Replicas whose anchors are no longer equal stop, say who differs, and resume from a step at which all held the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_processes import run_world
from strategies import METHODS

import thinwire as tw
from thinwire import checkpoint
from thinwire.app.trainer.checkpoints import list_checkpoints
from thinwire.comm.group import WrappedGroup
from thinwire.errors import DisagreementError
from thinwire.lab.recipes import noloco
from thinwire.packet import payload, read_header, seal
from thinwire.testing.toy import adamw, batch, inner_step, toy

STEPS = 90
STRATEGY = tw.diloco(every=6)
Meddle = Callable[[tw.Replica, int], None]


class UnlikeBytes(WrappedGroup):
    """A member that sends other values to each receiver, in packets that are sound."""

    def post(self, tag: int, send: Any, recv: Any, purpose: str = "packet", sized: Any = None) -> Any:
        if purpose == "packet":
            send = {peer: self._changed(packet, peer) for peer, packet in send.items()}
        return self.group.post(tag, send, recv, purpose, sized)

    def _changed(self, packet: torch.Tensor, peer: int) -> torch.Tensor:
        packet = packet.clone()
        payload(packet)[peer] ^= 1  # a low bit of a value
        seal(packet, read_header(packet))
        return packet


def train(
    group: tw.Group, strategy: tw.Strategy, meddle: Meddle = lambda replica, step: None, steps: int = STEPS
) -> str:
    """Trains, and returns the error with which it ends."""
    model = toy()
    try:
        with tw.Replica(strategy, model, adamw(model), group) as replica:
            for step in range(1, steps + 1):
                inner_step(model, replica.optimizer, *batch(0, group.rank, step))
                meddle(replica, step)
    except DisagreementError as error:
        return str(error)
    return ""


def flip_on_replica_1(after: int) -> Meddle:
    """Flips a bit in the memory of one replica once, which no packet shows, while no round is about to replace that memory."""
    flipped = threading.Event()

    def meddle(replica: tw.Replica, step: int) -> None:
        fragment = replica._training.fragments[-1]
        if replica.group.rank == 1 and step >= after and not fragment.flight and not flipped.is_set():
            flipped.set()
            fragment.anchor.view(torch.int32)[1] ^= 1 << 20

    return meddle


@pytest.mark.parametrize("name", ["diloco", "streaming_sign", "two_shot", "on_disk"])
def test_a_flipped_bit_stops_all_and_names_the_replica(name: str) -> None:
    strategy = {
        "two_shot": tw.diloco(every=6, exchange=tw.exchange.TwoShot()),
        "on_disk": tw.streaming_diloco(every=8, delay=2, anchors="disk"),
    }.get(name) or METHODS[name]
    flip = flip_on_replica_1(after=40)
    told = tw.run_threads(3, lambda group: train(group, strategy, flip), timeout=600.0)
    assert len(set(told)) == 1
    assert "fragment " in told[0] and "replica 1 differs from replicas 0 and 2, the majority" in told[0]
    assert "thinwire resume" in told[0]


@pytest.mark.parametrize("steps", [STEPS, 8])
def test_unlike_bytes_to_each_receiver_stop_all(steps: int) -> None:
    """During training, and at the end of a run too short for that."""

    def replica(group: tw.Group) -> str:
        return train(UnlikeBytes(group) if group.rank == 2 else group, STRATEGY, steps=steps)

    told = tw.run_threads(4, replica, timeout=600.0)
    assert all("no longer equal on all replicas" in text for text in told)
    assert all(("at the end" in text) == (steps == 8) for text in told)


def test_equal_anchors_stop_nobody() -> None:
    """Nor anchors that differ by design, as those of gossip."""
    for strategy in (METHODS["diloco"], METHODS["eager_diloco"], METHODS["data_parallel"], noloco(every=4)):
        assert tw.run_threads(2, lambda group, s=strategy: train(group, s), timeout=600.0) == ["", ""]


def _over_gloo(rank: int) -> str:
    group = tw.TorchGroup.from_world(replicas=3, timeout=600.0)
    return train(UnlikeBytes(group) if rank == 1 else group, tw.streaming_diloco(every=8, delay=2))


@pytest.mark.slow
def test_unlike_bytes_stop_processes_over_gloo(tmp_path: Path) -> None:
    told = run_world(_over_gloo, tmp_path, machines=({},) * 3)
    assert all("no longer equal on all replicas" in text for text in told), told


def test_a_resume_takes_the_newest_step_at_which_all_held_equal_anchors(tmp_path: Path) -> None:
    """All replicas save every 12 steps, and a bit flips after step 36."""

    def replica(group: tw.Group) -> str:
        flip = flip_on_replica_1(after=40)

        def meddle(attached: tw.Replica, step: int) -> None:
            flip(attached, step)
            if step % 12 == 0:
                checkpoint.save(tmp_path / "checkpoints" / f"replica-{group.rank}", attached, {})

        return train(group, STRATEGY, meddle, steps=50)

    def resume(group: tw.Group) -> tuple[int, list[dict[str, str]], str]:
        found, skipped = checkpoint.newest_common(tmp_path / "checkpoints" / f"replica-{group.rank}", group)
        assert found is not None
        model = toy()
        with tw.Replica(
            STRATEGY, model, adamw(model), group, resume=lambda attached: checkpoint.load(found, attached)
        ) as attached:
            for step in range(attached.step + 1, 60):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))
        return found.step, skipped, json.dumps(found.manifest["facts"]["anchors"])

    assert all("differs" in text or "another one" in text for text in tw.run_threads(2, replica, timeout=600.0))
    (tmp_path / "run.toml").touch()
    assert [bool(one.problems) for one in list_checkpoints(tmp_path, hashes=False)] == [False, False, True]
    first, second = tw.run_threads(2, resume, timeout=600.0)
    assert first[0] == 36 and first[2] == second[2]
    assert [Path(one["path"]).name for one in first[1]] == ["step-00000048"]
