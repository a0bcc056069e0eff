"""All settings of a run in one value, from the command line or a run file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from thinwire.app.jobs.own import functions
from thinwire.app.records.run_file import read_run_file
from thinwire.app.trainer.checked_settings import check_batches, fits, unfit
from thinwire.app.trainer.export import metadata_of
from thinwire.app.trainer.model import SIZES
from thinwire.app.trainer.placement import Placement
from thinwire.app.trainer.resolved import Plan, resolve
from thinwire.app.trainer.settings import OF_THE_RECIPE, DataSpec, MethodSpec, ModelSpec, OptimizerSpec, recipe_name
from thinwire.catalogue.methods import NAMED, RECIPES
from thinwire.choices import listed, nearest
from thinwire.drivers.attached import Method
from thinwire.errors import ConfigurationError
from thinwire.files import write_whole
from thinwire.pieces.inner import Inner
from thinwire.pieces.inner_optimizers import AdamW, Muon
from thinwire.pieces.own_files import names_files, pin, pinned_file, remember, taken_apart, waits
from thinwire.registered import setting
from thinwire.strategy import Strategy

# settings that may differ between replicas, for `Run.shared`
MAY_DIFFER = (
    *("text", "link", "uplink", "carrier", "timeout", "replicas"),
    *("strategy", "model", "job", "keep", "publish"),
    *OF_THE_RECIPE,
)
# settings that hold a piece as text
OF_PIECES = ("strategy", "codec", "partition", "exchange", "privacy", "guard", "aggregate", "topology", "optimizer")
# settings that must be those of the checkpoint, beside the strategy
OF_A_CHECKPOINT = ("replicas", "seed", "model", "models", "lora", "positions", "tokenizer", "optimizer")
# with text too: a replica's position in it follows from the number of the micro-batch
OF_THE_TEXT = ("sequence", "accumulate")
OF_A_RUN = (
    *OF_A_CHECKPOINT,
    *OF_THE_TEXT,
    "batch",
    "job",
    "own_text",
    "clip",
    *OF_THE_RECIPE,
)  # `unlike` compares them
LR = 6e-3  # peak learning rate of models without a known width
# factor and power of the peak rate on the built-in sizes, such as 10.24 / width^1.5; docs/experiments.md has the experiments
LR_AND_WIDTH: dict[type[Inner], tuple[float, float]] = {AdamW: (10.24, 1.5), Muon: (1.92, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: every setting, in five parts.

    `of`, `changed` and `settings` take and give settings by their own names, whatever part they belong to.

    Raises:
        ConfigurationError: a setting is of the wrong type or out of range, or the parts do not go together.

    >>> run = Run.of(every=50, lr=0.01)
    >>> run.method.every, run.optimizer.lr, run.placement.replicas
    (50, 0.01, 2)
    """

    seed: int = 0
    """Seed of all random numbers: weights, order of the text, codecs."""
    method: MethodSpec = MethodSpec()
    """What the replicas exchange, and when."""
    data: DataSpec = DataSpec()
    """Text, tokens, batches, evaluation."""
    model: ModelSpec = ModelSpec()
    """The model that is trained."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The inner steps."""
    placement: Placement = Placement()
    """Replicas, links, failures."""
    resolved: Plan | None = dataclasses.field(default=None, repr=False, compare=False)
    """The plan of a run with the same method, which this one takes over."""

    def __post_init__(self) -> None:
        if not fits(self.seed, int):
            raise unfit("seed", self.seed, int)
        if self.model.job and (self.data.text or self.data.tokenizer):
            raise ConfigurationError(
                f"text={self.data.text!r:.200}, tokenizer={self.data.tokenizer!r} with job={self.model.job!r}: the job reads its own data; "
                "leave them out."
            )
        if waits(self._pieces.values()):
            return
        strategy = self.plan.composition
        if not strategy.own_loop:
            strategy.exchange.check_size(self.placement.replicas)
        check_batches(self.data.batch, self.placement.replicas, self.placement.carrier)
        if self.needs_hub and self.placement.carrier != "secure":
            raise ConfigurationError(
                f"exchange={self.method.exchange!r} with carrier={self.placement.carrier!r}: a hub that averages is needed; choose "
                "carrier='secure' for a fixed group at a hub, or another exchange: Star(0) gives the same bits."
            )
        if self.model.models:
            self._check_models(strategy)
        if self.placement.elastic:
            self.placement.check_elastic(strategy, self.method.label)
        if self.placement.publish and not self.has_versions:
            raise ConfigurationError(
                f"publish with strategy={self.method.label}, lora={self.model.lora}: recipes with rounds of deltas, such as "
                "streaming_sign, publish agreed versions of whole weights; choose one, and leave lora out, or leave publish out."
            )

    @property
    def plan(self) -> Plan:
        """The pieces that the settings name, made once."""
        settings = self.method, self.optimizer.optimizer, self.optimizer.clip, self.seed
        if self.resolved is None or self.resolved.settings != settings:
            object.__setattr__(self, "resolved", resolve(*settings))
        assert self.resolved is not None
        return self.resolved

    def _check_models(self, strategy: Strategy | Method) -> None:
        models, replicas = self.model.models, self.placement.replicas
        if not strategy.own_loop or not strategy.traits.one_model_each:
            raise ConfigurationError(
                f"models={models} with strategy={self.method.label}, whose replicas hold one model; choose --strategy codistill, or give --model."
            )
        if len(models) != replicas:
            raise ConfigurationError(
                f"models={models} with replicas={replicas}: one for each is needed; give --replicas {len(models)}."
            )

    @classmethod
    def of(cls, **settings: Any) -> Run:
        """A run with these settings.

        >>> Run.of(every=50, lr=0.01).optimizer.lr
        0.01
        """
        by_part = _by_part(settings)
        own = by_part.pop("", {})
        return cls(**own, **{part: PARTS[part](**given) for part, given in by_part.items()})

    def changed(self, **settings: Any) -> Run:
        """This run with these settings changed. Raises `ConfigurationError` for an unknown name."""
        by_part = _by_part(settings)
        own = by_part.pop("", {})
        parts = {part: dataclasses.replace(getattr(self, part), **given) for part, given in by_part.items()}
        return dataclasses.replace(self, **own, **parts)

    def of_replica(self, rank: int) -> Run:
        """The run of one replica if each has its own model; otherwise this run.

        >>> Run.of(strategy="codistill", models=("tiny", "2m")).of_replica(1).model.model
        '2m'
        """
        return self.changed(model=self.model.models[rank], models=()) if self.model.models else self

    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(getattr(self, part) if part else self, name) for name, part in PART_OF.items()}

    @cached_property
    def lr(self) -> float:
        """Peak learning rate: the given one, otherwise the default.

        >>> [Run.of(model=size).lr for size in ("nano", "mini", "hf:a/b")]
        [0.02, 0.0025, 0.006]
        >>> Run.of(model="nano", optimizer="Muon").lr
        0.03
        """
        return self._default_lr()[0] if self.optimizer.lr is None else self.optimizer.lr

    @property
    def lr_origin(self) -> str:
        """The source of the learning rate, as text."""
        default, origin = self._default_lr()
        factor = 1.0 if self.make_method() else self.plan.inner.lr_factor
        if factor != 1.0:
            return f"{origin if self.lr == default else 'given'}; times lr_factor {factor:g}: {self.lr * factor:g}"
        return origin if self.lr == default else f"given; the default is {default:g}"

    @property
    def rates(self) -> str:
        """The learning rate and its source; one for each model if replicas have different ones."""
        each = {run.model.model: run for run in map(self.of_replica, range(len(self.model.models)))}
        of_each = [f"{model} {run.lr:g} ({run.lr_origin})" for model, run in each.items()]
        return "; ".join(of_each) or f"{self.lr:g} ({self.lr_origin})"

    def _default_lr(self) -> tuple[float, str]:
        by_width = self.model.job is None and self.model.model in SIZES and self.model.lora is None
        method = self.make_method()
        inner: type[Inner] | None = type(self.plan.inner) if method is None else None
        if method and method.traits.one_model_each:  # each is trained as its size is trained alone
            inner = AdamW
        if by_width and inner in LR_AND_WIDTH:
            width, (factor, power) = SIZES[self.model.model].width, LR_AND_WIDTH[inner]
            divisor = f"{width}^{power:g}".removesuffix("^1")
            return float(f"{factor / width**power:.3g}"), f"the default, {factor:g} / {divisor}, by the model's width"
        made = self.plan.inner if method is None else None
        if made and type(made) not in LR_AND_WIDTH and made.lr_factor == 1.0:
            return LR, f"the default, which is AdamW's; give --lr for {type(made).__name__}"
        return LR, "the default"

    def make_strategy(self) -> Strategy:
        """The strategy with the settings of its recipe and the run's seed. Raises `ConfigurationError` if the method is not a strategy."""
        made = self.plan.composition
        if made.own_loop:
            raise ConfigurationError(
                f"strategy={self.method.label} has its own loop, which only `thinwire train` and `compare` run; here one of "
                f"{listed(RECIPES, 'thinwire docs strategies')} is needed."
            )
        return made

    def make_method(self) -> Method | None:
        """The method with its own loop, with the run's seed; None if this is a strategy."""
        made = self.plan.composition
        return made if made.own_loop else None

    @property
    def own_steps(self) -> bool:
        """Whether replicas take unequal numbers of steps, so that each resumes from the newest of its own checkpoints."""
        method = self.make_method()
        return self.placement.elastic or bool(method and method.traits.own_steps)

    @property
    def has_versions(self) -> bool:
        """Whether the replicas agree on whole weights now and then, which they can publish."""
        made = self.plan.composition
        return not made.own_loop and not made.exchanges_gradients and self.model.lora is None

    @property
    def needs_hub(self) -> bool:
        """Whether the packets are averaged at the hub of its group."""
        made = self.plan.composition
        return not made.own_loop and made.exchange.traits.needs_hub

    @property
    def _pieces(self) -> dict[str, str | None]:
        """The settings that hold a piece as text."""
        settings = self.settings()
        return {name: settings[name] for name in OF_PIECES}

    def outlined(self, but: Collection[str] = ()) -> Run:
        """This run without the pieces from the user's own files, for commands that only read: what kind of method it has can be told, and no
        file is imported. The settings `but` stay.
        """
        own = [name for name, text in self._pieces.items() if names_files(text) and name not in but]
        outer = recipe_name(self.method.strategy.split("(")[0])
        strategy = {"strategy": outer if outer in NAMED else MethodSpec.strategy} if "strategy" in own else {}
        return self.changed(**{name: None for name in own} | strategy) if own else self

    def with_strategy(self, strategy: str) -> Run:
        """This run with another strategy, and of the settings of a recipe those that it takes."""
        return dataclasses.replace(self, method=self.method.with_strategy(strategy))

    def absolute(self) -> Run:
        """This run with absolute paths of text, model, tokenizer and files of pieces, and with its learning rate."""
        model, tokenizer = self.model.model, self.data.tokenizer
        text = tuple(str(Path(path).absolute()) for path in self.data.text)
        given = self.counted_in_samples().settings()
        if given["topology"] and given["topology"].endswith(".json"):
            given["topology"] = repr(setting("topology")(given["topology"]))
        for name, value in given.items():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, str) and not each.isascii():
                    _check_utf8(name, each)
        pieces = {name: pin(given[name]) for name in OF_PIECES if given[name] is not None}
        given |= {
            "lr": self.optimizer.lr if self.model.models else self.lr,
            "text": text,
            "model": _absolute_model(model),
            "models": tuple(map(_absolute_model, self.model.models)),
            "tokenizer": tokenizer and _absolute(tokenizer),
            **pieces,
        }
        return self.changed(**given)

    def counted_in_samples(self) -> Run:
        """This run with lengths in samples, if its job is a file: a sequence is one sample, and so is a batch without `collate`."""
        if self.model.job is None:
            return self
        job = pinned_file(self.model.job)
        collates = "collate" in functions(job)
        if self.data.batches and not collates:
            raise ConfigurationError(
                f"batch={list(self.data.batches)} with job={self.model.job!r}, whose batches(share) makes its own batches; write "
                "collate(samples), or leave batch out."
            )
        return self.changed(job=job, sequence=1, batch=self.data.batch if collates else 1)

    def made_of(self) -> dict[str, Any]:
        """The strategy with the choices of its recipe, and the source of the learning rate."""
        made, lr = self.plan.composition, {"lr": self.rates}
        if made.own_loop:
            return {"every": made.every, **lr, "composition": repr(made)}
        parts = lr | {name: repr(getattr(made, name)) for name in ("partition", "codec", "outer")}
        return {"every": made.schedule.every, "delay": made.schedule.delay, **parts, "composition": repr(made)}

    def unlike(self, other: Run) -> str:
        """The settings that prevent resuming from a checkpoint of `other`; empty if there are none."""
        self = self.absolute()
        given = self.settings()
        other = other.changed(**_moved(other.settings(), given)).absolute()
        there = other.settings()
        names = OF_A_CHECKPOINT if self.model.job else (*OF_A_CHECKPOINT, *OF_THE_TEXT)
        said = [f"{name} {there[name]!r} there, {given[name]!r} given" for name in names if given[name] != there[name]]
        one_for_all = self.model.job is None and self.data.largest_batch != other.data.largest_batch
        if self.data.batches != other.data.batches or one_for_all:
            said.append(f"batch {there['batch']} there, {given['batch']} given")
        if _digest(given["job"]) != _digest(there["job"]):
            said.append(f"job {there['job']!r} there, {given['job']!r} given")
        # the checkpoints of elastic runs have rounds, those of others have flights
        if self.placement.elastic != other.placement.elastic:
            said.append(f"carrier {there['carrier']!r} there, {given['carrier']!r} given")
        elif self.placement.elastic and self.data.own_text != other.data.own_text:
            said.append(f"own_text {other.data.own_text} there, {self.data.own_text} given")
        if self.plan.composition != other.changed(seed=self.seed).plan.composition:
            said.append(f"strategy {other.method.label} there, {self.method.label} given")
        return ", ".join(said)

    def shared(self) -> dict[str, Any]:
        """The settings that must be equal on all replicas, without the strategy and the model's tensors, which `Replica` compares itself."""
        shared = {n: value for n, value in self.settings().items() if n not in (*MAY_DIFFER, "lr")}
        method = self.make_method()
        if method and method.traits.one_model_each:  # each replica has another model, on which the rate depends
            return shared
        # The model first, because a default rate depends on it.
        return shared | {"model": self._kind_of_model(), "lr": self.lr}

    def _kind_of_model(self) -> str:
        """The size of a bundled model, or hf, wherever its files are on this machine."""
        model = self.model.model
        return str(metadata_of(model)["model"]) if model.endswith(".safetensors") else model.partition(":")[0]

    def as_toml(self) -> str:
        """The contents of a run file: a table for each part, and the recipe's choices as a comment; settings that are None are left out."""
        tables: dict[str, Any] = {"seed": self.seed}
        for part in PARTS:
            values = vars(getattr(self, part))
            tables[part] = {name: value for name, value in values.items() if value is not None}
        said = "".join(f"# {name}: {value}\n" for name, value in self.made_of().items())
        return f"{tomli_w.dumps(tables)}\n# What the strategy is made of:\n{said}"

    def save(self, path: Path) -> None:
        """Write a run file. The code that it names is this user's from now on: see trust.py."""
        write_whole(path, self.as_toml())
        remember()

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run file. Raises `ConfigurationError`, which names the unknown setting or the error."""
        try:
            settings, table_of = read_run_file(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read as a run file ({error}); `thinwire train` writes one as run.toml."
            ) from None
        if not settings:
            raise ConfigurationError(
                f"{path} holds no settings; a run file has one at least, such as steps = 500 in [optimizer]. Leave it out to take the defaults."
            )
        unknown = [name for name in settings if name not in PART_OF]
        if unknown:
            near = nearest(unknown[0], PART_OF)
            raise ConfigurationError(
                f"{path}: {', '.join(unknown)} is no setting{near}; a run has {listed(PART_OF, 'thinwire train --help')}."
            )
        tables = [table for table in table_of.values() if table and table not in PARTS]
        if tables:
            raise ConfigurationError(
                f"{path}: [{tables[0]}] is no table of a run file{nearest(tables[0], PARTS)}; there are {_tables()}."
            )
        for name, table in table_of.items():
            if table != PART_OF[name]:
                there, due = (f"in [{part}]" if part else "above all tables" for part in (table, PART_OF[name]))
                raise ConfigurationError(f"{path}: {name} is {there}; it belongs {due}.")
        try:
            return cls.of(**{n: tuple(value) if isinstance(value, list) else value for n, value in settings.items()})
        except TypeError as error:
            raise ConfigurationError(f"{path}: {error}; compare with the run.toml of a run that works.") from None


PARTS: dict[str, type] = {
    "method": MethodSpec,
    "data": DataSpec,
    "model": ModelSpec,
    "optimizer": OptimizerSpec,
    "placement": Placement,
}
PART_OF = {"seed": ""} | {field.name: part for part, kind in PARTS.items() for field in dataclasses.fields(kind)}


def _by_part(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by the part that they belong to. Raises `ConfigurationError` for an unknown name."""
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in PART_OF:
            raise ConfigurationError(
                f"{name} is no setting{nearest(name, PART_OF)}; a run has {listed(PART_OF, 'thinwire train --help')}."
            )
        by_part.setdefault(PART_OF[name], {})[name] = value
    return by_part


