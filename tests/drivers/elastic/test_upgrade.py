"""Replicas of different releases in one run: those that share a protocol train together, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable

from elastic_toy import RecordedRun, Toy, agree, one_thread
from reading_toy import STEP, NotingReader, check, inner, new_record

from thinwire.errors import DisagreementError
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.version import PROTOCOLS, Protocols

__all__ = ["one_thread"]  # a fixture
OLD = PROTOCOLS.newest
AFTER = Protocols(OLD, OLD + 1, "0.2.0")  # understands the protocol of earlier releases
NEXT = Protocols(OLD + 1, OLD + 2, "0.3.0")  # no longer understands it
FAR = Protocols(OLD + 5, OLD + 7, "9.0")
STEPS = 60


def toy(cluster: SimulatedCluster, record: RecordedRun, name: str, protocols: Protocols) -> Toy:
    facts, reader = {"protocols": str(protocols)}, NotingReader(3, 3, STEP, 500)
    return Toy(cluster, name, record, inner=inner, reader=reader, facts=facts, least=2, keep=100.0)


def upgraded(
    cluster: SimulatedCluster, record: RecordedRun, steps: int, back: set[str], gone: set[str], newcomers: int
) -> Callable[[str], Toy]:
    """Returns a replica that trains for `steps` steps, and until as many `newcomers` are `gone`. Then it leaves, and is `back` two seconds
    later with the next release and its checkpoint.
    """

    def run(name: str) -> Toy:
        before = toy(cluster, record, name, PROTOCOLS)
        before.begin().train_until(steps)
        while len(gone) < newcomers:
            before.train_until(before.step + 1)
        before.save()
        before.elastic.close()
        wait(cluster, name, 2.0)
        after = toy(cluster, record, name, AFTER).begin()
        with cluster.time:
            back.add(name)
            cluster.time.notify_all()
        return finished(after)

    return run


def late(
    cluster: SimulatedCluster, record: RecordedRun, protocols: Protocols, back: set[str], gone: set[str]
) -> Callable[[str], Toy]:
    """Returns a replica that comes as soon as one replica of three has been upgraded."""

    def run(name: str) -> Toy:
        with cluster.time:
            cluster.wait(name, lambda: "a" in back, None)
        newcomer = toy(cluster, record, name, protocols)
        try:
            newcomer.begin()
        finally:
            with cluster.time:
                gone.add(name)
                cluster.time.notify_all()
        return finished(newcomer)

    return run


def finished(toy: Toy) -> Toy:
    toy.train_until(STEPS)
    toy.elastic.finish(toy.keep)
    toy.elastic.close()
    return toy


def wait(cluster: SimulatedCluster, name: str, seconds: float) -> None:
    with cluster.time:
        cluster.wait(name, lambda: False, seconds)


def test_a_rolling_upgrade_keeps_training_and_refuses_an_incompatible_release() -> None:
    """Each replica in turn leaves and returns with a newer release. All train on, no sample is lost or trained twice, and all end with the
    same bits. Two that share no protocol with the replicas of the old release are refused by name while there are two of these, also the one
    that an upgraded replica would understand."""
    cluster, record = SimulatedCluster(), new_record()
    back, gone = set[str](), set[str]()
    steps = {"a": (12, 0), "b": (24, 2), "c": (36, 2)}
    results = cluster.play(
        {name: upgraded(cluster, record, number, back, gone, most) for name, (number, most) in steps.items()}
        | {name: late(cluster, record, protocols, back, gone) for name, protocols in (("d", FAR), ("e", NEXT))}
    )
    for name, protocols in (("d", FAR), ("e", NEXT)):
        refused = results.pop(name)
        assert isinstance(refused, DisagreementError), refused
        others = [f"{PROTOCOLS} at 'b'", f"{PROTOCOLS} at 'c'"] + ([f"{AFTER} at 'a'"] if name == "d" else [])
        assert any(
            f"{name!r} cannot take part: protocols: {protocols} there, {there}" in str(refused) for there in others
        )
        assert "install one release on all" in str(refused)
    agree(results, record)
    for name in "abc":
        ledger, lost = check(record, results[name])
        assert results[name].step == STEPS and not lost
    assert record.trained[0].max() == 1.0 and ledger.trained == record.trained[0].sum(), "trained and counted once"
