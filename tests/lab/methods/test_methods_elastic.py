"""Just One Byte in an elastic group in virtual time: the present members iterate, and a joining one replays the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import LOOPS, LR
from torch import Tensor

import thinwire as tw
from thinwire.lab.methods import ZerothOrder
from thinwire.membership.testing.cluster import Killed, SimulatedCluster
from thinwire.testing.toy import batch, same_bits, toy, weights

METHOD, STEPS = LOOPS["just_one_byte"], 14


def tune(cluster: SimulatedCluster, name: str, steps: int = STEPS, seconds: float = 0.0) -> ZerothOrder:
    membership, model = cluster.membership(name), toy()
    tuner: ZerothOrder | None = None

    def loss(sample: int) -> Tensor:
        x, y = batch(0, ord(name), 10 * (tuner.step if tuner else 0) + sample)
        return ((model(x) - y) ** 2).mean()

    while tuner is None or tuner.step < steps:
        view = membership.next_view({})
        names = [member.name for member in view.members]
        try:
            if tuner is None:
                tuner = METHOD.attach(model, METHOD.optimizer(model, LR), view.group, names=names)
            elif view.rebuilt:
                tuner.meet(view.group, names)
            if tuner.step < steps:
                membership.sleep(seconds)  # what a step takes
                tuner.iterate(loss)
        except (tw.LinkError, tw.PacketError):
            view.close()  # the remaining members meet again
    membership.close()
    return tuner


def returning(cluster: SimulatedCluster) -> Callable[[str], Any]:
    """A replica that restarts from the first weights alone after each kill. Steps take time: it is back before the others have ended."""

    def replica(name: str) -> ZerothOrder:
        while True:
            try:
                return tune(cluster, name, seconds=1.0)
            except Killed:
                cluster.revive(name)

    return replica


def check(results: dict[str, Any]) -> list[ZerothOrder]:
    ended = [tuner for tuner in results.values() if not isinstance(tuner, Killed)]
    assert not [tuner for tuner in ended if isinstance(tuner, BaseException)], results
    assert all(tuner.step == STEPS and tuner.log == ended[0].log for tuner in ended)
    assert all(same_bits(weights(tuner.model), weights(ended[0].model)) for tuner in ended)
    return ended


def test_three_members_without_faults_make_every_iteration_together():
    cluster = SimulatedCluster()
    ended = check(cluster.play({name: lambda name: tune(cluster, name) for name in "abc"}))
    assert {entry.names for entry in ended[0].log.entries} == {("a", "b", "c")}


@pytest.mark.parametrize(
    ("phase", "nth", "together"),
    [
        ("call", 1, 0),
        ("connect", 1, 0),
        ("post", 1, 0),
        ("post", 13, 1),
        ("post", 14, 2),
        ("post", 16, 4),
        ("call", 14, 12),
    ],
)
def test_the_others_continue_when_a_replica_is_killed_at_any_phase(phase, nth, together):
    cluster = SimulatedCluster()
    cluster.at("b", phase, lambda: cluster.kill("b"), nth)
    ended = check(cluster.play({name: lambda name: tune(cluster, name) for name in "abc"}))
    members = ["".join(entry.names) for entry in ended[0].log.entries]
    assert len(ended) == 2 and members == ["abc"] * together + ["ac"] * (STEPS - together)


@pytest.mark.parametrize(("phase", "nth"), [("call", 8), ("post", 15)])
def test_a_killed_replica_returns_with_the_first_weights(phase, nth):
    cluster, killed = SimulatedCluster(), []
    cluster.at("b", phase, lambda: [killed.append("b"), cluster.kill("b")], nth)
    assert len(check(cluster.play({name: returning(cluster) for name in "abc"}))) == 3 and killed


def test_all_members_finish_after_a_damaged_packet():
    cluster = SimulatedCluster()
    cluster.at("b", "post", lambda: cluster.damage("a", "c"), 14)
    ended = check(cluster.play({name: lambda name: tune(cluster, name) for name in "abc"}))
    assert len(ended) == 3


def test_a_late_member_joins():
    cluster = SimulatedCluster()

    def late(name: str) -> ZerothOrder:
        with cluster.time:
            cluster.wait(name, lambda: False, 0.5)
        return tune(cluster, name)

    ended = check(cluster.play({"a": lambda n: tune(cluster, n), "b": lambda n: tune(cluster, n), "z": late}))
    assert {entry.names for entry in ended[0].log.entries} == {("a", "b"), ("a", "b", "z")} and len(ended) == 3
