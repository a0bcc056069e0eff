"""Elastic rounds with the data ledger, in virtual time: every sample of an epoch is trained once, or named as lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from elastic_toy import Toy, agree, one_thread, order_faults
from reading_toy import STEP, NotingReader, check, check_once, inner, new_record, train

from thinwire.codecs import Identity, TopK
from thinwire.drivers.elastic.plan import MemberStatus
from thinwire.errors import EndedError, LinkError, PeerError
from thinwire.membership.testing.cluster import Killed, SimulatedCluster
from thinwire.membership.view import View
from thinwire.pieces.feedback import Feedback

__all__ = ["one_thread"]  # a fixture
SPARSE = {"codec": TopK(density=0.002, values=Identity()), "feedback": Feedback()}  # five values of a delta


def test_without_faults_each_replica_reads_its_share() -> None:
    cluster, record = SimulatedCluster(), new_record()
    names = [f"replica-{n}" for n in range(3)]
    results = cluster.play({name: train(cluster, record, 30, 3, 12) for name in names})
    agree(results, record)
    for name in names:
        ledger, lost = check(record, results[name])
        assert ledger.trained == 3 * 12 * STEP and not lost
    assert [lease.version for lease in ledger.leases] == [0, 0, 0], "nothing was split anew"


def test_samples_of_a_dead_replica_and_of_a_newcomer_are_reassigned() -> None:
    cluster, record = SimulatedCluster(), new_record()
    cluster.at("b", "call", lambda: cluster.kill("b"), 4)

    def mortal(name: str) -> Toy:
        return Toy(cluster, name, record, inner=inner, reader=NotingReader(3, 2, STEP, 60)).train(40)

    results = cluster.play({"a": mortal, "b": mortal, "c": train(cluster, record, 60, 2, 40, come=25.0)})
    assert isinstance(results["b"], Killed)
    ledger, _ = check(record, results["a"])
    assert [lease.name for lease in ledger.leases] == ["a", "c"]
    returned = [f["returned"] for n, e, f in record.events if n == "a" and e == "data" and f["returned"]]
    assert returned and returned[0][0][0] == "b"


def test_what_a_member_trains_while_a_round_waits_stays_its_own() -> None:
    """b dies, and its samples are given to others in a round that waits so long that a trains 40 periods meanwhile."""
    cluster, record = SimulatedCluster(), new_record()
    cluster.at("b", "call", lambda: cluster.kill("b"), 4)
    waits: list[str] = []

    def run(name: str) -> Toy:
        toy = Toy(cluster, name, record, inner=inner, reader=NotingReader(3, 3, STEP, 500), least=2)
        loop, reader = toy.elastic.rounds.loop, toy.reader
        view = loop._view
        assert reader is not None

        @torch.no_grad()
        def waited(*about: Any) -> View:
            found, ledger = view(*about), loop.agreed.ledger
            splits = ledger and ledger.leases and ledger.will_split(member.name for member in found.members)
            for _ in range(160 if splits and name == "a" else 0):
                for fragment, parameter in enumerate(toy.parameters):
                    more = inner(toy, fragment)
                    parameter += more
                    toy.trained[fragment] += more
                    record.trained[fragment] += more
                toy.elastic._trained += 1
                toy.elastic.rounds.trained(toy.step, reader.generation, reader.read_count)
            waits.extend([name] if splits else [])
            return found

        loop._view = waited  # type: ignore[method-assign]
        return toy.train(40)

    results = cluster.play(dict.fromkeys("abc", run))
    assert isinstance(results["b"], Killed) and "a" in waits
    assert not [fields for _, event, fields in record.events if event in ("dropped", "warning")]
    driver = results["a"].elastic
    assert driver._trained >= 200 and driver._in_anchors == [driver._trained] * 2, "all of it is in the anchors"


@pytest.mark.parametrize(("at", "steps"), [(6, 6), (9, 4)])
def test_training_that_a_restart_from_the_anchors_drops_is_not_counted(at: int, steps: int) -> None:
    """The weights of replica-1 are NaN in step `at`. Its samples since the last anchors, of so many `steps`, are named as lost, and no
    delta has the weight of their tokens."""
    cluster, record = SimulatedCluster(), new_record()

    def bad(toy: Toy, fragment: int) -> torch.Tensor:
        return inner(toy, fragment) + (torch.nan if (toy.name, toy.step) == ("replica-1", at) else 0)

    def run(name: str) -> Toy:
        return Toy(cluster, name, record, inner=bad, reader=NotingReader(3, 2, STEP, 60), tokens=8.0).train(24)

    results = cluster.play({name: run for name in ("replica-0", "replica-1")})
    ledger, lost = check(record, results["replica-0"])
    assert ledger.trained == 2 * 24 * STEP - len(lost) and len(lost) == steps * STEP
    for one in record.history(results["replica-0"].elastic.rounds.loop.agreed.state_digest):
        assert one.weights == [-8 * float(delta.sum()) / STEP for delta in one.deltas], "each sample is 1 in a delta"


def train_with_faults(seed: int, **pieces: Any) -> tuple[int, int, int]:
    """Runs random faults, joins and returns. Returns the numbers of samples trained, lost and returned."""
    chance = random.Random(seed)
    cluster, record = SimulatedCluster(), new_record()
    begin = [f"replica-{n}" for n in range(chance.choice([2, 3, 3, 4]))]
    late = ["paris", "oslo"][: chance.choice([0, 0, 1, 2])]
    said = order_faults(cluster, chance, chance.randint(0, 6), [*begin, *late][:4])
    samples, steps = chance.choice([12, 40, 100, 500]), 48
    most = (len(begin) + len(late)) // 2 + 1  # with fewer, late members who find nobody would form a run of their own
    settings = {"least": most, "save_every": chance.choice([0, 3, 10]), "keep": 100.0} | pieces
    paces = {name: chance.choice([1.0, 1.0, 1.0, 2.5]) for name in [*begin, *late]}
    results = cluster.play(
        {
            name: train(
                cluster, record, samples, len(begin), steps, come=chance.uniform(3, 60) if name in late else 0.0,
                away=chance.choice([0.0, 0.0, 20.0, 60.0]), step_seconds=paces[name], **settings,
            )
            for name in paces
        }
    )  # fmt: skip
    # a replica that comes back when the others have ended is told where the final weights are
    assert all(isinstance(result, Toy | LinkError | EndedError) for result in results.values()), (seed, said, results)
    toys = [toy for toy in results.values() if isinstance(toy, Toy)]
    if not toys:
        return 0, 0, 0
    agree(results, record)
    if pieces:
        check_once(record, toys[0])
        return 0, 0, 0
    ledgers = {check(record, toy)[0] for toy in toys}
    (ledger,) = ledgers
    returned = {(n, a, b) for _, event, fields in record.events if event == "data" for n, a, b in fields["returned"]}
    return ledger.trained, ledger.lost, sum(b - a for _, a, b in returned)


@pytest.mark.parametrize("seed", range(5))
def test_random_faults_lose_no_sample(seed: int) -> None:
    train_with_faults(seed)


@pytest.mark.parametrize("seed", [5, 6])
def test_random_faults_count_no_sample_twice_with_feedback(seed: int) -> None:
    train_with_faults(seed, **SPARSE)


@pytest.mark.slow
def test_random_fault_schedules_lose_no_sample() -> None:
    """tests/data_ledger runs thousands of ledgers alone. Another range of seeds gives other faults."""
    trained = lost = returned = 0
    for seed in range(1000, 1300):
        a, b, c = train_with_faults(seed)
        trained, lost, returned = trained + a, lost + b, returned + c
    assert trained > 10_000 and lost > 50 and returned > 50, (trained, lost, returned)


@pytest.mark.parametrize(
    "said",
    [
        {"reads": [0, 1]}, {"reads": [0, 1, -1]}, {"reads": [0, 1, 1 << 60]}, {"reads": [0, 1, 2.5]}, {"reads": "abc"},
        {"claims": {"0": [0]}}, {"claims": {"0": [0, 1, 2]}}, {"claims": {"0": [0, 1] * 300}}, {"claims": {"0": {}}},
        {"claims": {"1": [0, 1]}}, {"claims": {"0": [0, True]}}, {"claims": []},
    ],
)  # fmt: skip
def test_a_status_with_an_impossible_data_claim_is_refused(said: dict[str, Any]) -> None:
    facts = MemberStatus(3, "d", brings={"0": 1.0}, reads=[0, 1, 8], claims={"0": [0, 1, 2, 8]}).facts()
    assert MemberStatus.of(facts, "oslo").claim(0).segments == ((2, 8),)
    with pytest.raises(PeerError, match="oslo sent a status"):
        MemberStatus.of(facts | said, "oslo")
