"""A job in the user's own file: `model()`, `batches(share)`, `loss(model, batch)`, and optionally `optimizer(model)`,
`evaluate(model)` and `collate(samples)`.

The file's random numbers from torch's global generator follow from the run's seed, in three independent streams: `model()` has the
same on every replica; `batches(share)` has one for each share; `loss` and `evaluate` have one that checkpoints keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.app.jobs.base import EVAL_BATCH, Job, Share, Summed, mean_of
from thinwire.app.jobs.batches import Batches, Stream, is_empty, moved, seed_the_rest
from thinwire.app.jobs.blame import blaming, where
from thinwire.app.jobs.several import routed
from thinwire.app.records.losses import MOST_LOSSES
from thinwire.checkpoint import write_tree
from thinwire.errors import CheckpointError, ConfigurationError, JobError
from thinwire.pieces.own_files import file_of, taken_apart
from thinwire.rng import derive
from thinwire.state_tree import Packed, pack

NEEDED = {"model": (), "batches": ("share",), "loss": ("model", "batch")}
OPTIONAL = {"optimizer": ("model",), "evaluate": ("model",), "collate": ("samples",)}


def functions(job: str) -> dict[str, Callable[..., Any]]:
    """The functions of the job file `path.py` or `path.py@DIGEST`. Raises `JobError` if one is missing or takes other arguments."""
    path = taken_apart(job)[0].absolute()
    try:
        module = file_of(job)
    except ConfigurationError as error:
        if error.__cause__ is None or not (told := where(path, error.__cause__)):
            raise
        advice = ""
        if isinstance(error.__cause__, ModuleNotFoundError):
            advice = ". A job file may import what is installed, not files beside it"
        raise JobError(f"{told}: {type(error.__cause__).__name__}: {error.__cause__}{advice}") from error
    found = {name: value for name in NEEDED | OPTIONAL if callable(value := getattr(module, name, None))}
    if missing := [_spelled(name) for name in NEEDED if name not in found]:
        needed = ", ".join(_spelled(name) for name in NEEDED)
        raise JobError(
            f"{path} has no {', '.join(missing)}; a job has {needed}. Write it, or see `thinwire new my_job.py`."
        )
    for name, function in found.items():
        try:
            inspect.signature(function).bind(*(NEEDED | OPTIONAL)[name])
        except (TypeError, ValueError) as error:
            raise JobError(
                f"{path}: {name}{inspect.signature(function)} cannot be called as {_spelled(name)} ({error}); write def {_spelled(name)}:"
            ) from None
    return found


@contextmanager
def blaming_job(job: str | None) -> Iterator[None]:
    """A context that raises an exception which passed through the file of `job` as a `JobError`."""
    if job is None:
        yield
        return
    with blaming(taken_apart(job)[0].absolute()):
        yield


def counted_in(own: Collection[str]) -> str:
    """What a job with these functions counts its data in."""
    return "samples" if "collate" in own else "batches"


def _spelled(name: str) -> str:
    return f"{name}({', '.join((NEEDED | OPTIONAL)[name])})"


MOST_TOKENS = 1e12  # most tokens of a micro-batch


class OwnJob(Job):
    """The job of a file, for one replica; `batches(share)` yields its samples."""

    samples: int | None = None  # known after `try_out`
    text: str | None = None
    passed_over: Sequence[str] = ()

    def __init__(self, job: str, seed: int, batch: int = 1, eval_batches: int = 1, most: int | None = None) -> None:
        path, self._digest = taken_apart(job)
        self._path, self._seed, self._eval_batches = path.absolute(), seed, eval_batches
        self._own = functions(job)
        self._collated = batch if "collate" in self._own else None  # number of samples in a micro-batch
        self._most = most or batch  # number of samples that are evaluated at a time
        self.unit = counted_in(self._own)
        self.packs = False  # whether documents are packed into its batches; known after one was read
        self._batches: Batches | None = None
        self.held = 1  # number of micro-batches that a second pass of an inner step asks for again; the trainer sets it
        self._micros: dict[int, Any] = {}  # the last `held` micro-batches
        self._held_out: list[tuple[Any, int]] = []  # batches with their numbers of samples
        self._optimizers: list[torch.optim.Optimizer] = []

    @property
    def facts(self) -> Mapping[str, object]:
        return {"job": self._digest}

    @property
    def divisible(self) -> bool:
        """Whether a micro-batch may have another size."""
        return self._collated is not None

    def try_out(self, replicas: int) -> nn.Module:
        model = self.make_model()
        self.make_optimizer(model)
        share = Share(self._seed, replicas - 1, replicas)
        share = replace(share, reader=share.reading)
        self.begin(share)
        self.loss(model, 0, torch.device("cpu"))
        self.packs, self.samples = share.reading.packed, share.reading.samples
        return model

    def make_model(self) -> nn.Module:
        with Stream(derive(self._seed, "weights")).drawn():
            model = self._call("model")
        if not isinstance(model, nn.Module):
            raise self._wrong("model", model, "a torch.nn.Module")
        return model if model.training else model.train()  # `from_pretrained` returns it in evaluation mode

    def make_optimizer(self, model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        if "optimizer" in self._own:
            made = self._call("optimizer", model)
            several = list(made) if isinstance(made, list | tuple) else [made]
            if not several or not all(isinstance(one, torch.optim.Optimizer) for one in several):
                raise self._wrong("optimizer", made, "a torch.optim.Optimizer, or a list of them,")
            for one in several:
                try:
                    inspect.signature(one.step).bind()
                except TypeError:  # LBFGS
                    needed = "an optimizer whose step() needs no closure, such as torch.optim.AdamW,"
                    raise self._wrong("optimizer", one, needed) from None
            self._optimizers = several
        return self._optimizers

    def begin(self, share: Share, shard: int = 0, shards: int = 1) -> None:
        if shards > 1:
            raise ConfigurationError(
                f"job={self._path.name} on replicas of {shards} ranks: a job needs whole replicas; start one process per replica."
            )
        self._batches, self._micros = Batches(self._path, self._own["batches"], share), {}
        seed_the_rest(derive(share.seed, "loss", share.index))

    def loss(self, model: nn.Module, micro: int, device: torch.device) -> Tensor | Summed:
        if micro not in self._micros:
            assert self._batches is not None, "begin comes first"
            self._micros = {one: held for one, held in self._micros.items() if micro - self.held < one < micro}
            self._micros[micro] = moved(self._micro_batch(self._batches, self._collated), device)
        return self._loss(model, self._micros[micro])

    def trial(self, model: nn.Module, batch: int, device: torch.device) -> Tensor:
        """The loss of a micro-batch of `batch` samples, for timing; without `collate`, of a batch that `batches(share)` yields."""
        if self._batches is None:
            self.begin(Share(self._seed, 0, 1))
        assert self._batches is not None
        of = moved(self._micro_batch(self._batches, batch if self.divisible else None), device)
        return mean_of(self._loss(model, of))

    def evaluation(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        if "evaluate" in self._own:
            return self._named(self._call("evaluate", model))
        if not self._held_out:
            share = Share(derive(self._seed, "evaluation"), 0, 1)
            source = Batches(self._path, self._own["batches"], share)
            samples, most = self._eval_batches * EVAL_BATCH, self._most
            sizes = (
                [min(most, samples - at) for at in range(0, samples, most)]
                if self.divisible
                else [None] * self._eval_batches
            )
            self._held_out = [(self._micro_batch(source, size), size or 1) for size in sizes]
        losses = [(self._loss(model, moved(batch, device)), size) for batch, size in self._held_out]
        of_each = [
            (float(one.total), one.tokens) if isinstance(one, Summed) else (size * float(one), size)
            for one, size in losses
        ]
        return {"loss": sum(total for total, _ in of_each) / sum(count for _, count in of_each)}

    def _named(self, said: object) -> dict[str, float]:
        """The result of `evaluate` by name; runs are compared by the first."""
        named = dict(said) if isinstance(said, Mapping) else {"loss": said}
        losses = {
            name: one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for name, one in named.items()
        }
        if not 0 < len(losses) <= MOST_LOSSES or not all(
            isinstance(name, str) and isinstance(one, Real) for name, one in losses.items()
        ):
            needed = f"a number (the lower the better), or a dict of names and at most {MOST_LOSSES} numbers,"
            raise self._wrong("evaluate", said, needed)
        return {name: float(one) for name, one in losses.items()}  # type: ignore[arg-type]

    def describe(self) -> Mapping[str, Any]:
        return {"job": self._path.name, "digest": self._digest, "counted in": self.unit}

    def state(self) -> dict[str, Any]:
        return self._batches.state() if self._batches else {}

    def load_state(self, state: Mapping[str, Any]) -> str:
        assert self._batches is not None, "begin comes first"
        self._micros = {}
        return self._batches.load_state(state) if state else ""

    def store(self, folder: Path, model: nn.Module, weights: Mapping[str, Any], writer: str, mark: str = "") -> None:
        """Write the weights for `model().load_state_dict(safetensors.torch.load_file(...))`. Extra state, which is no tensor, stands in the
        file's metadata. Raises `CheckpointError`.
        """
        path = folder / f"model{mark}.safetensors"
        draft = folder / f".model.{writer}.partial"
        try:
            tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
            extra = pack({name: value for name, value in weights.items() if name not in tensors}, "model")
            tree = extra.json | {name: {"!tensor": name} for name in tensors}
            write_tree(Packed(tree, tensors | extra.tensors), draft, {"job": self._path.name})
            draft.replace(path)
        except OSError as error:
            raise CheckpointError(f"the trained model cannot be written to {path}: {error}.") from error

    def _micro_batch(self, source: Batches, samples: int | None) -> Any:
        if samples is None:
            return source.take()
        batch = self._call("collate", [source.take() for _ in range(samples)])
        if is_empty(batch):
            raise self._wrong("collate", batch, "a batch that is not empty")
        return batch

    def _loss(self, model: nn.Module, batch: Any) -> Tensor | Summed:
        said = self._call("loss", model, batch)
        loss, tokens = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
        if isinstance(loss, list):
            loss = self._several(model, loss)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise self._wrong("loss", loss, "a scalar tensor, such as a mean, or (sum over tokens, number of tokens)")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError(
                f"{self._path}: loss(model, batch) returned a tensor that depends on no parameter; a loss with a gradient is needed. "
                "Check that nothing detaches it, and that the model has parameters to train."
            )
        if tokens is None:
            return loss
        count = float(tokens) if isinstance(tokens, Real) or (isinstance(tokens, Tensor) and not tokens.ndim) else 0.0
        if not 0 < count <= MOST_TOKENS:
            raise self._wrong(
                "loss", tokens, f"a number of tokens above 0 and at most {MOST_TOKENS:.0e}, beside the sum,"
            )
        return Summed(loss, count)

    def _call(self, name: str, *given: object) -> Any:
        with blaming(self._path, f"{self._path}, in {_spelled(name)}"):
            return self._own[name](*given)

    def _wrong(self, name: str, made: object, needed: str) -> JobError:
        what = (
            f"a tensor of shape {tuple(made.shape)}"
            if isinstance(made, Tensor)
            else f"a value of type {type(made).__name__}"
        )
        return JobError(
            f"{self._path}: {_spelled(name)} returned {what}; {needed} is needed. Correct its return value."
        )

    def _several(self, model: nn.Module, losses: Sequence[Any]) -> Tensor:
        """Route one loss to each optimizer. `evaluate` is needed to compare runs, because the losses of a min-max say nothing of quality."""
        optimizers = self._optimizers or self.make_optimizer(model)
        if len(losses) != len(optimizers) or not all(isinstance(one, Tensor) and not one.ndim for one in losses):
            raise self._wrong(
                "loss", losses, f"a scalar tensor, or a list of {len(optimizers)}, one for each optimizer,"
            )
        if "evaluate" not in self._own:
            raise JobError(
                f"{self._path}: loss(model, batch) returns {len(losses)} losses, and no single number to compare runs; write evaluate(model)."
            )
        return routed(losses, optimizers)
