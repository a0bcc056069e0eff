"""Rounds among replicas that come and go, in virtual time: faults at every phase of a round, checked by exact sums (elastic_toy.py)."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_toy import PHASES, SIZES, RecordedRun, Toy, agree, one_thread, order_faults, train, train_all, training

import thinwire as tw
from thinwire.comm import state_transfer
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.elastic.messages import Outcome, Ready
from thinwire.drivers.elastic.plan import RoundPlan
from thinwire.drivers.fragment import first_state
from thinwire.errors import EndedError
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous
from thinwire.membership.testing.lighthouse import SimulatedVoteStore
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture


def test_without_faults_no_delta_is_lost() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    results = train_all(cluster, record)
    agree(results, record)
    rounds = record.history(results["a"].elastic.rounds.loop.agreed.state_digest)
    assert len(rounds) == 12 and all(len(one.deltas) == 3 for one in rounds)


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("phase", PHASES)
def test_others_agree_when_a_replica_is_killed_at_any_phase(phase: str, nth: int) -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.at("b", phase, lambda: cluster.kill("b"), nth)
    results = train_all(cluster, record)
    reached = isinstance(results["b"], Killed)
    assert reached or isinstance(results["b"], Toy)
    agree(results, record)
    assert isinstance(results["a"], Toy) and isinstance(results["c"], Toy)


@pytest.mark.parametrize("phase", PHASES)
def test_a_restarted_replica_takes_part_again(phase: str) -> None:
    """Who settles a vote first is chance, so its fourth time may come in the last rounds; then nobody is killed."""
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.at("b", phase, lambda: cluster.kill("b") if cluster.time.now < 30 else None, 4)
    results = cluster.play({name: train(cluster, record, steps=40, least=2) for name in "abc"})
    agree(results, record)
    assert len(results) == 3 and all(isinstance(toy, Toy) for toy in results.values()), results


def test_a_slow_replica_delays_nobody_and_loses_no_delta() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    results = cluster.play(
        {name: train(cluster, record, least=2, step_seconds=9.0 if name == "s" else 1.0) for name in "abs"}
    )
    agree(results, record)
    # the last deltas of s may be missing; if s calls after the others have finished, it gets an error
    assert (
        isinstance(results["a"], Toy) and isinstance(results["b"], Toy) and isinstance(results["s"], Toy | tw.LinkError)
    )
    assert any(event == "round" and fields["members"] == ["a", "b"] for _, event, fields in record.events)


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0, 4.0, 5.0])
def test_a_replica_of_any_speed_counts_in_rounds_it_takes_part_in(ratio: float) -> None:
    """The steps of s fall between those of the others. At twice the step time, s could otherwise only bring the fragment that is not due."""
    cluster, record = SimulatedCluster(), RecordedRun()
    settings = {"steps": 120, "least": 2, "grace": 1.0}
    results = cluster.play(
        {name: train(cluster, record, step_seconds=ratio if name == "s" else 1.0, **settings) for name in "abs"}
    )
    agree(results, record)
    rounds = [fields for name, event, fields in record.events if name == "s" and event == "round"]
    part = [fields for fields in rounds if len(fields["members"]) == 3 and fields["fragment"] >= 0]
    assert len(part) >= 10 and sum("s" in fields["counted"] for fields in part) >= 0.9 * len(part)


@pytest.mark.parametrize("late", [5.0, 20.0])
def test_a_stragglers_delta_counts_within_the_grace_or_in_a_later_round(late: float) -> None:
    cluster, record = SimulatedCluster(), RecordedRun()

    def inner(toy: Toy, fragment: int) -> torch.Tensor:
        if (toy.name, toy.step, fragment) == ("c", 4, 0):
            with cluster.time:
                cluster.wait("c", lambda: False, late)
        return torch.full((SIZES[fragment],), -{"a": 1.0, "b": 2.0, "c": 3.0}[toy.name])

    results = cluster.play({name: train(cluster, record, steps=40, least=2, grace=10.0, inner=inner) for name in "abc"})
    agree(results, record)
    first, *later = [
        one for one in record.history(results["a"].elastic.rounds.loop.agreed.state_digest) if one.fragment == 0
    ]
    assert [float(delta[0]) for delta in first.deltas] == ([4.0, 8.0, 12.0] if late < 10 else [4.0, 8.0])
    if late > 10:  # then the delta that c brings later starts with the four steps it had trained
        assert next(float(one.deltas[2][0]) for one in later if len(one.deltas) == 3) == 12.0


def test_a_state_transfer_of_any_length_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece takes 3 s and all pieces more than 30 s; a single message may take at most 10 s."""
    cluster, record, pieces = SimulatedCluster(), RecordedRun(), state_transfer._pieces
    sent: list[str] = []

    def slowly(whole: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in pieces(whole):
            with cluster.time:
                cluster.wait(threading.current_thread().name, lambda: False, 3.0)
            sent.append(threading.current_thread().name)
            yield piece

    monkeypatch.setattr(state_transfer, "MESSAGE_NBYTES", 32)
    monkeypatch.setattr(state_transfer, "_pieces", slowly)
    settings = {"steps": 60, "least": 2}

    def joins_late(name: str) -> Toy:
        with cluster.time:
            cluster.wait(name, lambda: False, 10.0)
        return train(cluster, record, **settings)(name)

    results = cluster.play({name: train(cluster, record, **settings) for name in "ab"} | {"c": joins_late})
    agree(results, record)
    assert sent.count("c") > 10 and any(event == "caught_up" for name, event, _ in record.events if name == "c")
    assert all(f["reason"] == "" for _, event, f in record.events if event == "round")
    assert not [event for _, event, _ in record.events if event == "alone"]


@pytest.mark.parametrize(
    ("alpha", "delay", "flight"), [(0.5, 2, 2), (0.5, 2, 8), (0.0, 0, 3), (0.0, 2, 8), (1.0, 2, 8)]
)
def test_a_late_landing_keeps_the_steps_of_the_flight(alpha: float, delay: int, flight: int) -> None:
    """The round departs at 3 with anchor 5; the parameters have moved to 3 − flight since; the new anchor is 1."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(9, delay), merge=tw.pieces.merge.Mix(alpha), outer=tw.pieces.outer.Average()
    )
    parameter = torch.nn.Parameter(torch.full((4,), 5.0))
    piece = first_state(strategy, tw.pieces.partition.Fragment("all", [("all", parameter)]), 0, 0, 1)
    made = training(strategy, [parameter], [piece], lambda *_, **__: None)
    elastic = ElasticDriver(made, SimulatedCluster().membership("a", least=1))
    parameter.data.fill_(3.0 - flight)
    counted = Ready(0, torch.full((4,), 2.0), 1.0, step=10, feedback={})
    elastic._take_over(Outcome(0, 0, torch.ones(4), counted=counted), torch.ones(4), step=10 + flight)
    kept = -flight + (1 - alpha) * delay  # of the steps trained since, all remain except that share of `delay` steps
    torch.testing.assert_close(parameter.data, torch.full((4,), 1.0 + alpha * (3.0 - 1.0) + kept))


def test_all_steps_of_a_delta_that_was_taken_back_are_still_to_be_sent() -> None:
    """Not one step: the guard would judge the next delta by the steps since, and not by all that it holds."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(9))
    parameter = torch.nn.Parameter(torch.zeros(4))
    piece = first_state(strategy, tw.pieces.partition.Fragment("all", [("all", parameter)]), 0, 0, 1)
    elastic = ElasticDriver(
        training(strategy, [parameter], [piece], lambda *_, **__: None), SimulatedCluster().membership("a", least=1)
    )
    elastic._trained = 9.0
    delta = elastic._bring(0, 9)
    elastic._take_over(Outcome(0, 0, torch.ones(4), counted=delta), torch.ones(4), step=9)
    assert elastic.facts()["travelled"] == [9.0]
    elastic._trained = 18.0
    later = elastic._bring(0, 18)
    elastic._take_over(Outcome(0, 0, torch.ones(4), returned=delta), torch.zeros(4), step=18)
    assert elastic.facts()["travelled"] == [0.0]
    elastic._take_over(Outcome(0, 1, torch.ones(4), counted=later), torch.ones(4), step=18)
    assert elastic.facts()["travelled"] == [9.0], "those of the first are still to be sent"


def test_a_whole_period_after_rounds_of_single_steps_counts_in_full() -> None:
    """Rounds follow each other at every step while others make up for an outage. The guard took the next whole period for a broken batch."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4))
    parameter = torch.nn.Parameter(torch.zeros(4))
    piece = first_state(strategy, tw.pieces.partition.Fragment("all", [("all", parameter)]), 0, 0, 1)
    elastic = ElasticDriver(
        training(strategy, [parameter], [piece], lambda *_, **__: None), SimulatedCluster().membership("a", least=1)
    )
    for number, steps in enumerate([1] * 8 + [4]):
        with torch.no_grad():
            parameter -= float(steps)
        elastic._trained += steps
        delta = elastic._bring(0, number)
        assert torch.equal(delta.delta, torch.full((4,), float(steps)))
        elastic._take_over(
            Outcome(0, number, parameter.detach().clone(), counted=delta), parameter.detach().clone(), number
        )


def test_a_frozen_replica_takes_part_again_after_it_thaws() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()

    def freeze() -> None:
        cluster.freeze("b")
        cluster.later(30.0, lambda: cluster.thaw("b"))

    cluster.at("b", "post", freeze, 7)
    results = cluster.play({name: train(cluster, record, steps=60) for name in "abc"})
    agree(results, record)


def test_a_cut_link_and_a_damaged_packet_lose_no_delta() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.later(5.0, lambda: cluster.damage("a", "b"))
    cluster.later(20.0, lambda: cluster.cut("a", "c"))
    cluster.later(45.0, lambda: cluster.heal("a", "c"))
    results = cluster.play({name: train(cluster, record, steps=80) for name in "abc"})
    agree(results, record)
    assert any(event == "round" and "damaged" in fields["reason"] for _, event, fields in record.events)


@pytest.mark.parametrize(
    ("nth", "save_every"),
    [
        *((5, 3), (8, 5), (12, 7), (8, 7)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((5, 5), (5, 7), (8, 3), (12, 3), (12, 5))),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_return_from_a_checkpoint_counts_no_delta_twice(phase: str, nth: int, save_every: int) -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.at("b", phase, lambda: cluster.kill("b"), nth)
    settings = {"steps": 40, "least": 2, "save_every": save_every}
    results = cluster.play({name: train(cluster, record, **settings) for name in "abc"})
    agree(results, record)
    state_digest = results["a"].elastic.rounds.loop.agreed.state_digest
    # Increments are positive, so a delta counted twice would exceed the sum of what was trained.
    for fragment in range(2):
        sent = sum(
            (delta for one in record.history(state_digest) if one.fragment == fragment for delta in one.deltas),
            torch.zeros(SIZES[fragment]),
        )
        assert (-sent <= record.trained[fragment] + 1e-3).all()


def test_replicas_killed_together_resume_from_their_checkpoints() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.later(17.5, lambda: [cluster.kill(name) for name in "abc"])
    cluster.later(17.5, cluster.lighthouse.stop)
    cluster.later(25.0, cluster.lighthouse.start)
    every = {"a": 3, "b": 4, "c": 5}
    results = cluster.play({name: train(cluster, record, steps=40, least=3, save_every=every[name]) for name in "abc"})
    agree(results, record)
    assert all(toy.restored for toy in results.values())
    numbers = [
        fields["round"]
        for name, event, fields in record.events
        if event == "round" and name == "a" and fields["fragment"] >= 0
    ]
    assert numbers[0] == 0 and numbers.count(0) == 1  # no replica started again from step 0


# The phases of one vote and of the next ones, until training is steady; then one more.
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("phase", ["call", "put", "all", "settle", "wait", "post"])
def test_a_lighthouse_death_at_any_phase_loses_no_delta(phase: str, nth: int) -> None:
    """If it dies during a vote, some members may know of the commit and others not; their next statuses tell."""
    cluster, record = SimulatedCluster(), RecordedRun()

    def restart() -> None:
        cluster.lighthouse.stop()
        cluster.later(20.0, cluster.lighthouse.start)

    cluster.at("b", phase, restart, nth)
    results = cluster.play({name: train(cluster, record, steps=40) for name in "abc"})
    agree(results, record)
    assert all(isinstance(toy, Toy) for toy in results.values()), results


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_replica_that_alone_learned_of_a_commit_gets_its_delta_back(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lighthouse dies after it has told one member of the commit, which then freezes; the others vote again without it."""
    cluster, record = SimulatedCluster(), RecordedRun()
    settle, told = SimulatedVoteStore.settle, []

    def settled(vote_store: SimulatedVoteStore, key: str, value: bytes) -> bytes:
        with cluster.time:
            first = key not in cluster.lighthouse.written
            answer = settle(vote_store, key, value)
            told.extend([vote_store._name] * first)
            if first and len(told) == nth:
                cluster.lighthouse.stop()
                cluster.later(3.0, cluster.lighthouse.start)
                cluster.freeze(vote_store._name)
                cluster.later(30.0, lambda name=vote_store._name: cluster.thaw(name))
            return answer

    monkeypatch.setattr(SimulatedVoteStore, "settle", settled)
    results = cluster.play({name: train(cluster, record, steps=80, least=2) for name in "abc"})
    alone = told[nth - 1]
    assert any(name == alone and event == "caught_up" for name, event, _ in record.events), alone
    assert all(isinstance(toy, Toy) for toy in results.values()), results
    agree(results, record)


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_frozen_until_the_end_takes_over_the_final_state(phase: str, nth: int) -> None:
    """A round needs three of four members, and two are present when the frozen one thaws."""
    cluster, record, frozen = SimulatedCluster(), RecordedRun(), list[str]()

    def freeze() -> None:
        cluster.freeze("d")
        cluster.later(150.0, lambda: cluster.thaw("d"))
        frozen.append("d")

    cluster.at("d", phase, freeze, nth)
    results = cluster.play({name: train(cluster, record, least=3, keep=300.0) for name in "abcd"})
    agree(results, record)
    joined = any(name == "d" and event == "round" for name, event, _ in record.events)
    assert all(isinstance(results[name], Toy) for name in ("abcd" if joined else "abc")), results
    kept = [(name, fields["late"]) for name, event, fields in record.events if event == "keeps"]
    missed = any(event == "round" and "d" not in fields["members"] for _, event, fields in record.events)
    # otherwise it froze during the vote on the end
    assert kept == ([("a", ["d"])] if frozen and joined and (missed or kept) else [])
    assert cluster.time.now < 220  # 150 s frozen, and its own steps before and after


@pytest.mark.parametrize(("phase", "nth"), [("post", 6), ("put", 4), ("wait", 2), ("call", 5)])
def test_a_replica_that_arrives_after_the_end_is_told_the_run_is_over(phase: str, nth: int) -> None:
    """Two replicas arrive late. Both together could hold rounds alone, and one has a checkpoint."""
    cluster, record = SimulatedCluster(), RecordedRun()
    settings = {"least": 2, "keep": 60.0}

    def freeze() -> None:
        for name in "cd":
            cluster.freeze(name)
            cluster.later(150.0, lambda name=name: cluster.thaw(name))

    cluster.at("c", phase, freeze, nth)
    results = cluster.play({name: train(cluster, record, **settings) for name in "abcd"})
    agree(results, record)
    assert all(isinstance(results[name], Toy) for name in "ab"), results
    assert all(isinstance(results[name], EndedError) for name in "cd"), results
    assert "from where a, b" in str(results["c"]) and cluster.time.now < 200


def test_a_member_lost_in_the_round_of_a_joiner_does_not_end_the_joiner() -> None:
    """The first message of a is to b, which takes over its state. It does not arrive, because a dies, and comes back."""
    cluster, record = SimulatedCluster(), RecordedRun()

    def lose() -> None:
        cluster.cut("a", "b")
        cluster.later(1.0, lambda: cluster.kill("a"))
        cluster.later(2.0, lambda: cluster.heal("a", "b"))

    cluster.at("a", "post", lose)

    def late(name: str) -> Toy:
        ThreadRendezvous(cluster, name).sleep(15.0)
        return train(cluster, record, least=1)(name)

    results = cluster.play({"a": train(cluster, record, least=1), "b": late})
    assert cluster.killed == set() and all(isinstance(result, Toy) for result in results.values()), results


def test_a_member_that_voted_with_one_that_dies_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While b is frozen, c dies after its ballot and returns at once. If a waited out the time of the vote, b and c would go on from an older
    state, and a would lose deltas that were counted.
    """
    cluster, record, decide = SimulatedCluster(), RecordedRun(), View.decide

    def decided(view: View, question: str, yes: bool, seconds: float, *what: str) -> bool:
        own = view.members[view.group.rank].name
        if own == "c" and question == "round 5":
            cluster.at("c", "all", lambda: cluster.kill("c"), cluster._passed["c", "all"] + 1)
            ThreadRendezvous(cluster, own).sleep(0.5)  # a has voted then
        return decide(view, question, yes, seconds, *what)

    def freeze() -> None:
        cluster.freeze("b")
        cluster.later(17.0, lambda: cluster.thaw("b"))

    monkeypatch.setattr(View, "decide", decided)
    cluster.at("b", "called", freeze, 5)
    results = cluster.play({name: train(cluster, record, steps=60, least=2, keep=60.0) for name in "abc"})
    assert all(isinstance(toy, Toy) for toy in results.values()) and not results["a"].restored, results
    agree(results, record)


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_leave_equal_anchors(seed: int) -> None:
    chance, names = random.Random(seed), "abcd"[: 2 + seed % 3]
    cluster, record = SimulatedCluster(order=seed), RecordedRun()
    said = order_faults(cluster, chance, 8, names)
    print(f"seed {seed}: {'; '.join(said)}")
    least = len(names) // 2 + 1
    results = cluster.play({name: train(cluster, record, steps=60, least=least, keep=20.0) for name in names})
    agree(results, record)
    # a replica that returns when the final state is kept no longer gets an error
    assert all(isinstance(result, Toy | tw.LinkError | EndedError) for result in results.values()), results
    ends = [f for _, event, f in record.events if event == "round" and f["fragment"] < 0 and f["committed"]]
    lost = {name for name, result in results.items() if not isinstance(result, Toy)}
    if len(names) - len(lost) < least:  # whoever is killed after its vote on the end counts as present there
        assert len(lost) < len(names) and lost <= {name for end in ends for name in end["members"]}, results


def test_no_module_reads_the_wall_clock() -> None:
    """Waits use monotonic time or the cluster's time, so a jump of a machine's clock changes nothing. Only comm/secure reads the
    calendar, for the dates of certificates and invitations.
    """
    source = Path(tw.__file__).parent
    paths = [*source.glob("comm/*.py"), *source.rglob("membership/**/*.py"), *source.glob("drivers/elastic/*.py")]
    assert len(paths) > 20
    for path in paths:
        assert not re.search(
            r"\btime\.(time|time_ns)\(|\bdatetime\.(now|utcnow)|\blocaltime|\bgmtime", path.read_text()
        ), path


def test_no_two_rounds_of_a_run_have_one_number() -> None:
    """Keys of stochastic rounding and tags of messages hold it: a round that failed is held again under the next one."""
    cluster, record = SimulatedCluster(), RecordedRun()
    cluster.later(5.0, lambda: cluster.damage("a", "b"))
    agree(train_all(cluster, record), record)
    rounds = [(name, fields) for name, event, fields in record.events if event == "round" and fields["counted"]]
    assert any(fields["committed"] is False for _, fields in rounds)
    for member in "abc":
        numbers = [fields["round"] for name, fields in rounds if name == member]
        assert numbers == sorted(set(numbers))


def test_a_round_whose_delta_was_given_back_meanwhile_is_held_again_without_it() -> None:
    """Its replica may have got back an earlier delta that this one holds too: both would count it."""
    cluster, record = SimulatedCluster(), RecordedRun()

    def run(name: str) -> Toy:
        toy = Toy(cluster, name, record)
        loop = toy.elastic.rounds.loop
        level = loop._level

        def renewed(view: View, plan: RoundPlan, *rest: Any) -> None:
            level(view, plan, *rest)
            if name == "a" and plan.round == 3:
                for renewals in (toy.elastic._renewals, loop._renewals):
                    renewals[plan.fragment] += 1

        loop._level = renewed  # type: ignore[method-assign]
        return toy.train(24)

    agree(cluster.play({name: run for name in "abc"}), record)
    rounds = [fields for name, event, fields in record.events if name == "a" and event == "round"]
    (refused,) = [fields for fields in rounds if "may hold one that was counted" in fields["reason"]]
    assert refused["committed"] is False and "a" in rounds[-2]["counted"]
