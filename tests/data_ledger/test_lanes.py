"""Readers of replicas with micro-batches of different sizes: each sample once an epoch, and one order for every way to read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.data_ledger import FixedReader, LanesReader, drawn_for_ever, lanes_of
from thinwire.errors import DataError

BATCHES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def opened(seed: int, batches: list[int], samples: int) -> list[LanesReader]:
    readers = [LanesReader(seed, batches, index) for index in range(len(batches))]
    for reader in readers:
        reader.open(samples)
    return readers


@given(st.integers(0, 99), BATCHES, st.integers(1, 4))
def test_replicas_read_every_sample_of_an_epoch_once(seed: int, batches: list[int], steps: int) -> None:
    """An epoch ends for all replicas in the same step, and the next one begins there."""
    readers = opened(seed, batches, samples := sum(batches) * steps)
    for epoch in range(2):
        read = [
            int(one)
            for step in range(epoch * steps, (epoch + 1) * steps)
            for reader, batch in zip(readers, batches)
            for one in reader.micro_batch(step, batch)
        ]
        assert sorted(read) == list(range(samples))
    facts = readers[0].facts()
    assert facts == {"in_an_epoch": samples, "trained": 2 * samples, "lost": 0, "in_flight": 0}


@given(st.integers(0, 99), BATCHES, st.integers(1, 4))
def test_samples_drawn_one_by_one_are_those_of_the_micro_batches(seed: int, batches: list[int], steps: int) -> None:
    for reader, one_by_one, batch in zip(opened(seed, batches, 97), opened(seed, batches, 97), batches):
        drawn = drawn_for_ever(one_by_one)
        for step in range(steps):
            assert [next(drawn) for _ in range(batch)] == reader.micro_batch(step, batch).tolist()


@given(st.integers(0, 99), BATCHES, st.integers(1, 4))
def test_a_reader_resumes_from_its_notes(seed: int, batches: list[int], steps: int) -> None:
    for index, reader in enumerate(opened(seed, batches, 61)):
        for step in range(steps):
            reader.micro_batch(step, batches[index])
        resumed = LanesReader(seed + 1, batches, index)
        resumed.load_notes(json.loads(json.dumps(reader.notes())))
        assert resumed.notes() == reader.notes() and resumed.facts() == reader.facts()
        drawn = drawn_for_ever(resumed)
        follows = reader.micro_batch(steps, batches[index])
        assert [next(drawn) for _ in range(batches[index])] == follows.tolist()
        assert np.array_equal(resumed.micro_batch(steps, batches[index]), follows)


def test_a_run_whose_data_have_changed_begins_an_epoch_of_them() -> None:
    for steps in range(1, 5):
        resumed = opened(0, [4, 2], 12)
        for index, reader in enumerate(opened(0, [4, 2], 60)):
            for step in range(steps):
                reader.micro_batch(step, [4, 2][index])
            told = resumed[index].load_notes(reader.notes())
            assert told.startswith("the data have 12 samples, and had 60: a new epoch")
        read = [
            int(one)
            for step in (steps, steps + 1)
            for reader, batch in zip(resumed, [4, 2])
            for one in reader.micro_batch(step, batch)
        ]
        assert sorted(read) == list(range(12))
        again = opened(0, [4, 2], 12)[0]
        assert again.load_notes(resumed[0].notes()) == "" and again.notes() == resumed[0].notes()


def test_equal_micro_batches_are_read_as_by_other_fixed_groups() -> None:
    for index, reader in enumerate(opened(3, [4, 4], 40)):
        other = FixedReader(3, ["replica-0", "replica-1"], f"replica-{index}")
        other.open(40)
        assert all(np.array_equal(reader.micro_batch(step, 4), other.micro_batch(step, 4)) for step in range(12))


def test_notes_of_other_micro_batches_are_refused() -> None:
    before, after = opened(0, [4, 2], 40)[0], opened(0, [8, 2], 40)[0]
    with pytest.raises(DataError, match="2 parts of the data there, 4 are needed"):
        after.load_notes(before.notes())
    empty = LanesReader(0, [4, 2], 0)
    assert empty.samples is None and empty.notes() == {}
    empty.load_notes({})
    assert empty.samples is None


def test_lanes_follow_the_greatest_common_divisor() -> None:
    assert [list(lanes) for lanes in lanes_of([6, 4])] == [[0, 1, 2], [3, 4]]
    assert [list(lanes) for lanes in lanes_of([5])] == [[0]]
