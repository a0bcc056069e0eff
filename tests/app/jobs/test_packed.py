"""Documents packed into batches of similar cost, each document in one batch; the ledger assigns batches, and the loss is over all tokens."""

from __future__ import annotations

import random
import runpy
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from pages import ROOT
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thinwire.app.jobs.base import Share, Summed
from thinwire.app.jobs.batches import Batches
from thinwire.app.jobs.own import OwnJob
from thinwire.app.jobs.packs import attention_cost, packs
from thinwire.app.trainer.job import check_and_weigh
from thinwire.app.trainer.run import Run
from thinwire.data_ledger import DataLedger, FixedReader, LeasedReader
from thinwire.errors import DataError

CAPACITY, WIDTH = 256, 64


def mixed(count: int = 5000) -> list[int]:
    """Returns lengths of documents; most are short, few are long."""
    drawn = random.Random(3)
    return [min(CAPACITY, 1 + int(drawn.lognormvariate(3.0, 1.0))) for _ in range(count)]


def test_packing_puts_each_document_into_one_batch_of_similar_cost():
    lengths, cost = mixed(), attention_cost(WIDTH)
    found = packs(lengths, CAPACITY, cost)
    assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in batch) for batch in found]
    assert max(tokens) <= CAPACITY and sum(tokens) > 0.9 * CAPACITY * len(found)
    costs = [sum(cost(lengths[row]) for row in batch) for batch in found]
    in_turn: list[list[int]] = [[]]
    for length in lengths:  # the baseline: each batch takes documents in order until one does not fit
        in_turn += [[]] if sum(in_turn[-1]) + length > CAPACITY else []
        in_turn[-1].append(length)
    before = [sum(map(cost, batch)) for batch in in_turn]
    assert max(costs) / (sum(costs) / len(costs)) < 1.25 < 1.35 < max(before) / (sum(before) / len(before))
    assert len(found) < len(in_turn)
    for bad in ([], [3, 0], [CAPACITY + 1]):
        with pytest.raises(DataError, match=f"each of 1 to {CAPACITY} tokens"):
            packs(bad, CAPACITY, cost)


def test_replicas_read_each_document_once_an_epoch_and_resume():
    lengths = mixed(300)
    whole = packs(lengths, CAPACITY, attention_cost(WIDTH))
    names = ["replica-0", "replica-1"]

    def made(share: Share) -> object:
        return share.packed(lengths, CAPACITY, WIDTH)

    def reading(index: int) -> tuple[FixedReader, Batches]:
        reader = FixedReader(0, names, names[index])
        return reader, Batches(Path("job.py"), made, Share(0, index, 2, reader))

    replicas = [reading(index) for index in (0, 1)]
    half = len(whole) // 2
    read = [one.take() for _, one in replicas for _ in range(half)]
    assert len(whole) % 2 or sorted(row for rows in read for row in rows) == list(range(300))
    assert len({row for rows in read for row in rows}) == sum(map(len, read))
    saved = deepcopy([(reader.notes(), one.state()) for reader, one in replicas])
    for index, (notes, state) in enumerate(saved):
        reader, again = reading(index)
        reader.load_notes(notes)
        assert again.load_state(state) == ""
        assert [again.take() for _ in range(3)] == [replicas[index][1].take() for _ in range(3)]


def test_batches_that_a_loader_reads_ahead_do_not_count_as_trained():
    """A DataLoader with workers draws batches ahead. One batch is one sample of the ledger."""
    lengths = mixed(300)
    reader = LeasedReader(0, 1, 1)
    share = Share(0, 0, 1, reader)
    batches = Batches(Path("job.py"), lambda one: Ahead(one.packed(lengths, CAPACITY, WIDTH)), share)
    reader.connect("replica-0", 1, lambda: None)
    reader.adopt(DataLedger(reader.samples or 0, 0, 1, 1, 9, 9).begin(["replica-0"]))
    for count in (1, 2, 3):
        batches.take()
        assert reader.count == count
    loader = DataLoader(range(300), batch_sampler=share.packed(lengths, CAPACITY, WIDTH), collate_fn=list)  # type: ignore[arg-type,var-annotated]
    assert sum(lengths[row] for row in next(iter(loader))) <= CAPACITY


class Ahead:
    """Reads ahead like a DataLoader with a worker and a `batch_sampler`."""

    num_workers, batch_size = 1, None

    def __init__(self, sampler: object) -> None:
        self.batch_sampler = sampler

    def __iter__(self):
        drawn = iter(self.batch_sampler)  # type: ignore[call-overload]
        ready = [next(drawn) for _ in range(4)]
        while True:
            ready.append(next(drawn))
            yield ready.pop(0)


def test_the_loss_averages_over_all_tokens_of_all_replicas():
    """The gradient of an epoch on two replicas equals that of its documents one by one. The mean of means would be biased."""
    jobs = [OwnJob(str(ROOT / "examples/jobs/documents.py"), 0) for _ in range(2)]
    model, cpu = jobs[0].make_model(), torch.device("cpu")
    names = ["replica-0", "replica-1"]
    losses: list[Summed] = []
    for index, job in enumerate(jobs):
        reader = FixedReader(0, names, names[index])
        job.begin(Share(0, index, 2, reader))
        losses.append(summed(job.loss(model, 0, cpu)))
        losses += [summed(job.loss(model, micro, cpu)) for micro in range(1, (reader.samples or 0) // 2)]
    tokens = sum(one.tokens for one in losses)
    exact = gradient(sum(one.total for one in losses) / tokens, model)
    biased = gradient(sum(one.mean for one in losses) / len(losses), model)
    documents = runpy.run_path(str(ROOT / "examples/jobs/documents.py"))["corpus"]()
    alone = torch.zeros(())
    for one in documents:
        places, document = torch.arange(len(one) - 1), torch.zeros(len(one) - 1)
        alone = alone + nn.functional.cross_entropy(model(one[:-1], places, document), one[1:], reduction="sum")
    assert tokens == sum(len(one) - 1 for one in documents)
    expected = gradient(alone / tokens, model)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
    assert (biased - expected).abs().max() > 1e-4


def test_deltas_of_packed_batches_are_weighed_by_tokens_by_default():
    job = str(ROOT / "examples/jobs/documents.py")
    _, run, told = check_and_weigh(Run.of(job=job))
    assert run.placement.weigh == "tokens" and "because the job packs documents; --weigh alike" in "".join(told)
    for asked in ({"weigh": "alike"}, {"strategy": "data_parallel"}, {"job": str(ROOT / "examples/jobs/denoise.py")}):
        run = Run.of(**{"job": job} | asked)
        _, same, told = check_and_weigh(run)
        assert same == run and "--weigh alike" not in "".join(told)
    run = Run.of(job=job, strategy="noloco")
    _, same, told = check_and_weigh(run)
    assert same == run and "weigh 1, though packed batches have different numbers of tokens" in "".join(told)


def summed(loss: Tensor | Summed) -> Summed:
    assert isinstance(loss, Summed)
    return loss


def gradient(loss: Tensor | float, model: nn.Module) -> Tensor:
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([one.flatten() for one in found])
