"""What a run trains: its text, tokenizer, model and learning rate; and a look at all of it before any replica is started."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from thinwire.errors import ConfigurationError
from thinwire.lm.adapters import attach
from thinwire.lm.export import stored_model
from thinwire.lm.huggingface import HuggingFace, hugging_face, outline
from thinwire.lm.loops import check_method
from thinwire.lm.model import SIZES, Transformer
from thinwire.lm.run import Run
from thinwire.lm.settings import ModelSpec, OptimizerSpec
from thinwire.lm.tokenizer import open_corpus
from thinwire.pieces.schedule import Calendar
from thinwire.rng import derive

_MAKING = threading.Lock()  # transformers patches all of torch while it loads: one thread at a time
FLOOR = 0.05  # of the peak learning rate, where the cosine ends


def make_model(spec: ModelSpec, sequence: int, seed: int, vocabulary: int) -> nn.Module:
    """The model for `sequence` tokens of `vocabulary` kinds; fresh weights and adapters depend on `seed` only."""
    of_weights = derive(seed, "weights") % 2**31
    return _adapted(spec, sequence, seed, vocabulary, lambda source: hugging_face(source, vocabulary, of_weights))


def outline_model(spec: ModelSpec, sequence: int, seed: int, vocabulary: int) -> nn.Module:
    """The model without values, on the device "meta"; weights of a Hugging Face one are not read."""
    with torch.device("meta"):
        return _adapted(spec, sequence, seed, vocabulary, lambda source: outline(source, vocabulary))


def _adapted(
    spec: ModelSpec, sequence: int, seed: int, vocabulary: int, make: Callable[[str], HuggingFace]
) -> nn.Module:
    with _MAKING:
        model = _bare_model(spec, sequence, seed, vocabulary, make)
        return model if spec.lora is None else attach(model, spec.lora, derive(seed, "adapters"))


def _bare_model(
    spec: ModelSpec, sequence: int, seed: int, vocabulary: int, make: Callable[[str], HuggingFace]
) -> nn.Module:
    if spec.model.endswith(".safetensors"):
        return stored_model(spec.model, vocabulary, sequence)
    if spec.model.startswith("hf:"):
        model = make(spec.model.removeprefix("hf:"))
        if sequence > model.context:
            raise ConfigurationError(f"sequence={sequence}: {spec.model} takes at most {model.context} tokens.")
        return model
    if spec.model not in SIZES:
        raise ConfigurationError(
            f"model={spec.model!r}: one of {', '.join(SIZES)}, RUN/model.safetensors or hf:NAME is needed."
        )
    size = SIZES[spec.model]
    context = max(sequence, size.context)
    shape = dataclasses.replace(size, vocabulary=vocabulary, positions=spec.positions, context=context)
    return Transformer(shape, derive(seed, "weights") % 2**31)


def check(run: Run, folder: Path | None = None) -> nn.Module:
    """Find what would stop every replica, before any is started: text, tokenizer, model, fragments. Raises what it finds, returns the
    model without values. `folder`: the run's, if it is to go on.
    """
    placement, data = run.placement, run.data
    if placement.carrier != "elastic" and (placement.evict or placement.weigh != "alike" or placement.grace):
        raise ConfigurationError(
            f"evict={placement.evict}, weigh={placement.weigh!r}, grace={placement.grace!r} with carrier={placement.carrier!r}: these need "
            "an elastic run; add --elastic."
        )
    corpus = open_corpus(run.data, run.model.model, folder)
    last = placement.replicas - 1  # it has fewest windows
    corpus.batch(run.seed, last, placement.replicas, 0, data.batch, data.sequence)
    corpus.held_out(data.batch, data.sequence, data.eval_batches)
    model = outline_model(run.model, run.data.sequence, run.seed, corpus.vocabulary)
    if method := run.make_method():
        check_method(run, method)
        return model
    strategy = run.make_strategy()
    Calendar(
        strategy.schedule, len(strategy.partition.fragments(model)), lambda step: learning_rate(run.optimizer, step)
    ).departs(1)
    strategy.exchange.init(strategy.codec, 0, 0, run.placement.replicas)  # sites of another group are refused here
    if strategy.privacy:
        strategy.privacy.epsilon(1)  # an accountant that is missing is missed here
    return model


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Of inner step `step` (from 1): linear warm-up, then a cosine to 5 % of the peak at the last step."""
    warmup = min(1000, optimizer.steps // 10) if optimizer.warmup is None else optimizer.warmup
    if step <= warmup:
        return optimizer.lr * step / max(1, warmup)
    share = (step - warmup) / max(1, optimizer.steps - warmup)
    return optimizer.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