def _moved(there: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run that was moved: those that name a file which is not there any more, as `given` for the same name or content."""
    moved = {}
    if there["job"] and given["job"] and _digest(there["job"]) == _digest(given["job"]):
        moved["job"] = given["job"]
    for name in ("model", "tokenizer"):
        old, new = (Path(str(one[name]).removeprefix(_kind(one[name]))) for one in (there, given))
        if old.is_absolute() and not old.exists() and old.name == new.name and _kind(there[name]) == _kind(given[name]):
            moved[name] = given[name]
    return moved


def _check_utf8(name: str, text: str) -> None:
    """Raise `ConfigurationError` for a path whose bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        spelled = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise ConfigurationError(
            f"{name}={spelled!r}: a run file holds text in UTF-8 alone; rename the file or folder, or make a link to it with another name."
        ) from None


def _kind(name: str | None) -> str:
    """The `hf:` or `bpe:` before a path."""
    kind, colon, _ = str(name).partition(":")
    return kind + colon if colon else ""


def _digest(job: str | None) -> str | None:
    return taken_apart(job)[1] if job else None


def _tables() -> str:
    return ", ".join(f"[{part}]" for part in PARTS)


def _absolute_model(name: str) -> str:
    return str(Path(name).absolute()) if name.endswith(".safetensors") else _absolute(name)


def _absolute(name: str) -> str:
    """`hf:FOLDER` and `bpe:FILE` with an absolute path; text that is no path is unchanged."""
    kind, _, path = name.partition(":")
    return f"{kind}:{Path(path).absolute()}" if path and Path(path).exists() and not path.isdigit() else name
