"""The language model of a run, and every run's optimizer and learning rate."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

import torch
from torch import nn

from thinwire.app.trainer.adapters import attach
from thinwire.app.trainer.export import stored_model
from thinwire.app.trainer.huggingface import HuggingFace, hugging_face, outline
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import ModelSpec
from thinwire.choices import nearest
from thinwire.errors import ConfigurationError
from thinwire.rng import derive

_MAKING = threading.Lock()  # transformers patches torch globally while it loads, so one thread at a time
LR_FLOOR = 0.05  # share of the peak learning rate at which the cosine ends


def make_model(spec: ModelSpec, sequence: int, seed: int, vocabulary: int) -> nn.Module:
    """Make the model of a run, with fresh weights or those that `spec.model` names.

    Args:
        spec: size or source, adapters, positions.
        sequence: tokens of the longest sequence.
        seed: seed of fresh weights and adapters; an integer number.
        vocabulary: number of different tokens.

    Raises:
        ConfigurationError: the model is not known, or its longest sequence is shorter.

    >>> type(make_model(ModelSpec(model="nano"), sequence=64, seed=0, vocabulary=256)).__name__
    'Transformer'
    """
    of_weights = derive(seed, "weights") % 2**31
    return _adapted(spec, sequence, seed, vocabulary, lambda source: hugging_face(source, vocabulary, of_weights))


def outline_model(spec: ModelSpec, sequence: int, seed: int, vocabulary: int) -> nn.Module:
    """The model without values, on the device "meta"; the weights of a Hugging Face model are not read."""
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
            f"model={spec.model!r}{nearest(spec.model, SIZES)}: one of {', '.join(SIZES)}, RUN/model.safetensors or hf:NAME is needed."
        )
    size = SIZES[spec.model]
    context = max(sequence, size.context)
    shape = dataclasses.replace(size, vocabulary=vocabulary, positions=spec.positions, context=context)
    return Transformer(shape, derive(seed, "weights") % 2**31)


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the run's method, if that has one of its own; otherwise the run's inner optimizer."""
    if method := run.make_method():
        return method.optimizer(model, run.lr)
    return run.plan.inner.make(model, run.lr, run.optimizer.weight_decay)


def learning_rate(run: Run, step: int) -> float:
    """The learning rate of inner step `step` (from 1): linear warm-up, then a cosine to 5 % of the peak at the last step."""
    optimizer, peak = run.optimizer, run.lr
    warmup = min(1000, optimizer.steps // 10) if optimizer.warmup is None else optimizer.warmup
    if step <= warmup:
        return peak * step / max(1, warmup)
    share = (step - warmup) / max(1, optimizer.steps - warmup)
    return peak * (LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
