"""The order of an epoch: a permutation computed on demand, divided into one lane for each replica."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.data_ledger import DataLedger, FixedReader, Order, Permutation, part_of
from thinwire.rng import derive


@given(st.integers(1, 3000), st.integers(0, 2**62))
def test_a_permutation_contains_each_index_once(size: int, seed: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, seed)(np.arange(size))), np.arange(size))


@given(st.integers(1, 2**48), st.integers(0, 2**62))
def test_a_large_permutation_gives_distinct_indices_in_range(size: int, seed: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    places = Permutation(size, seed)(index)
    assert ((places >= 0) & (places < size)).all() and len(np.unique(places)) == len(index)


def test_a_permutation_mixes_and_depends_on_its_seed() -> None:
    n = 10_000
    index = np.arange(n)
    places = Permutation(n, 1)(index)
    assert abs(np.corrcoef(index, places)[0, 1]) < 0.05
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert (places == Permutation(n, 2)(index)).mean() < 0.005
    one_by_one = np.concatenate([Permutation(n, 1)(index[i : i + 1]) for i in range(20)])
    assert np.array_equal(one_by_one, places[:20])


@pytest.mark.parametrize(
    ("size", "seed", "begin"),
    [
        (5, 3, [3, 4, 0, 2, 1]),
        (17, 0, [2, 5, 11, 6, 4, 13, 14, 9, 16, 0]),
        (1000, 7, [422, 421, 853, 654, 676, 929, 169, 125, 760, 800]),
    ],
)
def test_a_permutation_is_the_same_in_every_version(size: int, seed: int, begin: list[int]) -> None:
    """Otherwise a run resumed from a checkpoint of an older version would read some samples twice and others never."""
    assert Permutation(size, seed)(np.arange(len(begin))).tolist() == begin


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**62))
def test_every_epoch_contains_each_sample_once_in_another_order(samples: int, lanes: int, seed: int) -> None:
    order = Order(samples, seed, lanes)
    both = order.samples_at(np.arange(2 * samples))
    for epoch in (both[:samples], both[samples:]):
        assert np.array_equal(np.sort(epoch), np.arange(samples))
    assert samples < 20 * lanes or not np.array_equal(both[:samples], both[samples:])
    backwards = order.samples_at(np.arange(2 * samples)[::-1])
    assert np.array_equal(backwards[::-1], both)


def test_each_part_of_an_epoch_holds_the_samples_of_one_lane() -> None:
    order = Order(11, seed=5, lanes=3)
    for lane in range(3):
        begin, end = part_of(11, 3, lane)
        assert set(order.samples_at(np.arange(begin, end))) == set(range(lane, 11, 3))


@given(st.integers(8, 200), st.integers(1, 5), st.integers(0, 2**31), st.integers(0, 60))
def test_a_run_of_a_fixed_group_reads_the_order_of_earlier_versions(
    samples: int, replicas: int, seed: int, step: int
) -> None:
    """Replica m reads the samples m, m + replicas, ... in another order in every epoch."""
    names = [f"replica-{m}" for m in range(replicas)]
    ledger = DataLedger(samples, seed, replicas, 2, 8, 4).begin(names)
    for m, name in enumerate(names):
        own = len(range(m, samples, replicas))
        due = []
        for count in range(step * 3, step * 3 + 3):
            epoch, place = divmod(count, own)
            order = Permutation(own, derive(seed, "order", m, epoch))
            due.append(int(order(np.array([place]))[0]) * replicas + m)
        fixed = FixedReader(seed, names, name)
        fixed.open(samples)
        assert fixed.micro_batch(step, 3).tolist() == due
        lease = ledger.lease(name)
        assert lease is not None and ledger.read(lease, step * 3, step * 3 + 3).tolist() == due
