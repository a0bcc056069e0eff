"""Packing against every possible packing of small cases, and against the plain loader."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random

import pytest

from thinwire.cli import main
from thinwire.errors import ConfigurationError, DataError
from thinwire.plan.packing import Packing, attention_cost, in_order, pack

COST = attention_cost(256)


def best(lengths: list[int], ranks: int) -> float:
    """The least busiest rank of all ways to put whole sequences onto ranks in one micro-step."""
    found = []
    for places in product(range(ranks), repeat=len(lengths)):
        loads = [0.0] * ranks
        for place, length in zip(places, lengths):
            loads[place] += COST(length)
        found.append(max(loads))
    return min(found)


def check(packing: Packing, lengths: list[int], ranks: int, capacity: int) -> None:
    """Every sequence once, on as many ranks as it needs and in one micro-step; no rank holds more than it may."""
    places: Counter[int] = Counter()
    for step in packing.micro_steps:
        assert len(step.ranks) == ranks and any(step.ranks)
        spread = Counter(index for held in step.ranks for index in held)
        assert not set(spread) & set(places)
        places += spread
        for held in step.ranks:
            assert sum(lengths[index] / spread[index] for index in held) <= capacity + 1e-9
    assert places == {index: -(-length // capacity) for index, length in enumerate(lengths)}


def test_within_four_thirds_of_the_best_and_near_it_on_average() -> None:
    draw = Random(0)
    ratios = []
    for _ in range(60):
        ranks = draw.randint(2, 4)
        lengths = [int(10 ** draw.uniform(1, 3.3)) for _ in range(draw.randint(2, 7 if ranks < 4 else 6))]
        packing = pack(lengths, ranks, sum(lengths), COST)
        check(packing, lengths, ranks, sum(lengths))
        assert len(packing.micro_steps) == 1
        ratios.append(packing.makespan / best(lengths, ranks))
    assert max(ratios) <= 4 / 3 and sum(ratios) / len(ratios) < 1.02


@pytest.mark.parametrize("seed", range(8))
def test_mixed_lengths_are_balanced_better_than_in_order(seed: int) -> None:
    draw = Random(seed)
    lengths = [int(10 ** draw.uniform(1.5, 4.2)) for _ in range(200)]
    ranks, capacity = 8, 8192
    ours, plain = pack(lengths, ranks, capacity, COST), in_order(lengths, ranks, capacity, COST)
    check(ours, lengths, ranks, capacity)
    check(plain, lengths, ranks, capacity)
    assert 1 <= ours.imbalance < plain.imbalance and ours.imbalance < 1.25


def test_equal_lengths_need_no_thought() -> None:
    assert pack([100] * 16, 4, 400, COST).imbalance == pytest.approx(1.0)


def test_a_long_sequence_takes_as_many_ranks_as_it_needs_and_no_power_of_two() -> None:
    packing = pack([2500, 100], ranks=4, capacity=1000, cost=COST)
    assert [0 in held for held in packing.micro_steps[0].ranks].count(True) == 3


@pytest.mark.parametrize(
    ("lengths", "ranks", "capacity", "says"),
    [
        ([5000], 4, 1000, "at most 4000 fit; give --capacity 1250"),
        ([10], 0, 10, "at least 1 of each"),
        ([10], 1, 0, "at least 1 of each"),
        ([], 1, 10, "0 sequences"),
        ([5, 0], 1, 10, "the shortest of 0 tokens"),
    ],
)
def test_what_cannot_be_packed(lengths: list[int], ranks: int, capacity: int, says: str) -> None:
    with pytest.raises((ConfigurationError, DataError), match=says):
        pack(lengths, ranks, capacity, COST)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "lengths.txt", tmp_path / "packing.json"
    file.write_text("\n".join(map(str, [9000, 20, 800, 4000, 4000, 30, 1000, 7000])))
    assert main(["plan", "pack", str(file), "--ranks", "2", "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["after"]["imbalance"] < said["before"]["imbalance"]
    assert len(json.loads(out.read_text())) == said["after"]["micro_steps"]
    file.write_text("12 twelve")
    assert main(["plan", "pack", str(file)]) == 1 and "whole numbers of tokens" in capsys.readouterr().err
    assert main(["plan", "pack", str(file), "--model", "2b"]) == 2
