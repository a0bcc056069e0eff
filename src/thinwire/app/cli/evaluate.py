"""`thinwire evaluate`: the loss of a run's model, or of an ensemble and each of its experts, on text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn

from thinwire.app.cli import options
from thinwire.app.jobs.base import EVAL_BATCH
from thinwire.app.records.units import text_of_loss, text_of_share
from thinwire.app.trainer.data import Corpus
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.texts import find, standard_library
from thinwire.app.trainer.tokens import Tokenizer
from thinwire.app.trainer.trained import models_in, scores_of, trained_model, with_parents
from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """The options of `thinwire evaluate`."""

    run: tyro.conf.Positional[Path]
    """The folder of a run, or of an ensemble that `thinwire branch` made."""
    text: tuple[str, ...] = ()
    """Files or folders, one row for each. Their held-out part is evaluated. A run on several of them may have trained on that of one alone
    (thinwire docs start). Default: the run's own text, of which the held-out part is not trained on."""
    prior: tuple[str, ...] = ()
    """For an ensemble: files of development text. Their first 100 held-out sequences give the prior over experts. Default: uniform."""
    batch: int = 8
    """Sequences that are evaluated at a time, which saves memory and does not change the result."""
    sequence: int | None = None
    """Tokens per sequence. Default: as in training."""
    eval_batches: int = 16
    """Most batches of each text, each of 8 sequences, as in training."""
    column: str | None = None
    """Name of the text column in .jsonl and .parquet files. Default: the run's own; for an ensemble `text`."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "evaluate", arguments, "Evaluate a run's model, or an ensemble, on text.")
    if min(asked.batch, asked.eval_batches, 1 if asked.sequence is None else asked.sequence) < 1:
        raise ConfigurationError("batch, sequence and eval_batches: at least 1 of each is needed.")
    others = models_in(asked.run)
    rows = others.evaluated(asked) if others else _of_run(asked)
    options.console(asked.json).print(_table(rows, asked.run))
    return options.answer(asked.json, {"texts": rows})


def _of_run(asked: Options) -> list[dict[str, Any]]:
    if asked.prior:
        raise ConfigurationError(f"prior={asked.prior} with {asked.run}, which is no ensemble: leave --prior out.")
    trained = trained_model(asked.run)
    options.warn_of_outcome(asked.run)
    if trained.step is not None:
        options.advise(f"the run has not ended: this is the model of step {trained.step}")
    data, rows = Run.load(asked.run / "run.toml").data, list[dict[str, Any]]()
    asked = replace(asked, column=asked.column or data.column)
    texts: list[Sequence[str]] = [[one] for one in asked.text] or [data.text]
    say_what_was_trained_on(texts, with_parents(asked.run))
    for text in texts:
        found = scores({"loss": trained.model}, batches(asked, text, trained.tokenizer, data.sequence))["loss"]
        rows.append({"text": _name(text), "losses": {"loss": -float(found.mean())}})
    return rows


def say_what_was_trained_on(texts: Sequence[Sequence[str]], runs: Mapping[Path, Run]) -> None:
    """Name texts that share files with a run's own, but are not all of it: what is held out of each is not what that run has held out."""
    of_text = {folder: run.data.text for folder, run in runs.items() if not run.model.job}
    read = {folder: (_paths(text), _files(text)) for folder, text in of_text.items()}
    for text in texts:
        files = _files(text)
        readers = [str(run) for run, (own, of_run) in read.items() if own != _paths(text) and files & of_run]
        if readers:
            fair = "without --text the part that the run has held out is evaluated"
            options.advise(
                f"what is held out of {_name(text)} here may have been trained on, in {', '.join(readers)}; "
                f"{fair if len(runs) == 1 else 'a fair test is text that none of them was given'}"
            )


def _name(text: Sequence[str]) -> str:
    return ", ".join(text) or "standard library"


def _paths(text: Sequence[str]) -> list[Path]:
    return [Path(one).resolve() for one in text]


def _files(text: Sequence[str]) -> set[Path]:
    """All files of a text that are on this machine."""
    found = find([one for one in _paths(text) if one.exists()]) if text else standard_library()
    return {source.path.resolve() for source in found}


def batches(asked: Options, text: Sequence[str], tokenizer: Tokenizer, sequence: int) -> list[tuple[Tensor, Tensor]]:
    """The held-out batches of a text."""
    corpus = Corpus.open(text, tokenizer, column=asked.column or "text")
    for line in corpus.passed_over:
        options.advise(line)
    return corpus.held_out(EVAL_BATCH * asked.eval_batches, asked.sequence or sequence, asked.batch)


def scores(models: Mapping[str, nn.Module], batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """log p of every token in all batches by each single model, BT."""
    return {
        name: torch.cat([scores_of(model, tokens, targets) for tokens, targets in batches])
        for name, model in models.items()
    }


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _table(rows: list[dict[str, Any]], folder: Path) -> Table:
    table = options.table(f"{folder}: loss in nats per token, on held-out text (measured)")
    table.add_column("text", overflow="fold")
    names = list(rows[0]["losses"])
    for name in [*names, "perplexity", *(["posterior at the end"] if "posterior" in rows[0] else [])]:
        table.add_column(name, justify="right")
    for row in rows:
        losses: dict[str, float] = row["losses"]
        best = max(row.get("posterior", {}).items(), key=lambda one: one[1], default=None)
        told = [f"{best[0]} {text_of_share(best[1])}"] if best else []
        table.add_row(
            row["text"], *(text_of_loss(losses[name]) for name in names), f"{_perplexity(losses[names[0]]):.4g}", *told
        )
    return table
