"""Everything that makes a run, in one value: what the command line takes and what a run file holds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from thinwire.comm import parse_link
from thinwire.elastic import driver as elastic
from thinwire.errors import ConfigurationError
from thinwire.files import contents, parsed
from thinwire.membership.timeouts import grace_seconds
from thinwire.methods import METHODS, Method
from thinwire.own_files import pinned, shortened
from thinwire.parsing import PIECES, nearest, parse, pieces_of
from thinwire.pieces.inner_optimizers import AdamW, Inner
from thinwire.pieces.transforms import Clip
from thinwire.recipes import RECIPES
from thinwire.strategy import Strategy

OF_THE_RECIPE = (
    *("every", "delay", "fragments", "merge", "codec", "partition", "offsets"),
    *("exchange", "outer_lr", "outer_momentum", "anchors"),
)
OF_THE_PLACE = (
    "text",
    "link",
    "uplink",
    "carrier",
    "timeout",
    "replicas",
    "strategy",
    "model",
    "keep",
    *OF_THE_RECIPE,
)  # may differ
NAMED = RECIPES | METHODS
OF_PIECES = ("strategy", "codec", "partition", "exchange", "privacy", "optimizer")  # written as text
OF_A_CHECKPOINT = ("replicas", "seed", "model", "lora", "positions", "tokenizer", "optimizer")  # beside the strategy


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run. Raises `ConfigurationError` when made, if it cannot work."""

    strategy: str = "streaming_diloco"
    """A recipe (data_parallel, local_sgd, diloco, streaming_diloco, dgc, one_bit_adam, ...), a method with a loop of its own
    (just_one_byte, fedavg, scaffold, scallion, scafcom, flasc), or a whole Strategy(...) in Python; thinwire docs strategies helps to choose."""
    replicas: int = 2
    """How many replicas train (under torchrun: the world is replicas times the ranks of one replica)."""
    steps: int = 800
    """Inner steps of every replica."""
    seed: int = 0
    """Of everything: weights, order of the text, what codecs draw by chance."""

    every: int | None = None
    """H: inner steps between two rounds of one fragment. Without: the recipe's own, as for all of this part."""
    delay: int | None = None
    """tau: inner steps that a round may be in the air; training goes on."""
    fragments: int | None = None
    """Fragments of layers; what is outside the layers is one more."""
    merge: float | None = None
    """alpha: how much of its own values a replica keeps when a round lands, 0 to 1."""
    codec: str | None = None
    """How deltas travel: E3M0 or E3M0(block=32) (4 bits), Cast('bf16'), Identity (fp32)."""
    partition: str | None = None
    """Strided(4), Sequential(4), BySize(4) or Whole; replaces --fragments."""
    offsets: tuple[int, ...] | None = None
    """The inner step at which each fragment first departs."""
    exchange: str | None = None
    """How packets become one estimate: Direct, TwoShot, AllReduce, Hierarchy((2, 2)), or Fastest('20mbit,40ms') to let the link decide."""
    outer_lr: float | None = None
    """Learning rate of the outer step."""
    outer_momentum: float | None = None
    """Nesterov momentum of the outer step."""
    anchors: Literal["host", "device"] | None = None
    """Where anchors and outer state live."""

    privacy: str | None = None
    """Clip and add noise to what is sent, and say how private that is: Privacy(clip=0.5, noise=4.0)."""

    carrier: Literal["processes", "threads", "elastic"] = "processes"
    """Replicas as processes under torch.distributed, as threads of one process, or as processes that may die, return and join late."""
    least: int = 2
    """Elastic: so many replicas are needed for a round. With fewer they train on and wait; 1: each may go on alone."""
    grace: str | None = None
    """Elastic: how long a round waits for a replica that is late, such as 5s or '20 steps'. Without: the schedule's slack."""
    weigh: Literal["alike", "tokens"] = "alike"
    """Elastic: every delta counts alike, or by the tokens behind it, where replicas are unequally fast."""
    evict: bool = False
    """Elastic: go on without a replica that most of the others find to hold them up (thinwire docs diagnosis)."""
    link: str = "none"
    """Emulate a link of this rate and delay under the carrier, such as 50mbit,30ms."""
    uplink: str = "none"
    """Rate at which this replica can really send, such as 100mbit: its connections are paced to share that. none: TCP alone decides."""
    timeout: float = 300.0
    """Seconds that a replica waits for a packet before it gives the others up."""

    model: str = "tiny"
    """A size (nano, tiny, mini, 35m, 100m, 200m, 300m, 500m, 1b, 4b), RUN/model.safetensors for one that was trained before, or
    hf:FOLDER_OR_NAME for a Hugging Face causal LM."""
    lora: int | None = None
    """Rank of LoRA adapters: only they are trained and exchanged. Without: the whole model."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How the model knows where a token stands."""
    text: tuple[str, ...] = ()
    """Files and folders (.txt, .jsonl, .parquet, ...). Without: the sources of Python's standard library."""
    column: str = "text"
    """Where .jsonl and .parquet keep the text."""
    tokenizer: str | None = None
    """bytes, bpe:SIZE to train one on the text, bpe:FILE.json of a trained one, or hf:FOLDER_OR_NAME of a Hugging Face model's.
    Without: the one that --model was trained with, else bytes."""

    batch: int = 8
    """Sequences in a micro-batch of a replica."""
    sequence: int = 128
    """Tokens in a sequence."""
    accumulate: int = 1
    """Micro-batches in an inner step."""
    optimizer: str | None = None
    """Inner optimizer: AdamW, SGD(0.9, lr_factor=100) or Muon. Without: the strategy's own, AdamW if it has none."""
    lr: float = 6e-3
    """Peak learning rate, as it suits AdamW; other inner optimizers have a factor of their own."""
    warmup: int | None = None
    """Inner steps of linear warm-up. Without: a tenth of all, at most 1000. Then a cosine to 5 % of the peak."""
    weight_decay: float = 0.1
    """Of the inner optimizer: weights shrink by lr times this in a step."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip. Of strategies with filters: of each replica's, before the exchange."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast. auto: bf16 on a GPU that has it, else fp32."""
    eval_every: int | None = None
    """Inner steps between evaluations of the anchors on held-out text. Without: ten in the run."""
    eval_batches: int = 16
    """Batches of held-out text in an evaluation."""
    checkpoint_every: int = 100
    """Inner steps between checkpoints; 0 makes none but at a stop."""
    keep: int = 3
    """Checkpoints that are kept."""

    def __post_init__(self) -> None:
        hints = get_type_hints(Run)
        for field in dataclasses.fields(self):
            if not _fits(value := getattr(self, field.name), hints[field.name]):
                raise ConfigurationError(f"{field.name}={value!r:.200}: {field.type} is needed.")
        positive = (
            "replicas",
            "least",
            "steps",
            "batch",
            "sequence",
            "accumulate",
            "eval_batches",
            "keep",
            "eval_every",
            "lora",
        )
        for name in positive:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: at least 1 is needed.")
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}={getattr(self, name)}: more than 0 is needed.")
        for name in ("weight_decay", "clip", "checkpoint_every", "warmup"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise ConfigurationError(f"{name}={value}: 0 or more is needed.")
        parse_link(self.link)
        if self.grace is not None:
            grace_seconds(self.grace, 1.0)
        self._check_uplink()
        self._composition()
        self.make_inner()
        if self.carrier == "elastic":
            self._check_elastic(self._composition())

    def _check_elastic(self, strategy: Strategy | Method) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                f"strategy={self.label} with carrier='elastic': a method with a loop of its own trains with a fixed group; "
                "leave --elastic out, or choose a recipe."
            )
        elastic.check(strategy)
        if self.least > self.replicas:
            raise ConfigurationError(
                f"least={self.least} with replicas={self.replicas}: no round would ever be held; choose least <= replicas."
            )

    def make_inner(self) -> Inner:
        """The inner optimizer: the one that was asked for, else the strategy's own, else AdamW."""
        made = self._composition()
        own = made.inner if isinstance(made, Strategy) else None
        if self.optimizer is None:
            return own or AdamW()
        inner = parse(self.optimizer, offered=pieces_of("pieces.inner_optimizers"), own_files=True)
        if not isinstance(inner, Inner):
            raise ConfigurationError(f"optimizer={self.optimizer!r}: AdamW, SGD(...) or Muon is needed.")
        if not isinstance(made, Strategy):
            raise ConfigurationError(
                f"optimizer={self.optimizer!r} with {self.label}: that method is an optimizer itself; leave it out."
            )
        if own and inner != own:
            raise ConfigurationError(
                f"optimizer={self.optimizer!r} with {self.label}: that method is one with its inner optimizer, {own}; leave it out, or "
                "give a Strategy(...) with another inner."
            )
        return inner

    def _check_uplink(self) -> None:
        uplink = parse_link(self.uplink)
        if uplink and (uplink.delay_seconds or self.carrier != "processes"):
            raise ConfigurationError(
                f"uplink={self.uplink!r} with carrier={self.carrier!r}: a rate alone is needed, such as 100mbit, and carrier='processes'. "
                "To emulate a link with a delay, use link."
            )

    def make_strategy(self) -> Strategy:
        """The strategy with what was given for its recipe, and with the run's seed. Raises `ConfigurationError` for a method
        that is none.
        """
        made = self._composition()
        if not isinstance(made, Strategy):
            raise ConfigurationError(
                f"strategy={self.label} has a loop of its own; `thinwire train` and `compare` run it, here one of {', '.join(RECIPES)} is needed."
            )
        return dataclasses.replace(made, seed=self.seed)

    def make_method(self) -> Method | None:
        """The method with a loop of its own, with the run's seed; None if this is a strategy."""
        made = self._composition()
        return None if isinstance(made, Strategy) else dataclasses.replace(made, seed=self.seed)  # type: ignore[type-var]

    def _composition(self) -> Strategy | Method:
        made = self._composed()
        if self.privacy is None:
            return made
        if not isinstance(made, Strategy):
            raise ConfigurationError(
                f"privacy={self.privacy!r} with {self.label}: deltas of a Strategy can be clipped and made noisy; choose a recipe."
            )
        return dataclasses.replace(made, privacy=parse(self.privacy, own_files=True))

    def _composed(self) -> Strategy | Method:
        given = {name: getattr(self, name) for name in OF_THE_RECIPE if getattr(self, name) is not None}
        for name, room in (("codec", "codecs"), ("partition", "pieces.partition"), ("exchange", "exchange")):
            if name in given:
                given[name] = parse(given[name], offered=pieces_of(room), own_files=True)
        if self.partition and self.fragments:
            raise ConfigurationError(
                f"partition={self.partition!r} with fragments={self.fragments}: each says how the model is cut; give one of them."
            )
        name = _recipe_name(self.strategy)
        if name in NAMED:
            taken = list(inspect.signature(NAMED[name]).parameters)
            foreign = [key for key in given if key not in taken]
            if foreign:
                raise ConfigurationError(f"{name} takes no {', '.join(foreign)}; it takes {', '.join(taken)}.")
            made = NAMED[name](**given)
            if isinstance(made, Strategy) and any(isinstance(one, Clip) for one in made.filters):
                return NAMED[name](**(given | {"clip": self.clip}))
            return made
        if name.isidentifier() and name not in PIECES:
            raise ConfigurationError(
                f"strategy={self.strategy!r} is no recipe{nearest(name, NAMED)}; one of {', '.join(NAMED)}, or a whole Strategy(...), is needed."
            )
        if given:
            raise ConfigurationError(
                f"strategy={self.strategy!r} with {', '.join(given)}: those go with a recipe's name ({', '.join(NAMED)}); "
                "write them inside the parentheses."
            )
        strategy: object = parse(self.strategy, PIECES | NAMED, [*NAMED, "Strategy"], own_files=True)
        if not isinstance(strategy, Strategy | Method):
            raise ConfigurationError(
                f"strategy={self.strategy!r} is a {type(strategy).__name__}; a Strategy or a recipe is needed."
            )
        return strategy

    def with_strategy(self, strategy: str) -> Run:
        """This run with another strategy, and of the settings of a recipe those that it takes."""
        recipe = NAMED.get(_recipe_name(strategy))
        taken = inspect.signature(recipe).parameters if recipe else ()
        foreign = {name: None for name in OF_THE_RECIPE if name not in taken}
        return dataclasses.replace(self, strategy=strategy, **foreign)  # type: ignore[arg-type]

    def absolute(self) -> Run:
        """This run with the paths of text, model, tokenizer and files of pieces as they are from everywhere."""
        model = self.model
        if model.endswith(".safetensors"):
            model = str(Path(model).absolute())
        text = tuple(str(Path(path).absolute()) for path in self.text)
        pieces: dict[str, Any] = {
            name: pinned(value) for name in OF_PIECES if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(
            self, text=text, model=_absolute(model), tokenizer=self.tokenizer and _absolute(self.tokenizer), **pieces
        )

    def made_of(self) -> dict[str, Any]:
        """What the strategy is with all that its recipe decides."""
        made = self._composition()
        if not isinstance(made, Strategy):
            return {"every": made.every, "composition": repr(made)}
        parts = {name: repr(getattr(made, name)) for name in ("partition", "codec", "outer")}
        return {"every": made.schedule.every, "delay": made.schedule.delay, **parts, "composition": repr(made)}

    def unlike(self, other: Run) -> str:
        """In what this run cannot go on from a checkpoint of `other`; empty if it can."""
        self, other = self.absolute(), other.absolute()
        differing = [name for name in OF_A_CHECKPOINT if getattr(self, name) != getattr(other, name)]
        said = [f"{name} {getattr(other, name)!r} there, {getattr(self, name)!r} given" for name in differing]
        # checkpoints of the one know of rounds, the others' of flights
        if (self.carrier == "elastic") != (other.carrier == "elastic"):
            said.append(f"carrier {other.carrier!r} there, {self.carrier!r} given")
        if self._composition() != other._composition():
            said.append(f"strategy {other.label} there, {self.label} given")
        return ", ".join(said)

    @property
    def label(self) -> str:
        """The strategy as a person would write it: its name and what was given for it."""
        given = [f"{name}={getattr(self, name)}" for name in OF_THE_RECIPE if getattr(self, name) is not None]
        return shortened(self.strategy + (f"({', '.join(given)})" if given else ""))

    def shared(self) -> dict[str, Any]:
        """What all replicas must have alike beside model and strategy, which `Replica` compares itself."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in OF_THE_PLACE}

    def save(self, path: Path) -> None:
        """Write a run file, with what the recipe decides as a comment; what is None is left out."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        partial = path.with_name(f".{path.name}.{os.getpid()}")  # several processes may write the same file at once
        said = "".join(f"# {name}: {value}\n" for name, value in self.made_of().items())
        partial.write_bytes(f"{tomli_w.dumps(fields)}\n# What the strategy is made of:\n{said}".encode())
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run file. Raises `ConfigurationError` naming what is not known or cannot be read."""
        try:
            fields = parsed(tomllib.loads, contents(path))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read as a run file ({error}); `thinwire train` writes one as run.toml."
            ) from None
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigurationError(f"{path}: {', '.join(unknown)} not known; a run has {', '.join(sorted(known))}.")
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        try:
            return cls(**(fields | lists))
        except TypeError as error:
            raise ConfigurationError(f"{path}: {error}; compare with the run.toml of a run that works.") from None


def _absolute(name: str) -> str:
    """`hf:FOLDER` and `bpe:FILE` with the whole path; what is no path stays as it is."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).absolute()}" if Path(path).exists() and not path.isdigit() and colon else name


def _recipe_name(strategy: str) -> str:
    return strategy.strip().replace("-", "_")


def _fits(value: object, hint: Any) -> bool:
    """Whether `value` is what a field's type says. A whole number is a float too; a bool is no number."""
    if isinstance(hint, types.UnionType) or (origin := get_origin(hint)) is Union:
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        return False
    return type(value) in ((int, float) if hint is float else (hint,))
