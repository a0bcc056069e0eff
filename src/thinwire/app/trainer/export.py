"""Writes the trained model, RUN/model.safetensors, and loads it for further training."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from thinwire.app.trainer.adapters import merge_adapters, save_adapters
from thinwire.app.trainer.huggingface import HuggingFace, save_model
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.settings import ModelSpec
from thinwire.app.trainer.tokens import MOST_VOCABULARY, Tokenizer
from thinwire.errors import CheckpointError, ConfigurationError, MissingError, ModelError
from thinwire.files import open_regular, parsed, save_file


def metadata_of(path: str | Path) -> Mapping[str, Any]:
    """The file's metadata about its model: size, vocabulary, positions, context, its tokenizer's fingerprint. Raises `ModelError`."""
    if (Path(path).parent / "config.json").exists():
        raise ModelError(
            f"{path} is beside a config.json: a model of transformers, which is loaded by its folder; give --model hf:{Path(path).parent}."
        )
    try:
        open_regular(Path(path)).close()
        with safe_open(str(path), "pt") as file:
            said = parsed(json.loads, (file.metadata() or {})["thinwire"])
            if not isinstance(said, dict):
                raise ValueError("its metadata is no table")
            wrong = [f"{name} {said.get(name)!r:.80}" for name, fits in _METADATA.items() if not fits(said.get(name))]
            # before a model is made, which has as many rows as its metadata says
            tables = () if wrong else _tables(said)
            rows = {name: file.get_slice(f"{name}.weight").get_shape()[0] for name in tables}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise (MissingError if isinstance(error, FileNotFoundError) else ModelError)(
            f"{path} cannot be read as a model of `thinwire train` ({type(error).__name__}: {error}); give the model.safetensors of a run folder."
        ) from None
    wrong += [f"{name} of {count} rows" for name, count in rows.items() if count != said[_ROWS[name]]]
    if wrong:
        raise ModelError(
            f"{path} holds {', '.join(wrong)}: it is no model of `thinwire train`, whose model is one of {', '.join(SIZES)}, with the vocabulary "
            "and context of its tensors; copy it again. A Hugging Face model starts from its own folder, as --model hf:FOLDER."
        )
    return dict(said)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_VOCABULARY


_METADATA: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str) and value in SIZES,
    "vocabulary": _is_count,
    "context": _is_count,
    "positions": lambda value: value in ("rotary", "learned"),
    "tokenizer": lambda value: isinstance(value, str) and len(value) <= 200,
}
_ROWS = {"embedding": "vocabulary", "positions": "context"}  # the table of each, and the metadata that has its rows


def _tables(said: Mapping[str, Any]) -> list[str]:
    return ["embedding", "positions"] if said.get("positions") == "learned" else ["embedding"]


def stored_model(path: str | Path, vocabulary: int, sequence: int) -> Transformer:
    """The model in the file, for text of `vocabulary` and at least `sequence` tokens. Raises `ModelError`, `ConfigurationError`."""
    said = metadata_of(path)
    if said["vocabulary"] != vocabulary:
        raise ConfigurationError(
            f"{path} has {said['vocabulary']} tokens, the tokenizer has {vocabulary}; take the tokenizer that it was trained with (--tokenizer)."
        )
    size = SIZES[said["model"]]
    context = max(said["context"], sequence)
    shape = dataclasses.replace(size, vocabulary=vocabulary, positions=said["positions"], context=context)
    model = Transformer(shape)
    try:
        # on the device "meta", when a run is only inspected, copying would do nothing and give a warning for each tensor
        model.load_state_dict(load_file(path), assign=model.embedding.weight.is_meta)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model that it names: {error}") from None
    return model


@contextmanager
def draft_folder(folder: Path, what: str) -> Iterator[Path]:
    """A context with a folder for `what`. At its end the files are renamed into `folder` one by one, the model last."""
    draft = Path(tempfile.mkdtemp(prefix=f".{what}-", dir=folder))
    try:
        yield draft
        for file in sorted(draft.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def store(
    folder: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    writer: str,
    mark: str = "",
) -> None:
    """Write `weights` (a state dict of `model`, made by `spec`) to folder/model.safetensors. LoRA adapters are merged into them, and
    also written separately, in peft's form, to folder/adapter. A `mark` such as .stale is added to both names. A Hugging Face
    model is written in the form of transformers.
    Several replicas may write at once, each with its own `writer` name. Raises `CheckpointError`.
    """
    whole = merge_adapters(model, weights) if spec.lora else weights
    path = folder / f"model{mark}.safetensors"
    try:
        with draft_folder(folder, f"model.{writer}") as draft:
            if isinstance(model, HuggingFace):
                save_model(draft, model, whole, tokenizer.fingerprint)
                (draft / "model.safetensors").replace(draft / path.name)
            else:
                # one entry, because safetensors writes several in no fixed order, and equal runs must give equal bytes
                said = {"thinwire": json.dumps(_description(spec, tokenizer, model))}
                save_file(whole, draft / path.name, said)
        if spec.lora:
            save_adapters(folder / f"adapter{mark}", model, weights, spec.model.removeprefix("hf:"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the trained model cannot be written to {path}: {error}.") from error


def store_as_dcp(folder: Path, spec: ModelSpec, model: nn.Module) -> None:
    """Write the weights of `model` to `folder` in the format of torch.distributed.checkpoint, as {"model": state dict}, with merged LoRA.

    torch writes its `.metadata` as a pickle, so nothing here reads it. Raises `OSError`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save  # slow to import, and needed here only

    weights = model.state_dict()
    whole = merge_adapters(model, weights) if spec.lora else weights
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves without it
        try:
            with draft_folder(folder, "export") as draft:
                save({"model": dict(whole)}, checkpoint_id=draft, no_dist=True)
        except (CheckpointException, RuntimeError) as error:  # on a full disk torch says neither
            raise OSError(f"{folder}: the model cannot be written") from error


def _description(spec: ModelSpec, tokenizer: Tokenizer, model: nn.Module) -> dict[str, Any]:
    said = {"model": spec.model, "vocabulary": tokenizer.vocabulary, "positions": spec.positions}
    said |= metadata_of(spec.model) if spec.model.endswith(".safetensors") else {}
    return said | {"context": model.context, "tokenizer": tokenizer.fingerprint}
