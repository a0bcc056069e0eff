"""The fault matrix: eight faults among four replicas, with jitter, several seeds, equal and unequal links; each is diagnosed correctly.

pytest -s -m slow tests/app/diagnosis/test_fault_matrix.py     prints the confusion table
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from wan_cluster import RecordedRounds, WanCluster, train_rounds, uneven, uniform

from thinwire.app.diagnosis import Finding
from thinwire.exchange import TwoShot

NAMES = ("amber", "birch", "cedar", "delta")
FROM = 7  # the round before which the fault begins
OVERLAPS = (0.0, 0.3, 0.8)
pytestmark = pytest.mark.usefixtures("inline")

Fault = Callable[[WanCluster], None]


def slower(way: tuple[str, str]) -> Fault:
    return lambda cluster: cluster.wan.slower.__setitem__(way, 10.0)


# name: (faults, expected finding, culprits)
CASES: dict[str, tuple[dict[int, Fault], str, set[str]]] = {
    "healthy": ({}, "nothing", set()),
    "stopped before entering": (
        {FROM: lambda cluster: cluster.later(0.01, lambda: cluster.freeze("cedar"))}, "non-communication hang: replica", {"cedar"},
    ),
    "stopped during": (
        {FROM: lambda cluster: cluster.at("cedar", "post", lambda: cluster.freeze("cedar"), nth=2 * FROM + 4)},
        "communication hang: replica", {"cedar"},
    ),
    "link cut": ({FROM: lambda cluster: cluster.cut("birch", "delta")}, "communication hang: link", {"birch", "delta"}),
    "link 10x slower": ({FROM: slower(("amber", "birch"))}, "communication slow: link", {"amber", "birch"}),
    "egress 10x slower": ({FROM: slower(("birch", "*"))}, "communication slow: sender side", {"birch"}),
    "ingress 10x slower": ({FROM: slower(("*", "cedar"))}, "communication slow: receiver side", {"cedar"}),
    "sleeps in every step": ({}, "non-communication slow: replica", {"delta"}),
}  # fmt: skip


def rounds_of(case: str, seed: int, rounds: int = 18) -> RecordedRounds:
    wan = uneven(NAMES, seed) if seed % 2 else uniform(NAMES)

    def own(name: str, number: int) -> float:
        return 4.0 if case == "sleeps in every step" and name == "delta" and number >= FROM else 1.0

    return train_rounds(wan, seed, rounds, CASES[case][0], own, OVERLAPS[seed % 3])


def words(finding: Finding) -> str:
    return f"{finding.syndrome}: {finding.side}"


def diagnosed(recorded: RecordedRounds) -> tuple[Counter[tuple[str, frozenset[str]]], int | None]:
    """Returns all findings of the run, and after how many rounds since the fault the first came."""
    found: Counter[tuple[str, frozenset[str]]] = Counter()
    first = None
    for number, findings in recorded.slow():
        if findings and first is None:
            first = number - FROM + 1
        found.update((words(finding), frozenset(finding.who)) for finding in findings)
    stuck = recorded.stuck()
    found.update((words(finding), frozenset(finding.who)) for finding in stuck)
    return found, 1 if stuck and first is None else first


def check(case: str, seed: int) -> tuple[str, int | None]:
    found, rounds = diagnosed(rounds_of(case, seed))
    _, expected, culprits = CASES[case]
    assert set(found) == ({(expected, frozenset(culprits))} if culprits else set()), (
        f"{case}, seed {seed}: {dict(found)}"
    )
    return expected, rounds


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_diagnosed(case):
    for seed in range(3):
        check(case, seed)


def test_faults_under_a_two_stage_exchange_are_diagnosed():
    """The owner's mean waits for the shards of all replicas; the owner is not blamed for that."""
    faults: dict[int, Fault] = {FROM: slower(("birch", "*"))}
    found, _ = diagnosed(train_rounds(uniform(NAMES), 1, 18, faults, exchange=TwoShot(), numel=1600))
    assert set(found) == {("communication slow: sender side", frozenset({"birch"}))}
    assert not diagnosed(train_rounds(uneven(NAMES, 3), 3, 18, exchange=TwoShot(), numel=1600))[0]


@pytest.mark.slow
def test_the_confusion_table_is_diagonal():
    """Each fault runs with seeds 0 to 11, the healthy case with 0 to 59. Links are equal for even seeds and unequal for odd ones."""
    table: dict[str, Counter[str]] = {}
    rounds: dict[str, list[int]] = {}
    for case in CASES:
        for seed in range(60 if case == "healthy" else 12):
            found, first = diagnosed(rounds_of(case, seed))
            _, expected, culprits = CASES[case]
            for what, who in found or {("nothing", frozenset()): 1}:
                right = what == expected and (not culprits or who == culprits)
                table.setdefault(case, Counter())[what if right else f"{what}: {', '.join(sorted(who))}"] += 1
            if first is not None:
                rounds.setdefault(case, []).append(first)
    print()
    for case, row in table.items():
        took = sorted(rounds.get(case, [0]))
        print(f"{case:26}{dict(row)}  rounds until found: median {took[len(took) // 2]}, at most {took[-1]}")
    for case, row in table.items():
        assert set(row) == {CASES[case][1]}, case


@pytest.mark.slow
def test_normal_straggling_gives_no_finding():
    """Replicas differ in speed by up to 1.7, pause two seconds now and then, and have jitter of up to 60 %."""
    for seed in range(20):
        chance = random.Random(seed)
        speed = {name: chance.uniform(1.0, 1.7) for name in NAMES}
        pauses = {(chance.choice(NAMES), chance.randrange(40)) for _ in range(8)}
        wan = uneven(NAMES, seed)
        wan.jitter = 0.6

        def own(name: str, number: int, speed=speed, pauses=pauses) -> float:
            return speed[name] + (2.0 if (name, number) in pauses else 0.0)

        found, _ = diagnosed(train_rounds(wan, seed, 40, own=own, overlap=OVERLAPS[seed % 3]))
        assert not found, f"seed {seed}: {dict(found)}"
