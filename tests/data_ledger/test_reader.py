"""What a reader of a fixed group draws, counts and resumes; both kinds, as the only ones of their group and beside others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thinwire.data_ledger import FixedReader, LanesReader
from thinwire.data_ledger.reader import Reader
from thinwire.errors import DataError

NAMES = ["replica-0", "replica-1", "replica-2"]
MAKE = {
    "fixed": lambda: FixedReader(7, NAMES, "replica-1"),
    "fixed, alone": lambda: FixedReader(7, ["replica-0"], "replica-0"),
    "lanes": lambda: LanesReader(7, [2, 4, 2], 1),
    "lanes, alone": lambda: LanesReader(7, [4], 0),
}
BATCH = 4  # of this replica

kinds = pytest.mark.parametrize("kind", MAKE)


def opened(kind: str, samples: int = 48) -> Reader:
    reader = MAKE[kind]()
    reader.open(samples)
    return reader


@kinds
def test_draws_restarts_and_counts(kind: str) -> None:
    """The same samples one by one, in batches, and as micro-batches in any order; `restart` draws again what was not trained."""
    reader, micro = opened(kind), opened(kind)
    due = np.concatenate([micro.micro_batch(number, BATCH) for number in range(6)]).tolist()
    assert reader.draw(3).tolist() == due[:3] and reader.count == 0
    reader.trained(2)
    assert reader.count == 2
    reader.restart()
    assert reader.draw(10).tolist() == due[2:12]
    reader.trained()
    assert reader.count == 12 and reader.draw(1).tolist() == due[12:13]
    assert micro.micro_batch(2, BATCH).tolist() == due[8:12] and micro.count == 12
    together = {"fixed": 3, "lanes": 2}.get(
        kind, 1
    ) * 12  # all replicas have read as far; two lanes of four are this one's
    assert micro.facts() == {"in_an_epoch": 48, "trained": together, "lost": 0, "in_flight": 0}
    assert micro.draw(4).tolist() == due[12:16]
    assert (reader.generation, reader.packed, reader.samples) == (0, False, 48)


@kinds
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_resumed_reader_goes_on_where_the_saved_one_was(kind: str, steps: int) -> None:
    reader, resumed, unopened = opened(kind), opened(kind), MAKE[kind]()
    for step in range(steps):
        reader.micro_batch(step, BATCH)
    notes, facts = reader.notes(), reader.facts()
    due = reader.micro_batch(steps, BATCH).tolist()
    for again in (resumed, unopened):
        assert again.load_notes(json.loads(json.dumps(notes))) == "" and again.count == steps * BATCH
        assert again.notes() == notes and again.facts() == facts
        assert again.draw(BATCH).tolist() == due


@kinds
def test_other_data_begin_an_epoch_where_the_run_was(kind: str) -> None:
    reader, resumed, fresh = opened(kind), opened(kind, 24), opened(kind, 24)
    for step in range(3):
        reader.micro_batch(step, BATCH)
    assert resumed.load_notes(reader.notes()) == "the data have 24 samples, and had 48: a new epoch of them begins here"
    assert resumed.micro_batch(3, BATCH).tolist() == fresh.micro_batch(0, BATCH).tolist()
    assert resumed.facts()["trained"] == fresh.facts()["trained"]
    again = opened(kind, 24)
    assert again.load_notes(resumed.notes()) == ""
    assert again.micro_batch(4, BATCH).tolist() == fresh.micro_batch(1, BATCH).tolist()


@kinds
def test_a_reader_that_was_not_opened_knows_nothing_and_keeps_to_its_number_of_samples(kind: str) -> None:
    reader = MAKE[kind]()
    assert (reader.samples, reader.notes(), reader.facts()) == (None, {}, {}) and reader.load_notes({}) == ""
    reader.open(48)
    reader.micro_batch(0, BATCH)
    reader.open(48)
    assert reader.count == BATCH, "opened again with the same data, it goes on"
    with pytest.raises(DataError, match="47 samples given, the run began with 48"):
        reader.open(47)


def test_each_replica_needs_a_sample_and_a_part_of_the_data() -> None:
    FixedReader(7, NAMES, "replica-1").open(3)
    with pytest.raises(DataError, match="2 samples for 3 replicas"):
        FixedReader(7, NAMES, "replica-1").open(2)
    four = FixedReader(7, [*NAMES, "replica-3"], "replica-3")
    four.open(8)
    with pytest.raises(DataError, match="replica-9 has no part of the data; it needs one of 4"):
        FixedReader(7, NAMES, "replica-9").load_notes(four.notes())
