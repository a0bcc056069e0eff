"""A replica that joins, or asks for samples, while rounds are in progress: what the other side does meanwhile ends neither wrongly."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest
import torch
from elastic_toy import Inline, RecordedRun, Toy, agree, one_thread, train
from reading_toy import NotingReader, inner, new_record

import thinwire as tw
from thinwire.app.diagnosis import Rules
from thinwire.drivers.elastic import ending, round_thread
from thinwire.drivers.elastic.eviction import EvictionVoter
from thinwire.errors import DisagreementError, LinkError, UndecidedError
from thinwire.membership.rendezvous import Membership
from thinwire.membership.testing.cluster import SimulatedCluster, ThreadRendezvous
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture


class Later(Inline):
    """Runs submitted calls when somebody waits for them, as an exchange thread that is busy until then."""

    def __init__(self) -> None:
        self.calls = list[Callable[[], Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def wait(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.calls.pop(0)()


def fails(patch: pytest.MonkeyPatch, kind: type, method: str, nth: int, error: Exception) -> None:
    """Makes the nth call from now on raise this error."""
    whole, calls = getattr(kind, method), count(1)

    def called(*args: Any, **fields: Any) -> Any:
        if next(calls) == nth:
            raise error
        return whole(*args, **fields)

    patch.setattr(kind, method, called)


@pytest.mark.parametrize("error", [UndecidedError("the hub has gone"), DisagreementError("another model")])
def test_who_asks_for_samples_waits_for_the_round_in_progress(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ends in doubt while the hub has gone, or with an error, after this replica has lost its samples."""

    def asks(name: str) -> Toy:
        toy = Toy(cluster, name, record, inner=inner, reader=reader).begin()
        inner(toy, 0)
        toy.elastic._trained += 1
        rounds, later = toy.elastic.rounds, Later()
        monkeypatch.setattr(rounds, "_thread", later)
        monkeypatch.setattr(rounds, "wait", later.wait)
        if isinstance(error, UndecidedError):
            fails(monkeypatch, View, "decide", 1, error)
            fails(monkeypatch, Membership, "next_view", 2, LinkError("no hub"))
        else:
            fails(monkeypatch, Membership, "next_view", 1, error)
        rounds.depart(toy.elastic._bring(rounds.report.next, 1), own_steps=1)
        reader.begin_again(None)
        reader.draw(1)
        return toy

    cluster, record, reader = SimulatedCluster(), new_record(), NotingReader(3, 1, 2, 60)
    told = cluster.play({"a": asks})["a"]
    if isinstance(error, UndecidedError):
        assert isinstance(told, Toy) and reader.read_count.serial >= 0, told
    else:
        assert told is error


def test_a_joiner_whose_first_view_evicts_another_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the call of d on, the others suspect c, so that its first view holds no round."""
    cluster, record, joining = SimulatedCluster(), RecordedRun(), list[str]()
    membership = cluster.membership
    monkeypatch.setattr(cluster, "membership", lambda name, **given: membership(name, evict=Rules(), **given))
    monkeypatch.setattr(EvictionVoter, "suspect", property(lambda voter: "c" if joining else ""))

    def late(name: str) -> Toy:
        ThreadRendezvous(cluster, name).sleep(9.5)  # it calls between two calls of the others
        return train(cluster, record, least=2)(name)

    cluster.at("d", "call", lambda: joining.append("d"), 2)  # at the first, it looks for the lighthouse
    results = cluster.play({name: train(cluster, record, least=2) for name in "abc"} | {"d": late})
    assert isinstance(results["c"], DisagreementError) and all(isinstance(results[name], Toy) for name in "abd"), (
        results
    )
    assert {name for name, event, fields in record.events if event == "evicted"} >= set("abcd")
    agree(results, record)


def test_a_joiner_takes_the_state_from_the_member_that_is_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "PROBED_NBYTES", 0)
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.slow("a", "d", 2.0)  # a is the first that has the state

    def late(name: str) -> Toy:
        ThreadRendezvous(cluster, name).sleep(9.5)
        return train(cluster, record)(name)

    results = cluster.play({name: train(cluster, record) for name in "abc"} | {"d": late})
    gave = [name for name, event, fields in record.events if event == "given" and "d" in fields["to"]]
    assert gave and set(gave) <= {"b", "c"}
    agree(results, record)


def test_a_replica_that_resumes_as_it_joins_takes_over_only_what_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """b leaves after its tenth step, a holds two rounds alone, or some more, and b resumes with what it had not sent."""
    monkeypatch.setattr(round_thread, "ThreadPoolExecutor", Inline)
    cluster, given, alone, part = SimulatedCluster(), list[int](), list[int](), 64 * 63 * 4
    schedule, partition = tw.pieces.schedule.Staggered(every=8, delay=0), tw.pieces.partition.Sequential(8)
    strategy = tw.Strategy(schedule=schedule, outer=tw.pieces.outer.Average(), partition=partition)

    def made(name: str, resume: Callable[[tw.Replica], object] | None = None) -> tw.Replica:
        def observe(event: str, step: int, **fields: Any) -> None:
            if event == "given":
                given.append(fields["nbytes"])
            if event == "round" and fields["committed"] and fields["members"] == ["a"]:
                with cluster.time:
                    alone.append(fields["round"])
                    cluster.time.notify_all()

        model = torch.nn.Sequential(*(torch.nn.Linear(63, 64, bias=False) for _ in range(8)))
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        member = cluster.membership(name, least=1)
        return tw.Replica(strategy, model, optimizer, member, resume=resume, observer=observe)

    def train(name: str, replica: tw.Replica, steps: int) -> None:
        for _ in range(steps):
            ThreadRendezvous(cluster, name).sleep(1.0)
            for parameter in replica.model.parameters():
                parameter.grad = torch.full_like(parameter, float(ord(name)))
            replica._training.optimizer.step()

    def unsent(replica: tw.Replica) -> list[float]:
        weights = [parameter.flatten()[0].item() for parameter in replica.model.parameters()]
        return [anchor[0].item() - weight for anchor, weight in zip(replica.anchors(), weights)]

    def stays(name: str) -> list[torch.Tensor]:
        with made(name) as replica:
            train(name, replica, 40)
        return replica.anchors()

    def returns(name: str) -> list[torch.Tensor]:
        first = made(name)
        train(name, first, 10)
        (tensors, facts), weights, left = first.state(), first.model.state_dict(), unsent(first)
        first.close()
        assert any(left) and not given
        with cluster.time:
            cluster.wait(name, lambda: len(alone) >= 2, None)

        def load(replica: tw.Replica) -> None:
            replica.model.load_state_dict(weights)
            replica.load_state(tensors, facts)

        with made(name, load) as replica:
            assert unsent(replica) == left and replica.step > 10
            train(name, replica, 40 - replica.step)
        return replica.anchors()

    ended = cluster.play({"a": stays, "b": returns})
    assert isinstance(ended["a"], list) and isinstance(ended["b"], list), ended
    assert all(torch.equal(mine, other) for mine, other in zip(ended["a"], ended["b"]))
    (nbytes,) = given
    assert part < nbytes < 7.5 * part, nbytes
