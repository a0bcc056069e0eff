"""The parts of a run's settings, beside its placement. Each goes only to the code that uses it; `Run` (app/trainer/run.py) holds them all.

A setting has one name: of the field here, of the option of `thinwire train`, and in a table of a run file.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinwire.app.trainer.checked_settings import CheckedSettings
from thinwire.catalogue.methods import NAMED
from thinwire.catalogue.parsing import PIECES, parse, pieces_of
from thinwire.choices import listed, nearest
from thinwire.codecs import Codec
from thinwire.drivers.attached import Method
from thinwire.errors import ConfigurationError
from thinwire.exchange import Exchange
from thinwire.pieces.aggregate import Aggregate
from thinwire.pieces.own_files import shorten, taken_apart
from thinwire.pieces.partition import Partition
from thinwire.pieces.transforms import Clip
from thinwire.registered import METHODS, absent, setting
from thinwire.strategy import Strategy

OF_THE_RECIPE = (
    *("every", "delay", "fragments", "merge", "codec", "partition", "offsets"),
    *("exchange", "outer_lr", "outer_momentum", "anchors", "topology"),
)


@dataclass(frozen=True, kw_only=True)
class MethodSpec(CheckedSettings):
    """The strategy: what the replicas exchange, and when."""

    at_least_one: ClassVar[tuple[str, ...]] = ("liars",)

    strategy: str = "streaming_sign"
    """A recipe (data_parallel, local_sgd, diloco, streaming_diloco, streaming_sign, dgc, one_bit_adam, ...), a method with its own loop
    (just_one_byte, fedavg, scaffold, scallion, scafcom, flasc), one for replicas of unequal speed (decoupled_diloco, async_local_sgd, ad_psgd,
    a2cid2), for sites (halos), samples (plexus) or different models (codistill), or a whole Strategy(...) in Python; thinwire docs strategies helps
    to choose."""
    every: int | None = None
    """H: inner steps between two rounds of one fragment. Default of this and the next options: the recipe's own."""
    delay: int | None = None
    """tau: inner steps for which a round may be in flight while training continues."""
    fragments: int | None = None
    """Number of fragments of layers. One more fragment holds the parameters outside the layers."""
    merge: float | None = None
    """alpha: share of its own values that a replica keeps when a round lands, 0 to 1."""
    codec: str | None = None
    """Codec of the deltas: TopK(0.1, Sign(block=512)) (0.6 bits), E3M0(block=32) (4 bits), Cast('bf16'), Identity (fp32)."""
    partition: str | None = None
    """Strided(4), Sequential(4), BySize(4) or Whole; replaces --fragments."""
    offsets: tuple[int, ...] | None = None
    """The inner step at which each fragment first departs."""
    exchange: str | None = None
    """How packets become one estimate: Direct, TwoShot, AllReduce, Hierarchy((2, 2)), or Fastest('20mbit,40ms') to choose by the link."""
    outer_lr: float | None = None
    """Learning rate of the outer step."""
    outer_momentum: float | None = None
    """Nesterov momentum of the outer step."""
    anchors: Literal["host", "device", "disk"] | None = None
    """Where anchors and outer state are kept; on disk, only fragments that depart next or are in flight are in memory."""
    state_dtype: Literal["fp32", "bf16"] | None = None
    """Type of outer momentum and feedback: in bf16 they take half the memory. Default: the recipe's own, fp32."""
    topology: str | None = None
    """Gossip: graph of neighbours: Ring, RandomPairs, Exponential, Torus, RandomRegular(3), ..., or a JSON file of edges (thinwire docs gossip)."""
    privacy: str | None = None
    """Clip deltas, add noise, and report epsilon: Privacy(clip=0.5, noise=4.0)."""
    guard: str | None = None
    """Clip deltas with abnormally large norms: off clips none, Guard(z=10) clips fewer. Default: Guard()."""
    aggregate: str | None = None
    """How the deltas of all replicas become one: Mean, or a robust rule such as TrimmedMean(2) or GeometricMedian (thinwire docs robust)."""
    attack: str | None = None
    """Only `thinwire compare`: what liars send instead of their deltas, such as ALIE, SignFlip or IPM(0.1) (thinwire docs robust)."""
    liars: int | None = None
    """With --attack: number of replicas that lie, the last ones. Default: 1."""

    def composition(self, clip: float) -> Strategy | Method:
        """The strategy with the settings of its recipe. A recipe with a filter that clips uses `clip`. Raises `ConfigurationError`."""
        made, attack = self._composed(clip), self.liar()
        if made.own_loop:
            if self.privacy is not None:
                raise ConfigurationError(
                    f"privacy={self.privacy!r} with {self.label}: deltas of a Strategy can be clipped and made noisy; choose a recipe."
                )
            if self.aggregate is not None or self.guard is not None or self.state_dtype is not None or attack:
                raise ConfigurationError(
                    f"aggregate={self.aggregate!r}, guard={self.guard!r}, state_dtype={self.state_dtype!r}, attack={self.attack!r} with "
                    f"{self.label}: a method with its own loop has none of them; choose a recipe."
                )
            return made
        if self.state_dtype is not None:
            made = dataclasses.replace(made, state_dtype=self.state_dtype)
        if self.guard is not None:
            guard = None if self.guard == "off" else parse(self.guard, offered=("off", "Guard"))
            made = dataclasses.replace(made, guard=guard)
        if self.aggregate is not None:
            rule = parse(self.aggregate, offered=pieces_of(Aggregate), own_files=True)
            made = dataclasses.replace(made, aggregate=rule)
        if attack:
            made = dataclasses.replace(made, exchange=attack.among(made.exchange, self.liars or 1))
        return made if self.privacy is None else dataclasses.replace(made, privacy=parse(self.privacy, own_files=True))

    def liar(self) -> Any | None:
        """The attack of the liars, if there are any. Raises `ConfigurationError`."""
        if self.attack is None:
            if self.liars is not None:
                raise ConfigurationError(f"liars={self.liars} without an attack: give one, such as attack='ALIE'.")
            return None
        return setting("attack")(self.attack)

    def _composed(self, clip: float) -> Strategy | Method:
        given = {name: getattr(self, name) for name in OF_THE_RECIPE if getattr(self, name) is not None}
        for name, kind in (("codec", Codec), ("partition", Partition), ("exchange", Exchange)):
            if name in given:
                given[name] = parse(given[name], offered=pieces_of(kind), own_files=True)
        if self.topology is not None:
            given["topology"] = setting("topology")(self.topology)
        if self.partition and self.fragments:
            raise ConfigurationError(
                f"partition={self.partition!r} with fragments={self.fragments}: both set how the model is cut; give one of them."
            )
        name = recipe_name(self.strategy)
        if name in NAMED:
            taken = list(inspect.signature(NAMED[name]).parameters)
            foreign = [key for key in given if key not in taken]
            if foreign:
                others = [
                    other for other, recipe in NAMED.items() if {*given} <= {*inspect.signature(recipe).parameters}
                ]
                advice = f" Choose --strategy {' or '.join(others[:3])} for it." if others else ""
                raise ConfigurationError(f"{name} takes no {', '.join(foreign)}; it takes {', '.join(taken)}.{advice}")
            made: Strategy | Method = NAMED[name](**given)
            if not made.own_loop and any(isinstance(one, Clip) for one in made.filters):
                made = NAMED[name](**(given | {"clip": clip}))
            return made
        if name.isidentifier() and name not in PIECES:
            raise ConfigurationError(
                f"strategy={self.strategy!r} is no recipe{nearest(name, NAMED)}; one of {listed(NAMED, 'thinwire docs strategies')}, "
                f"or a whole Strategy(...), is needed.{absent(METHODS)}"
            )
        if given:
            raise ConfigurationError(
                f"strategy={self.strategy!r} with {', '.join(given)}: these options are for a recipe's name, such as --strategy diloco; "
                "write them inside the parentheses."
            )
        strategy: object = parse(self.strategy, PIECES | NAMED, [*NAMED, "Strategy"], own_files=True)
        if not isinstance(strategy, Strategy | Method):
            raise ConfigurationError(
                f"strategy={self.strategy!r} is a {type(strategy).__name__}; a Strategy or a recipe is needed."
            )
        return strategy

    def with_strategy(self, strategy: str) -> MethodSpec:
        """The same settings with another strategy, without those that its recipe does not take."""
        recipe = NAMED.get(recipe_name(strategy))
        taken = inspect.signature(recipe).parameters if recipe else ()
        foreign = {name: None for name in OF_THE_RECIPE if name not in taken}
        return dataclasses.replace(self, strategy=strategy, **foreign)

    @property
    def label(self) -> str:
        """The strategy for display: its name and its settings."""
        named = (*OF_THE_RECIPE, "state_dtype", "aggregate", "guard", "attack", "liars")
        given = [f"{name}={getattr(self, name)}" for name in named if getattr(self, name) is not None]
        return shorten(self.strategy + (f"({', '.join(given)})" if given else ""))


