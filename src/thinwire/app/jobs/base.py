"""A job: the model, the data and the loss of a run. `lm` has the language model; every other job is the user's own file (`own.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thinwire.app.jobs.packs import attention_cost, packs
from thinwire.data_ledger import FixedReader, LanesReader, Reader, drawn_for_ever
from thinwire.rng import derive

EVAL_BATCH = 8  # samples of one of `--eval-batches`, so that evaluations do not depend on the micro-batch


@dataclass(frozen=True)
class Share:
    """A replica's share of the data: part `index` of `count`, in an order that follows from `seed`. `batches` are the micro-batches of all
    replicas, if these differ: then a part is as large as its replica's micro-batch.

    For data with a length and an index use `sampler`: then each sample is trained once per epoch, also in an elastic run, and if a
    run resumes with another number of replicas (docs/data.md).
    """

    seed: int
    index: int
    count: int
    reader: Reader | None = field(default=None, repr=False, compare=False)
    batches: tuple[int, ...] = ()

    def sampler(self, samples: int) -> Sampler:
        """Iterates without end over the indices of this replica's samples, of `samples` in all: for a DataLoader's `sampler=`, or a loop."""
        reader = self.reading
        reader.open(samples)
        return Sampler(reader)

    def packed(self, lengths: Sequence[int], capacity: int, width: int) -> Packed:
        """Iterates without end over this replica's batches, each a list of indices of documents with at most `capacity` tokens together: for a
        loop, or a DataLoader's `batch_sampler=`. Batches have about equal cost in a model of `width`, but different numbers of tokens, so the
        job's loss must return a sum and its number of tokens. Attention must not cross documents.

        `lengths`, in tokens, must be the same on every replica. Raises `DataError` for a document longer than `capacity`.
        """
        batches, reader = packs(lengths, capacity, attention_cost(width)), self.reading
        reader.open(len(batches))
        reader.packed = True
        return Packed(reader, batches)

    @property
    def reading(self) -> Reader:
        """The reader with this replica's position in its samples."""
        names = [f"replica-{number}" for number in range(self.count)]
        if self.reader is not None:
            return self.reader
        return (
            LanesReader(self.seed, self.batches, self.index)
            if self.batches
            else FixedReader(self.seed, names, names[self.index])
        )

    @classmethod
    def of(cls, seed: int, replicas: int, name: str) -> Share:
        """The share of `name`. The shares of replica-0, replica-1, ... never overlap; any other name reads all data in its own order.

        >>> Share.of(0, 3, "replica-1")
        Share(seed=0, index=1, count=3, batches=())
        >>> Share.of(0, 3, "paris").count
        1
        """
        number = re.fullmatch(r"replica-(0|[1-9][0-9]*)", name)
        if number and int(number[1]) < replicas:
            return cls(seed, int(number[1]), replicas)
        return cls(derive(seed, f"order of {name}"), 0, 1)


class Sampler:
    """See `Share.sampler`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __iter__(self) -> Iterator[int]:
        return drawn_for_ever(self._reader)


class Packed:
    """See `Share.packed`. To the data ledger a batch is one sample."""

    def __init__(self, reader: Reader, batches: Sequence[Sequence[int]]) -> None:
        self._reader, self._batches = reader, batches

    def __iter__(self) -> Iterator[list[int]]:
        return (list(self._batches[number]) for number in drawn_for_ever(self._reader))


class Summed(NamedTuple):
    """A loss as a sum over tokens, and their number, so that means over micro-batches and replicas of different sizes are exact."""

    total: Tensor
    tokens: float

    @property
    def mean(self) -> Tensor:
        """The mean loss of this micro-batch alone."""
        return self.total / self.tokens


def mean_of(loss: Tensor | Summed) -> Tensor:
    """The mean loss of one micro-batch."""
    return loss.mean if isinstance(loss, Summed) else loss


class Job(Protocol):
    """The interface of a job for the trainer. Each replica has its own job, which keeps its position in the data."""

    unit: str  # the unit of the data: tokens, samples, batches
    packs: bool  # whether documents are packed into its batches; known after one was read

    @property
    def samples(self) -> int | None:
        """In an epoch; None if the job reads its data independently."""

    @property
    def facts(self) -> Mapping[str, object]:
        """The facts that must be equal on all replicas, beside the settings of the run."""

    @property
    def text(self) -> str | None:
        """The digest of the text that it reads; None if it reads something else."""

    @property
    def passed_over(self) -> Sequence[str]:
        """Lines on files that it does not read."""

    def try_out(self, replicas: int) -> nn.Module:
        """Try model, data and loss before any of `replicas` is started, and raise errors. Returns the model, whose values do not matter."""

    def make_model(self) -> nn.Module:
        """The model; its weights are the same bits on every replica."""

    def make_optimizer(self, model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        """The job's own inner optimizers, whose learning rates the trainer does not change; empty: the trainer makes one."""

    def begin(self, share: Share, shard: int = 0, shards: int = 1) -> None:
        """Read `share` from its beginning; a rank of a sharded replica reads `shard` of `shards` of each batch."""

    def loss(self, model: nn.Module, micro: int, device: torch.device) -> Tensor | Summed:
        """The loss of micro-batch `micro`, counted from 0; a second pass of the same inner step uses the same micro-batch."""

    def evaluation(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        """Losses by name (lower is better) on data that are the same on every replica. Runs are compared by the first."""

    def validation(self, model: nn.Module, device: torch.device) -> Sequence[float]:
        """Losses by which a replica weighs its neighbours' weights; without gradients."""
        return list(self.evaluation(model, device).values())

    def describe(self) -> Mapping[str, Any]:
        """Facts about the data, for display."""

    def state(self) -> dict[str, Any]:
        """The job's position in the data, for JSON."""

    def load_state(self, state: Mapping[str, Any]) -> str:
        """Resume from `state()`. Returns a warning for the user, or ""."""

    def keep(self, folder: Path, writer: str) -> None:
        """Write files that a resume and the trained model need into the run's folder. Several replicas may write, each with its own `writer`."""
        return

    def store(self, folder: Path, model: nn.Module, weights: Mapping[str, Tensor], writer: str, mark: str = "") -> None:
        """Write `weights` (a state dict of `model`) to folder/model.safetensors; a `mark` such as .stale is added to the name."""
