"""The default job, without a file: a language model on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.app.jobs.base import EVAL_BATCH, Share
from thinwire.app.trainer.export import store
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import make_model, outline_model
from thinwire.app.trainer.tokenizer import keep_tokenizer, open_corpus
from thinwire.errors import ConfigurationError
from thinwire.rng import derive

VALIDATION_BATCHES = 4  # of held-out text, by which a replica weighs its neighbours' weights


class TextJob:
    """Next-token prediction. The windows of a micro-batch follow from its number alone."""

    unit, packs = "tokens", False

    def __init__(self, run: Run, folder: Path | None, replica: int = 0) -> None:
        self._run, self._batch = run, run.data.batch_of(replica)
        self.corpus = open_corpus(run.data, run.model.model, folder)
        self._shard, self._shards, self._flips = 0, 1, False
        self.begin(Share(run.seed, 0, 1))

    @property
    def samples(self) -> int | None:
        return self._reader.samples

    @property
    def facts(self) -> Mapping[str, object]:
        return {"tokenizer": self.corpus.tokenizer.fingerprint}

    @property
    def text(self) -> str:
        return self.corpus.fingerprint

    @property
    def passed_over(self) -> Sequence[str]:
        return self.corpus.passed_over

    def try_out(self, replicas: int) -> nn.Module:
        run, data = self._run, self._run.data
        last = replicas - 1  # the replica with the fewest windows
        self.corpus.batch(run.seed, last, replicas, 0, 1, data.sequence)  # a whole batch may not fit into memory
        self.corpus.held_out(1, data.sequence, 1)
        Share(run.seed, last, replicas, batches=data.batches).reading.open(self.corpus.windows(data.sequence))
        return outline_model(run.model, data.sequence, run.seed, self.corpus.vocabulary)

    def make_model(self) -> nn.Module:
        run = self._run
        return make_model(run.model, run.data.sequence, run.seed, self.corpus.vocabulary)

    def make_optimizer(self, model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        return ()

    def begin(self, share: Share, shard: int = 0, shards: int = 1) -> None:
        if self._batch % shards:
            raise ConfigurationError(
                f"batch={self._batch} on a replica of {shards} ranks: each rank reads as many sequences; give a multiple of {shards}."
            )
        self._reader, self._shard, self._shards = share.reading, shard, shards
        method = self._run.method
        attack = method.liar()
        self._flips = bool(attack and attack.flips_labels) and share.index >= share.count - (method.liars or 1)
        if windows := self.corpus.windows(self._run.data.sequence):  # without any, `try_out` raises the error
            self._reader.open(windows)

    def loss(self, model: nn.Module, micro: int, device: torch.device) -> Tensor:
        data = self._run.data
        rows = self._batch // self._shards
        windows = self._reader.micro_batch(micro, self._batch)[self._shard * rows :][:rows]
        tokens, targets = self.corpus.cut(windows, data.sequence)
        if self._flips:
            targets = self.corpus.vocabulary - 1 - targets
        loss: Tensor = model(tokens.to(device), targets.to(device)).loss
        return loss

    def evaluation(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        data, total, count = self._run.data, 0.0, 0
        _, batches = data.evaluations(self._run.optimizer.steps)
        for tokens, targets in self.corpus.held_out(EVAL_BATCH * batches, data.sequence, data.largest_batch):
            total += len(tokens) * float(model(tokens.to(device), targets.to(device)).loss)
            count += len(tokens)
        return {"loss": total / count}

    def validation(self, model: nn.Module, device: torch.device) -> Sequence[float]:
        data = self._run.data
        held_out = self.corpus.held_out(VALIDATION_BATCHES * data.largest_batch, data.sequence, data.largest_batch)
        return [float(model(tokens.to(device), targets.to(device)).loss) for tokens, targets in held_out]

    def describe(self) -> Mapping[str, Any]:
        return self.corpus.describe()

    def state(self) -> dict[str, Any]:
        return {"text": self.corpus.fingerprint}

    def load_state(self, state: Mapping[str, Any]) -> str:
        return ""

    def keep(self, folder: Path, writer: str) -> None:
        keep_tokenizer(folder, self._run.model.model, self.corpus.tokenizer, writer)

    def store(self, folder: Path, model: nn.Module, weights: Mapping[str, Tensor], writer: str, mark: str = "") -> None:
        store(folder, self._run.model, self.corpus.tokenizer, model, weights, writer, mark)

    def probe_windows(self, number: int, positions: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of part `number` of a probe set: random windows of the training text, equal on all replicas."""
        run, sequence = self._run, self._run.data.sequence
        windows = self.corpus.windows(sequence)
        drawn = [derive(run.seed, "probe", number, row) % windows for row in range(positions // sequence)]
        return self.corpus.cut(np.array(drawn, dtype=np.int64), sequence)


class TextProbe:
    """The probe set of a run for `codistill`, and the logits of `model` on it."""

    def __init__(self, job: TextJob, model: nn.Module, positions: int, device: torch.device, bf16: bool) -> None:
        self._job, self._model, self._positions, self._device, self._bf16 = job, model, positions, device, bf16

    @property
    def vocabulary(self) -> int:
        return self._job.corpus.vocabulary

    def targets(self, number: int) -> Tensor:
        return self._job.probe_windows(number, self._positions)[1].reshape(-1)

    def logits(self, number: int) -> Tensor:
        tokens, _ = self._job.probe_windows(number, self._positions)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            said: Tensor = self._model(tokens.to(self._device)).logits
        return said.reshape(self._positions, -1)
