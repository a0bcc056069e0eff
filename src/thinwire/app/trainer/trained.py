"""The model of a run at its present state, for `thinwire sample` and `thinwire export`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import registered
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.adapters import merge_adapters
from thinwire.app.trainer.export import stored_model
from thinwire.app.trainer.huggingface import hugging_face
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import ModelSpec
from thinwire.app.trainer.setup import make_model
from thinwire.app.trainer.tokenizer import tokenizer_of
from thinwire.app.trainer.tokens import Tokenizer
from thinwire.checkpoint import Checkpoint, newest, read_tree
from thinwire.errors import ConfigurationError
from thinwire.pieces.partition import Fragment
from thinwire.pieces.training_state import names_in_state
from thinwire.state_tree import unpack


@dataclass(frozen=True)
class TrainedModel:
    """A model with merged adapters, its tokenizer and its specification. `step` is that of the checkpoint; None for a run that has ended."""

    model: nn.Module
    tokenizer: Tokenizer
    spec: ModelSpec
    step: int | None


def trained_model(folder: Path) -> TrainedModel:
    """The model of the run in `folder`; if the run still trains, or was stopped or killed, the anchors of its newest whole checkpoint.

    Raises `ConfigurationError` if there is none, `ModelError`, `CheckpointError`.
    """
    if not (folder / "run.toml").exists():
        raise ConfigurationError(
            f"{folder} holds no run: there is no run.toml in it. Give the folder that `thinwire train` wrote."
        )
    run = Run.load(folder / "run.toml")
    file = folder / "model.safetensors"
    if run.model.job:
        load = "Load" if file.exists() and not trains_on(folder) else "When it has ended, load"
        raise ConfigurationError(
            f"{folder} has trained {run.model.label}, whose model only that file can make; a language model is needed here. {load} the "
            f"weights into your model with safetensors.torch.load_model(model, {str(file)!r})."
        )
    tokenizer, spec = tokenizer_of(run.data, run.model.model, folder), dataclasses.replace(run.model, lora=None)
    if file.exists() and not trains_on(folder):
        hf = run.model.model.startswith("hf:")
        model: nn.Module = hugging_face(folder) if hf else stored_model(file, tokenizer.vocabulary, run.data.sequence)
        return TrainedModel(model.eval(), tokenizer, spec, None)
    check_one_model(folder)
    found = [one for own in sorted(folder.glob("checkpoints/*")) if (one := newest(own)[0]) and "shard" not in own.name]
    if run.outlined().make_method():
        raise ConfigurationError(
            f"{folder} holds no model.safetensors, which a run with {run.method.label} has at its end only; its checkpoints do not show which "
            "weights the replicas agree on."
        )
    if not found:
        raise ConfigurationError(
            f"{folder} holds no model.safetensors yet, and no checkpoint of whole replicas from which its model could be read; wait for "
            "its first checkpoint, or for its end."
        )
    saved = max(found, key=lambda one: one.step)
    adapted = make_model(run.model, run.data.sequence, run.seed, tokenizer.vocabulary)
    weights = agreed_weights(run, saved, adapted)
    model = adapted
    if run.model.lora:
        model = make_model(spec, run.data.sequence, run.seed, tokenizer.vocabulary)
        weights = merge_adapters(adapted, adapted.state_dict() | weights)
    model.load_state_dict(weights, strict=False)  # tied weights are saved once
    return TrainedModel(model.eval(), tokenizer, spec, saved.step)


def check_one_model(folder: Path) -> None:
    """Raise `ConfigurationError` if the run in `folder` has a model for each replica."""
    if models := sorted(folder.glob("models/*/model.safetensors")):
        named = ", ".join(str(path.parent) for path in models)
        raise ConfigurationError(f"{folder} holds a model of each replica: give one of {named}.")


def with_parents(*folders: Path) -> dict[Path, Run]:
    """The runs in `folders`, those from whose models they began, and so on, as far as their run files can be read on this machine."""
    runs = dict[Path, Run]()
    ahead = list(folders)
    while ahead:
        folder = ahead.pop(0)
        if folder in runs:
            continue
        try:
            runs[folder] = run = Run.load(folder / "run.toml")
        except ConfigurationError:
            continue
        if run.model.model.startswith("hf:"):
            ahead.append(Path(run.model.model.removeprefix("hf:")))
        elif run.model.model.endswith(".safetensors"):
            ahead.append(Path(run.model.model).parent)
    return runs


def trains_on(folder: Path) -> bool:
    """Whether a run that had ended was resumed, has a checkpoint since then, and has not ended again."""
    # the latter for replicas with different models
    models = [folder / "model.safetensors", *folder.glob("models/*/model.safetensors")]
    ended = max(path.stat().st_mtime for path in models if path.exists())
    newer = any(path.stat().st_mtime > ended for path in folder.glob("checkpoints/*/step-*/manifest.json"))
    return (
        newer and any(folder.glob("events/*.jsonl")) and RunRecord.load(folder).status.startswith(("stopped", "still"))
    )


def agreed_weights(run: Run, saved: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's agreed weights, with buffers and frozen parameters; in gossip, which has no agreed weights, the replica's own."""
    weights: dict[str, Any] = unpack(read_tree(saved.path / "model.safetensors"), "model")
    # a codec of the user's own changes nothing here
    strategy = run.outlined(but=("strategy", "partition", "exchange", "topology")).make_strategy()
    # weights are equal on all replicas, or on none
    if strategy.exchanges_gradients or not strategy.exchange.traits.agrees:
        return weights
    state = unpack(read_tree(saved.path / "outer.safetensors"), "outer")
    return weights | at_the_anchors(model, weights, state, strategy.partition.fragments(model))


def at_the_anchors(
    model: nn.Module, weights: Mapping[str, Any], state: Mapping[str, Tensor], fragments: Sequence[Fragment]
) -> dict[str, Tensor]:
    """The exchanged parameters of `model` with the values of the anchors in a checkpoint's `state`, in the types of its `weights`."""
    parameters: dict[str, Tensor] = {}
    names = names_in_state(model)
    for index, fragment in enumerate(fragments):
        begin = 0
        for _, parameter in fragment.parameters:
            end, spelled = begin + parameter.numel(), names[id(parameter)]
            value = state[f"{index}.anchor"][begin:end].view(parameter.shape).to(weights[spelled[0]].dtype)
            parameters |= dict.fromkeys(spelled, value)
            begin = end
    return parameters


def models_in(folder: Path) -> Any | None:
    """What a package knows to read in `folder`, if it holds models other than a run's (entry points `thinwire.models`); None: nothing."""
    kinds = registered.registered(registered.MODELS).values()
    return next((kind.read(folder) for kind in kinds if kind.is_one(folder)), None)


@torch.no_grad()
def scores_of(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """log p(target | tokens up to it), BT in fp64 on the CPU."""
    if not tokens_BT.numel():  # a model reads at least one token
        return targets_BT.double().cpu()
    logs_BTV = model(tokens_BT).logits.float().log_softmax(-1)
    of_targets_BT: Tensor = logs_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)
    return of_targets_BT.double().cpu()