LEAST_EVAL_BATCHES = 4  # a short run evaluates less often rather than on fewer


@dataclass(frozen=True, kw_only=True)
class DataSpec(CheckedSettings):
    """The text, its tokenizer, the size of an inner step, and the evaluation on held-out text."""

    at_least_one: ClassVar[tuple[str, ...]] = ("batch", "sequence", "accumulate", "eval_every", "eval_batches")

    text: tuple[str, ...] = ()
    """Files and folders (.txt, .jsonl, .parquet, ...). Default: the sources of Python's standard library."""
    own_text: bool = False
    """Elastic runs: each replica has its own text. Default: all have the same text, and each reads a part of it."""
    column: str = "text"
    """Name of the text column in .jsonl and .parquet files."""
    tokenizer: str | None = None
    """bytes, bpe:SIZE (trained on the text), bpe:FILE.json, or hf:FOLDER_OR_NAME. Default: that of --model's training, otherwise bytes."""
    batch: int | tuple[int, ...] = 8
    """Sequences per micro-batch of a replica; or one number for each replica, smaller for a slow machine, such as 8 4 2."""
    sequence: int = 128
    """Tokens per sequence."""
    accumulate: int = 1
    """Micro-batches per inner step."""
    eval_every: int | None = None
    """Inner steps between evaluations of the anchors on held-out text. Default: ten evaluations per run, fewer in short runs."""
    eval_batches: int | None = None
    """Held-out batches per evaluation, each of 8 sequences, whatever --batch is. Default: 16; fewer in short runs, whose evaluations are at
    most about a tenth of the training's work."""

    @property
    def batches(self) -> tuple[int, ...]:
        """The micro-batch of each replica, if they differ; otherwise ()."""
        return self.batch if isinstance(self.batch, tuple) and len(set(self.batch)) > 1 else ()

    @property
    def largest_batch(self) -> int:
        """The largest micro-batch of a replica."""
        return self.batch if isinstance(self.batch, int) else max(self.batch)

    @property
    def mean_batch(self) -> float:
        return sum(self.batches) / len(self.batches) if self.batches else self.largest_batch

    def batch_of(self, replica: int) -> int:
        return self.batches[replica] if self.batches else self.largest_batch

    def evaluations(self, steps: int) -> tuple[int, int]:
        """(inner steps between evaluations, batches of one) of a run of `steps`.

        A sequence costs a third in an evaluation, because it has no backward pass. So with the defaults, a run evaluates at most 0.3
        times as many sequences as a replica trains, but at least one batch at its end: first with fewer batches (4 at least), then
        less often, then with fewer batches still.
        """
        count = max(1, steps // self.eval_every) if self.eval_every else min(10, steps)
        if self.eval_batches is not None:
            return self.eval_every or max(1, steps // 10), self.eval_batches
        # batches of 8 sequences, all evaluations together
        most = max(1, int(0.3 * steps * self.mean_batch * self.accumulate) // 8)
        batches = min(16, max(LEAST_EVAL_BATCHES, most // count))
        if self.eval_every is None and batches * count > most:
            count = max(1, most // batches)
        return self.eval_every or max(1, -(-steps // count)), max(1, min(batches, most // count))

    @property
    def tokens(self) -> int:
        """Tokens of a replica in one inner step, in the mean over all."""
        return round(self.mean_batch * self.sequence * self.accumulate)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(CheckedSettings):
    """The model that is trained.

    Raises:
        ConfigurationError: a setting is of the wrong type or out of range, or does not go with `job`.

    >>> ModelSpec(model="nano", lora=8).label
    'nano'
    """

    at_least_one: ClassVar[tuple[str, ...]] = ("lora",)

    model: str = "tiny"
    """A size (nano, tiny, 2m, mini; 35m, 100m, 200m, 300m, 500m, 1b, 4b: the paper's names for layers and widths),
    RUN/model.safetensors to train a model further, or hf:FOLDER_OR_NAME for a Hugging Face causal LM."""
    models: tuple[str, ...] = ()
    """codistill: the model of each replica, such as tiny 2m mini, instead of one for all. All need the same tokenizer."""
    job: str | None = None
    """A file of your own, my_job.py, with model(), batches(share) and loss(model, batch): instead of the language model and its text."""
    lora: int | None = None
    """Rank of LoRA adapters; only they are trained and exchanged. Default: the whole model."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How the model encodes the position of a token."""
    buffers: Literal["mean", "local"] = "mean"
    """Running statistics and other buffers of a job's model: the mean of all replicas in evaluations and at the end, or each its own."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast. auto: bf16 on a GPU that supports it, otherwise fp32."""

    @property
    def label(self) -> str:
        """The model's name for display."""
        return taken_apart(self.job)[0].name if self.job else ", ".join(self.models) or self.model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.models and self.model != type(self).model:
            raise ConfigurationError(f"model={self.model!r} with models={self.models}: give one of them.")
        if self.job is None:
            return
        taken_apart(self.job)
        for name in ("model", "models", "lora", "positions"):
            if (given := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ConfigurationError(
                    f"{name}={given!r} with job={self.job!r}: the job makes its own model; leave {name} out."
                )


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(CheckedSettings):
    """Number of inner steps, optimizer and learning rate."""

    at_least_one: ClassVar[tuple[str, ...]] = ("steps",)
    positive: ClassVar[tuple[str, ...]] = ("lr",)
    not_negative: ClassVar[tuple[str, ...]] = ("warmup", "weight_decay", "clip")

    steps: int = 800
    """Inner steps of every replica."""
    optimizer: str | None = None
    """Inner optimizer: AdamW, SGD(0.9, lr_factor=100), Muon, or SAM(...) around one of them. Default: the strategy's own, or AdamW if it has none."""
    lr: float | None = None
    """Peak learning rate for AdamW; other inner optimizers multiply it by their own factor. Default: for a size trained whole,
    10.24 / width^1.5 with AdamW and 1.92 / width with Muon; otherwise 0.006."""
    warmup: int | None = None
    """Inner steps of linear warm-up, before a cosine to 5 % of the peak. Default: a tenth of all steps, at most 1000."""
    weight_decay: float = 0.1
    """Weight decay of the inner optimizer: weights shrink by lr times this per step."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip. Strategies with filters clip each replica's gradient before the exchange."""


def recipe_name(strategy: str) -> str:
    """The name of a recipe, without spaces around it, and with underscores instead of hyphens."""
    return strategy.strip().replace("-", "_")
