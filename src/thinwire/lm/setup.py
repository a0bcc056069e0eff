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
from thinwire.lm.tokenizer import open_corpus
from thinwire.pieces.schedule import Calendar
from thinwire.rng import derive

_MAKING = threading.Lock()  # transformers patches all of torch while it loads: one thread at a time
FLOOR = 0.05  # of the peak learning rate, where the cosine ends


def make_model(run: Run, vocabulary: int) -> nn.Module:
    """The run's model; fresh weights and adapters depend on its seed only."""
    return _adapted(
        run, vocabulary, lambda source: hugging_face(source, vocabulary, derive(run.seed, "weights") % 2**31)
    )


def outline_model(run: Run, vocabulary: int) -> nn.Module:
    """The run's model without values, on the device "meta"; weights of a Hugging Face one are not read."""
    with torch.device("meta"):
        return _adapted(run, vocabulary, lambda source: outline(source, vocabulary))


def _adapted(run: Run, vocabulary: int, make: Callable[[str], HuggingFace]) -> nn.Module:
    with _MAKING:
        model = _bare_model(run, vocabulary, make)
        return model if run.lora is None else attach(model, run.lora, derive(run.seed, "adapters"))


def _bare_model(run: Run, vocabulary: int, make: Callable[[str], HuggingFace]) -> nn.Module:
    if run.model.endswith(".safetensors"):
        return stored_model(run.model, vocabulary, run.sequence)
    if run.model.startswith("hf:"):
        model = make(run.model.removeprefix("hf:"))
        if run.sequence > model.context:
            raise ConfigurationError(f"sequence={run.sequence}: {run.model} takes at most {model.context} tokens.")
        return model
    if run.model not in SIZES:
        raise ConfigurationError(
            f"model={run.model!r}: one of {', '.join(SIZES)}, RUN/model.safetensors or hf:NAME is needed."
        )
    size = SIZES[run.model]
    shape = dataclasses.replace(
        size, vocabulary=vocabulary, positions=run.positions, context=max(run.sequence, size.context)
    )
    return Transformer(shape, derive(run.seed, "weights") % 2**31)


def check(run: Run, folder: Path | None = None) -> nn.Module:
    """Find what would stop every replica, before any is started: text, tokenizer, model, fragments. Raises what it finds, returns the
    model without values. `folder`: the run's, if it is to go on.
    """
    if run.carrier != "elastic" and (run.evict or run.weigh != "alike" or run.grace):
        raise ConfigurationError(
            f"evict={run.evict}, weigh={run.weigh!r}, grace={run.grace!r} with carrier={run.carrier!r}: these are for replicas that may "
            "come and go; add --elastic."
        )
    corpus = open_corpus(run, folder)
    corpus.batch(run.seed, run.replicas - 1, run.replicas, 0, run.batch, run.sequence)  # the last has fewest windows
    corpus.held_out(run.batch, run.sequence, run.eval_batches)
    model = outline_model(run, corpus.vocabulary)
    if method := run.make_method():
        check_method(run, method)
        return model
    strategy = run.make_strategy()
    Calendar(
        strategy.schedule, len(strategy.partition.fragments(model)), lambda step: learning_rate(run, step)
    ).departs(1)
    strategy.exchange.init(strategy.codec, 0, 0, run.replicas)  # sites of another group are refused here
    if strategy.privacy:
        strategy.privacy.epsilon(1)  # an accountant that is missing is missed here
    return model


def learning_rate(run: Run, step: int) -> float:
    """Of inner step `step` (from 1): linear warm-up, then a cosine to 5 % of the peak at the last step."""
    warmup = min(1000, run.steps // 10) if run.warmup is None else run.warmup
    if step <= warmup:
        return run.lr * step / max(1, warmup)
    share = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
