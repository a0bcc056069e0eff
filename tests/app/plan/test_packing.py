"""Packing of sequences into micro-batches: against all packings of small cases, a lower bound, and the order of the data."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from math import exp
from pathlib import Path
from random import Random

import pytest

from thinwire.app.cli import main
from thinwire.app.jobs.packs import attention_cost
from thinwire.errors import ConfigurationError, DataError
from thinwire.lab.plan.packing import Packing, in_order, pack

COST = attention_cost(256)


def best_makespan(lengths: list[int], ranks: int) -> float:
    """The smallest load of the busiest rank over all assignments of whole sequences to ranks in one micro-step."""
    found = []
    for places in product(range(ranks), repeat=len(lengths)):
        loads = [0.0] * ranks
        for place, length in zip(places, lengths):
            loads[place] += COST(length)
        found.append(max(loads))
    return min(found)


def check(packing: Packing, lengths: list[int], ranks: int, capacity: int) -> None:
    """Check that each sequence is packed once, on as many ranks as it needs, and that no batch exceeds the capacity."""
    assert len(packing.ranks) == ranks
    batches = [batch for rank in packing.ranks for batch in rank]
    places = Counter(index for batch in batches for index in batch)
    assert places == {index: -(-length // capacity) for index, length in enumerate(lengths)}
    for rank in packing.ranks:
        held = [index for batch in rank for index in batch]
        assert len(set(held)) == len(held)
    assert all(0 < sum(lengths[index] / places[index] for index in batch) <= capacity + 1e-9 for batch in batches)


def bound(lengths: list[int], ranks: int, capacity: int) -> float:
    """A lower bound of a step: all work divided by the ranks, or the longest single sequence."""
    return max(sum(map(COST, lengths)) / ranks, *(COST(length) / -(-length // capacity) for length in lengths))


def test_packings_are_within_four_thirds_of_the_best_and_close_on_average() -> None:
    draw = Random(0)
    ratios = []
    for _ in range(60):
        ranks = draw.randint(2, 4)
        lengths = [int(10 ** draw.uniform(1, 3.3)) for _ in range(draw.randint(2, 7 if ranks < 4 else 6))]
        capacity = draw.choice([sum(lengths), max(lengths)])
        packing = pack(lengths, ranks, capacity, COST)
        check(packing, lengths, ranks, capacity)
        ratios.append(packing.makespan / best_makespan(lengths, ranks))
    assert max(ratios) <= 4 / 3 and sum(ratios) / len(ratios) < 1.02


@pytest.mark.parametrize(
    ("ranks", "capacity", "count"), [(32, 32768, 2000), (16, 8192, 600), (8, 8192, 2000), (64, 16384, 3000)]
)
def test_packings_of_many_sequences_are_within_one_percent_of_the_bound(ranks: int, capacity: int, count: int) -> None:
    """Ranks do not wait for each other after a micro-batch. With such a barrier these cases take 1.03 to 1.25 times the bound."""
    draw = Random(ranks)
    lengths = [min(ranks * capacity, max(16, int(exp(draw.gauss(7, 1.3))))) for _ in range(count)]
    ours, plain = pack(lengths, ranks, capacity, COST), in_order(lengths, ranks, capacity, COST)
    check(ours, lengths, ranks, capacity)
    check(plain, lengths, ranks, capacity)
    assert max(lengths) > capacity  # some need several ranks
    assert bound(lengths, ranks, capacity) <= ours.makespan <= 1.01 * bound(lengths, ranks, capacity)
    assert ours.makespan < plain.makespan


@pytest.mark.parametrize("seed", range(8))
def test_mixed_lengths_are_balanced_better_than_in_order(seed: int) -> None:
    draw = Random(seed)
    lengths = [int(10 ** draw.uniform(1.5, 4.2)) for _ in range(200)]
    ranks, capacity = 8, 8192
    ours, plain = pack(lengths, ranks, capacity, COST), in_order(lengths, ranks, capacity, COST)
    check(ours, lengths, ranks, capacity)
    check(plain, lengths, ranks, capacity)
    assert 1 <= ours.imbalance < plain.imbalance and ours.makespan <= 1.02 * bound(lengths, ranks, capacity)


def test_the_ranks_of_one_sequence_begin_it_together() -> None:
    """Rank 1 works for 4 s before the shared sequence. Rank 0 waits unless it has short sequences for that time."""
    lengths, one = (8, 4, 4), float
    waits = Packing((((0,),), ((1,), (0,), (2,))), lengths, 4, one)
    assert waits.makespan == 4 + 8 / 2 + 4
    assert Packing((((2,), (0,)), ((1,), (0,))), lengths, 4, one).makespan == 4 + 8 / 2


def test_equal_lengths_are_balanced() -> None:
    assert pack([100] * 16, 4, 400, COST).imbalance == pytest.approx(1.0)


def test_a_long_sequence_may_take_three_ranks() -> None:
    packing = pack([2500, 100], ranks=4, capacity=1000, cost=COST)
    assert [(0,) in batches for batches in packing.ranks].count(True) == 3


@pytest.mark.parametrize(
    ("lengths", "ranks", "capacity", "says"),
    [
        ([5000], 4, 1000, "at most 4000 fit; give --capacity 1250"),
        ([10], 0, 10, "at least 1 of each"),
        ([10], 1, 0, "at least 1 of each"),
        ([10], 10**20, 10, "at most 1,000,000 ranks"),
        ([], 1, 10, "0 sequences"),
        ([5, 0], 1, 10, "the shortest of 0 tokens"),
    ],
)
def test_sequences_that_do_not_fit_and_invalid_settings_are_refused(
    lengths: list[int], ranks: int, capacity: int, says: str
) -> None:
    with pytest.raises((ConfigurationError, DataError), match=says):
        pack(lengths, ranks, capacity, COST)


def test_the_verb_writes_a_better_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "lengths.txt", tmp_path / "new/packing.json"
    file.write_text("\n".join(map(str, [9000, 20, 800, 4000, 4000, 30, 1000, 7000])))
    assert main(["plan", "pack", str(file), "--ranks", "2", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert f"written: {out}" in printed.err
    assert said["after"]["imbalance"] < said["before"]["imbalance"]
    packed = json.loads(out.read_text())
    assert len(packed) == 2 and max(map(len, packed)) == said["after"]["micro_batches"]
    file.write_text("12 twelve")
    assert main(["plan", "pack", str(file)]) == 1 and "whole numbers of tokens" in capsys.readouterr().err
    assert main(["plan", "pack", str(file), "--model", "2b"]) == 2
