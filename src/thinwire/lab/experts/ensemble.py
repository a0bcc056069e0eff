"""An ensemble of experts as a folder: ENSEMBLE/DOMAIN is the run of one expert, and has an expert.json beside its model.

There is no list of the experts. So several can be trained at once, on machines that do not communicate, and adding one
changes no file of the others. expert.json is written last: a folder without it is not an expert yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from thinwire.app.trainer.checked_settings import fits
from thinwire.app.trainer.data import Corpus
from thinwire.app.trainer.model import Transformer
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import DataSpec, ModelSpec
from thinwire.app.trainer.setup import make_model
from thinwire.app.trainer.tokenizer import make_tokenizer
from thinwire.app.trainer.tokens import Tokenizer
from thinwire.app.trainer.trained import TrainedModel, check_one_model
from thinwire.errors import CheckpointError, ConfigurationError, ModelError
from thinwire.files import contents, open_regular, parsed, write_whole
from thinwire.lab.experts.mixture import SEQUENCES, Mixture, cached_prior

FORMAT = 1  # format of expert.json
FILE = "expert.json"
DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Expert:
    """The content of expert.json. `sha256` is the digest of model.safetensors, `parent` that of the model from which the expert branched, or "".
    `tokens` and `flops` count the expert's own training, all replicas together.
    """

    domain: str
    sha256: str
    parent: str
    parameters: int
    sequence: int
    tokens: int
    flops: float

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        wrong = [name for name, value in vars(self).items() if not fits(value, hints[name])]
        if wrong or min(self.parameters, self.sequence) < 1 or self.tokens < 0 or not 0 <= self.flops < math.inf:
            raise ValueError(f"{', '.join(wrong) or 'a number'} is out of range")

    @classmethod
    def read(cls, folder: Path) -> Expert:
        """The expert in `folder`. Raises `CheckpointError`."""
        try:
            said = parsed(json.loads, contents(folder / FILE))
            form = said.pop("format")
            expert = cls(**said)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / FILE} cannot be read ({type(error).__name__}: {error}); what `thinwire branch` wrote is needed."
            ) from None
        if form != FORMAT or expert.domain != folder.name:
            raise CheckpointError(
                f"{folder / FILE} is of format {form!r:.40} and domain {expert.domain!r:.80}: format {FORMAT} and the folder's own name are "
                "needed; keep the name that `thinwire branch` gave to it, or branch again."
            )
        return expert

    def write(self, folder: Path) -> None:
        """Make `folder` an expert of the ensemble above it."""
        write_whole(folder / FILE, json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")


@dataclass(frozen=True)
class Ensemble:
    """The experts of a folder, by name."""

    folder: Path
    experts: tuple[Expert, ...]

    @classmethod
    def is_one(cls, folder: Path) -> bool:
        """Whether `folder` contains an expert."""
        return any(folder.glob(f"*/{FILE}"))

    @classmethod
    def read(cls, folder: Path) -> Ensemble:
        """Read the expert.json of each expert in `folder`, not its model. Raises `CheckpointError`."""
        return cls(folder, tuple(Expert.read(file.parent) for file in sorted(folder.glob(f"*/{FILE}"))))

    @property
    def folders(self) -> list[Path]:
        """The run of each expert."""
        return [self.folder / expert.domain for expert in self.experts]

    @cached_property
    def models(self) -> list[nn.Module]:
        """All models, in the order of the experts. Raises `CheckpointError` for a model that does not match its expert.json."""
        assert self.tokenizer  # first, because it compares those of all, and the digests
        return [sound_model(self.folder / one.domain, one.sequence).eval() for one in self.experts]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all experts. Raises `ConfigurationError` if they differ, `CheckpointError` for a damaged model."""
        for expert in self.experts:  # first, because what is in a model of another digest tells nothing
            self._check_digest(expert)
        found = {one.domain: make_tokenizer(DataSpec(), model_in(self.folder / one.domain)) for one in self.experts}
        prints = {domain: tokenizer.fingerprint for domain, tokenizer in found.items()}
        if len(set(prints.values())) > 1:
            raise ConfigurationError(
                f"{self.folder} has experts of several tokenizers, {prints}: one for all is needed."
            )
        return next(iter(found.values()))

    def mixture(self, prior: Sequence[float] | None = None) -> Mixture:
        """The exact mixture of all experts, for inference."""
        mixture = Mixture(self.models, prior)
        return mixture.eval()

    def cached_prior(self, text: Sequence[str], column: str = "text", sequence: int | None = None) -> list[float]:
        """The prior from the first sequences of the held-out part of `text` (files and folders)."""
        corpus = Corpus.open(text, self.tokenizer, column=column)
        return cached_prior(self.mixture(), corpus.held_out(SEQUENCES, sequence or self.sequence, 1))

    @property
    def sequence(self) -> int:
        """The longest sequence with which every expert was trained, in tokens."""
        return min(expert.sequence for expert in self.experts)

    def mean(self) -> TrainedModel | None:
        """One model whose weights are the mean of all experts'; None if their shapes differ."""
        states = [model.state_dict() for model in self.models]
        shapes = [{name: value.shape for name, value in state.items()} for state in states]
        heads = {getattr(getattr(model, "architecture", None), "heads", 0) for model in self.models}
        if len(heads) > 1 or any(shape != shapes[0] for shape in shapes):
            return None
        first = model_in(self.folder / self.experts[0].domain)
        model = make_model(ModelSpec(model=first), self.sequence, 0, self.tokenizer.vocabulary)
        model.load_state_dict({name: _mean([state[name] for state in states]) for name in states[0]})
        return TrainedModel(model.eval(), self.tokenizer, ModelSpec(model=first), None)

    def as_one(self, say: Callable[[str], object]) -> TrainedModel:
        """One model for the ensemble, whose weights are the mean of all experts'. Raises `ConfigurationError` if they have none."""
        mean = self.mean()
        if mean is None:
            raise ConfigurationError(
                f"{self.folder} has experts of different shapes, {', '.join(f'{one.domain} {one.parameters:,}' for one in self.experts)} parameters: "
                "only equal ones have a mean. Use the ensemble with thinwire sample and evaluate, or export one expert's folder."
            )
        say(f"{self.folder}: the mean of the weights of {len(self.experts)} experts")
        return mean

    def evaluated(self, asked: Any) -> list[dict[str, Any]]:
        """The rows of `thinwire evaluate`."""
        from thinwire.lab.experts.evaluation import evaluated

        return evaluated(self, asked)

    def posterior(self, model: Mixture, tokens: Tensor) -> str:
        """Which expert the `model` of all would ask next after the `tokens` [1, T], in words."""
        after = model.posterior(model.scores(tokens[:, :-1], tokens[:, 1:]))[:, 0, -1].exp()
        told = ", ".join(f"{one.domain} {share:.1%}" for one, share in zip(self.experts, after.tolist()))
        return f"posterior over experts at the end: {told}"

    def _check_digest(self, expert: Expert) -> None:
        folder = self.folder / expert.domain
        if (found := sha256_of(folder)) != expert.sha256:
            raise CheckpointError(
                f"{folder / 'model.safetensors'} is not the model that {FILE} names: SHA-256 {found:.16}…, not {expert.sha256:.16}…; "
                "copy it again, or remove its folder."
            )


