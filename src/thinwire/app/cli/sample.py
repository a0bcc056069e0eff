"""`thinwire sample`: writes a text with a run's model, or an ensemble."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from thinwire.app.cli import options
from thinwire.app.trainer.checked_settings import fits, unfit
from thinwire.app.trainer.model import generate
from thinwire.app.trainer.trained import models_in, trained_model
from thinwire.errors import ConfigurationError

MOST_TOKENS = 1_000_000  # to write: the text is shown when all are there


@dataclass(frozen=True)
class Options:
    """The options of `thinwire sample`."""

    run: tyro.conf.Positional[Path]
    """The run folder, or an ensemble's. For a running run the newest checkpoint is used."""
    prompt: tyro.conf.Positional[str] = ""
    """The text to continue. Without it: the beginning of a text."""
    tokens: int = 200
    """Most tokens to write; the end of a text stops earlier."""
    temperature: float = 0.8
    """0 takes the most probable token each time; higher values give more varied text."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same text."""
    prior: tuple[str, ...] = ()
    """For an ensemble: files of development text. Their first 100 held-out sequences give the prior over experts. Default: uniform."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "sample", arguments, "Continue a text with a run's model, or an ensemble.")
    if not 1 <= asked.tokens <= MOST_TOKENS:
        raise ConfigurationError(f"--tokens {asked.tokens}: 1 to {MOST_TOKENS:,} are needed.")
    if not fits(asked.seed, int):
        raise unfit("seed", asked.seed, int)
    ensemble = models_in(asked.run)
    language_model: Any
    if ensemble:
        prior = ensemble.cached_prior(asked.prior) if asked.prior else None
        tokenizer, language_model, step = ensemble.tokenizer, ensemble.mixture(prior), None
    elif asked.prior:
        raise ConfigurationError(f"prior={asked.prior} with {asked.run}, which is no ensemble: leave --prior out.")
    else:
        trained = trained_model(asked.run)
        options.warn_of_outcome(asked.run)
        tokenizer, language_model, step = trained.tokenizer, trained.model, trained.step
    if step is not None:
        options.advise(f"the run has not ended: this is the model of step {step}")
    prompt = [int(token) for token in tokenizer.encode(asked.prompt)]
    written = generate(language_model, prompt or [tokenizer.end], asked.tokens, asked.temperature, asked.seed)
    if tokenizer.end in written:
        written = written[: written.index(tokenizer.end)]
    text = tokenizer.decode([*prompt, *written])  # together, because a token may end within a character
    if asked.json:
        print(json.dumps({"text": text, "tokens": len(written), "step": step}))
    else:
        options.console(False).print(text, soft_wrap=True, highlight=False, markup=False)
    if ensemble:
        read = torch.tensor([[*(prompt or [tokenizer.end]), *written][-language_model.context :]])
        options.advise(ensemble.posterior(language_model, read))
    return 0
