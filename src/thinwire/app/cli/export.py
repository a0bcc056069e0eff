"""`thinwire export`: writes a run's model for use in other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from safetensors import SafetensorError

from thinwire.app.cli import options
from thinwire.app.records.printable import quoted
from thinwire.app.trainer.apertus import apertus_config, save_as_apertus
from thinwire.app.trainer.export import draft_folder, store, store_as_dcp
from thinwire.app.trainer.model import Transformer
from thinwire.app.trainer.tokenizer import keep_tokenizer
from thinwire.app.trainer.trained import models_in, trained_model
from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """The options of `thinwire export`."""

    run: tyro.conf.Positional[Path]
    """The run folder. Exports the newest checkpoint of a running run; of an ensemble the mean of its experts' weights."""
    to: Literal["hf", "safetensors", "dcp"] = "hf"
    """hf: a folder with model and tokenizer for transformers' from_pretrained; a bundled model becomes an Apertus. safetensors: the tensors
    under their names in Thinwire, for --model. dcp: the same tensors, under `model`, for torch.distributed.checkpoint."""
    out: Path | None = None
    """The folder to write, new or empty. Default: RUN/exported-hf, -safetensors or -dcp."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "export", arguments, "Write a run's model for use elsewhere.")
    others = models_in(asked.run)
    trained = others.as_one(options.advise) if others else trained_model(asked.run)
    options.warn_of_outcome(asked.run)
    out = asked.out or asked.run / f"exported-{asked.to}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} is there already; choose another --out, or remove it.")
    dcp = asked.to == "dcp"
    # a model of transformers has only one form
    hf = not dcp and (asked.to == "hf" or not isinstance(trained.model, Transformer))
    bundled = trained.model if hf and isinstance(trained.model, Transformer) else None
    config = apertus_config(bundled, trained.tokenizer) if bundled else None  # it refuses before the folder is made
    out.mkdir(parents=True, exist_ok=True)
    try:
        if dcp:
            store_as_dcp(out, trained.spec, trained.model)
        elif bundled:
            with draft_folder(out, "export") as draft:
                save_as_apertus(draft, config, bundled, trained.tokenizer)
        else:
            store(out, trained.spec, trained.tokenizer, trained.model, trained.model.state_dict(), "export")
        keep_tokenizer(out, "hf:" if hf else trained.spec.model, trained.tokenizer, "export")
    except SafetensorError as error:
        raise OSError(f"{out}: {error}") from None
    console = options.console(asked.json)
    if trained.step is not None:
        options.advise(f"the run has not ended: this is the model of step {trained.step}")
    uses = {
        "hf": f'AutoModelForCausalLM.from_pretrained("{out}")',
        "safetensors": f"thinwire train --model {quoted(out / 'model.safetensors')}",
        "dcp": f'torch.distributed.checkpoint.load({{"model": model.state_dict()}}, checkpoint_id="{out}")',
    }
    console.print(f"{out}: {uses['hf' if hf else asked.to]}", soft_wrap=True, highlight=False)
    files = sorted(path.name for path in out.iterdir())
    return options.answer(asked.json, {"out": str(out), "files": files, "step": trained.step})