def enter(folder: Path, run: Run, tokens: int, parent: str) -> Expert:
    """Make the finished run in `folder` an expert for the domain with the folder's name, and return it."""
    model = sound_model(folder, run.data.sequence)
    flops, parameters = tokens * flops_per_token(model, run.data.sequence), sum(p.numel() for p in model.parameters())
    expert = Expert(folder.name, sha256_of(folder), parent, parameters, run.data.sequence, tokens, float(flops))
    expert.write(folder)
    return expert


def model_in(folder: Path) -> str:
    """The model of a finished run, as `--model` takes it. Raises `ConfigurationError` if there is none."""
    file = folder / "model.safetensors"
    if not file.exists():
        check_one_model(folder)
        raise ConfigurationError(
            f"{folder} holds no model.safetensors: a run that has ended is needed; wait for its end, or resume it."
        )
    return f"hf:{folder}" if (folder / "config.json").exists() else str(file)


def sound_model(folder: Path, sequence: int) -> nn.Module:
    """The model in `folder`. Raises `ModelError` if it holds NaN or infinity, with which a mixture gives NaN to every text."""
    model = make_model(
        ModelSpec(model=model_in(folder)), sequence, 0, make_tokenizer(DataSpec(), model_in(folder)).vocabulary
    )
    if not all(one.isfinite().all() for one in model.state_dict().values()):
        raise ModelError(
            f"{folder / 'model.safetensors'} holds NaN or infinity, as after a training that diverged: it can be no expert, nor can one begin "
            "with it; take another run, or train it with a lower --lr."
        )
    return model


def sha256_of(folder: Path) -> str:
    """The SHA-256 of the model in `folder`. Raises `CheckpointError`."""
    try:
        with open_regular(folder / "model.safetensors") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"the model of an expert cannot be read ({error}); copy it again.") from None


def flops_per_token(model: nn.Module, sequence: int) -> int:
    """Floating-point operations to train on one token: a built-in size counts them; for other models 6 for each parameter."""
    if isinstance(model, Transformer):
        return model.architecture.flops_per_token(sequence)
    return 6 * sum(parameter.numel() for parameter in model.parameters())


def _mean(values: Sequence[Tensor]) -> Tensor:
    """The mean in fp64, rounded once. Integer values are taken from the first model."""
    if not values[0].is_floating_point():
        return values[0]
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)
