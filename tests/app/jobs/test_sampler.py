"""`share.sampler`: the ledger assigns map-style data to any loader, and a resume continues there."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from thinwire.app.jobs.base import Share
from thinwire.app.jobs.batches import Batches
from thinwire.data_ledger import DataLedger, FixedReader, LeasedReader, ReadCount
from thinwire.errors import DataError

DATA = [100 + n for n in range(24)]


class ReadsAhead:
    """Reads ahead like a DataLoader with workers: it draws three batches before it yields the first."""

    num_workers, batch_size = 1, 2

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        drawn, ready = iter(self._sampler), deque[list[int]]()
        while True:
            while len(ready) < 3:
                ready.append([DATA[next(drawn)] for _ in range(2)])
            yield torch.tensor(ready.popleft())


def by_loader(share: Share) -> object:
    return DataLoader(DATA, batch_size=2, sampler=share.sampler(len(DATA)))  # type: ignore[arg-type]


def by_torchdata(share: Share) -> object:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(DATA, batch_size=2, sampler=share.sampler(len(DATA)))


def by_datasets(share: Share) -> object:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"x": DATA}).with_format("torch", columns=["x"])
    return DataLoader(
        rows,
        batch_size=2,
        sampler=share.sampler(len(rows)),
        collate_fn=lambda found: torch.stack([r["x"] for r in found]),
    )  # type: ignore[arg-type]


def by_generator(share: Share) -> Iterator[torch.Tensor]:
    indices = iter(share.sampler(len(DATA)))
    while True:
        yield torch.tensor([DATA[next(indices)] for _ in range(2)])


def ahead(share: Share) -> object:
    return ReadsAhead(share.sampler(len(DATA)))


def ahead_by_batches(share: Share) -> object:
    """As a DataLoader with `batch_sampler=`."""
    loader: Any = ahead(share)
    loader.batch_size, loader.batch_sampler = None, BatchSampler(share.sampler(len(DATA)), 2, drop_last=False)
    return loader


WAYS = [by_loader, by_torchdata, by_datasets, by_generator, ahead, ahead_by_batches]
Make = Callable[[Share], Any]


def begun(make: Make, index: int = 0, count: int = 2) -> Batches:
    share = Share(0, index, count)
    return Batches(Path("any.py"), make, dataclasses.replace(share, reader=share.reading))


def take(batches: Batches, number: int) -> list[int]:
    return [x for _ in range(number) for x in batches.take().tolist()]


@pytest.mark.parametrize("make", WAYS)
def test_two_shares_make_an_epoch_and_a_resume_continues(make: Make) -> None:
    first, second = (take(begun(make, index), 12) for index in range(2))
    assert sorted(first[:12] + second[:12]) == DATA == sorted(first[12:] + second[12:]) and first[:12] != first[12:]
    cut, back = begun(make), begun(make)
    assert take(cut, 5) == first[:10]
    notes = deepcopy([cut._share.reader.notes(), cut.state()])  # type: ignore[union-attr]
    assert back._share.reader is not None
    back._share.reader.load_notes(notes[0])
    assert back.load_state(notes[1]) == ""
    assert take(back, 7) == first[10:], "what was drawn ahead and not trained is drawn again"


def test_a_loader_that_yields_samples_and_reads_ahead_has_trained_what_was_taken() -> None:
    """As a DataLoader with workers and `batch_size=None`."""

    class Singly(ReadsAhead):
        batch_size = batch_sampler = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[Any]:
            return (one for batch in super().__iter__() for one in batch)

    batches = begun(lambda share: Singly(share.sampler(len(DATA))))
    for count in (1, 2, 3):
        batches.take()
        assert batches._share.reader is not None and batches._share.reader.count == count


@pytest.mark.parametrize("make", WAYS)
def test_a_replica_that_loses_its_lease_reads_only_from_the_new_one(make: Make) -> None:
    reader = LeasedReader(0, 2, 2)
    reader.open(len(DATA))
    ledger = DataLedger(len(DATA), 0, 2, 1, 2, 0).begin(["replica-0", "replica-1"])
    reader.connect("replica-0", 1, lambda: pytest.fail("it has a lease"))
    batches = Batches(Path("any.py"), make, dataclasses.replace(Share(0, 0, 2), reader=reader))
    reader.adopt(ledger)
    assert len(take(batches, 2)) == 4 and reader.count == 4
    # replica-0 was away, so its samples pass to the other
    ledger, named = ledger.commit(0, {}, {"replica-1": ReadCount(0, 0, 0)})
    assert named.returned
    ledger, _ = ledger.commit(0, {}, {"replica-1": ReadCount(0, 1, 0), "replica-0": ReadCount()})
    reader.begin_again(ledger)
    lease = ledger.lease("replica-0")
    assert lease is not None and lease.serial == 2
    due = [DATA[i] for i in ledger.read(lease, 0, 8)]
    assert take(batches, 4) == due and reader.count == 8


def test_another_number_of_samples_is_refused() -> None:
    reader = FixedReader(0, ["replica-0", "replica-1"], "replica-0")
    with pytest.raises(DataError, match="1 samples for 2 replicas"):
        reader.open(1)
    reader.open(5)
    with pytest.raises(DataError, match="6 samples given, the run began with 5"):
        reader.open(6)
