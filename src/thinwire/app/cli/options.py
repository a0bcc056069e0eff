"""How verbs read their arguments: a dataclass of options, and a run file with their defaults, if one is given."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from thinwire.app.cli import words
from thinwire.app.records.printable import printable
from thinwire.app.report.terminal import Terminal
from thinwire.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from thinwire.app.trainer.run import Run  # it needs torch

T = TypeVar("T")


MOST_USED = ("strategy", "replicas", "steps", "model", "text", "batch", "lr", "link")
_GROUPS = {
    "most_used": ("Most used", "The most used options. The others are below, in the tables of a run file."),
    "method": ("[method]", "What the replicas exchange, and when. Default: the strategy's recipe."),
    "data": ("[data]", "Text, tokens, the size of an inner step, evaluation."),
    "model": ("[model]", "The model that is trained."),
    "optimizer": ("[optimizer]", "The inner steps."),
    "placement": ("[placement]", "Replicas, the links between them, and failures."),
    "command": ("Other", "The seed, and options of this command."),
}


def read(kind: type[T], verb: str, arguments: Sequence[str], description: str) -> T:
    """Read the options of `verb`. If it takes a `Run`, the settings of the run are options too, in groups. Their defaults are those of
    a run file (the first argument, or the one in `--out` when resuming), or of `kind.base(arguments)`.

    `kind.MOST_USED` names those of the verb's own options that are in the first group.
    """
    prog = f"thinwire {verb}"
    if "run_settings" not in {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        return ask(kind, prog, arguments, description)
    from thinwire.app.trainer.run import PART_OF, Run

    default: Any = kind(run_settings=getattr(kind, "base", _base)(arguments))  # type: ignore[call-arg]
    given = _grouped(kind, default, prog, arguments, description)
    file = given["run"]
    if file is not None and str(file) != arguments[0]:
        raise ConfigurationError(f"{file} after options: a run file is needed first; write thinwire {verb} {file} --…")
    settings = {name: given.pop(name) for name in PART_OF}
    if settings["attack"] is not None and verb != "compare":
        raise ConfigurationError(
            f"attack={settings['attack']!r} for thinwire {verb}: liars are for tests of robust rules; only `thinwire compare` has them."
        )
    return kind(run_settings=Run.of(**settings), **given)  # type: ignore[call-arg]


def ask(kind: type[T], prog: str, arguments: Sequence[str], description: str) -> T:
    """Read the options of a dataclass. An option that may be None shows the type of its values alone; `None` sets it back."""
    options: Any = kind
    helps, hints, members = _helps(options), get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(options):
        bare, *marks = get_args(hints[field.name]) or [None]
        shown = field.name.upper() if field.default is dataclasses.MISSING else f"[{field.name.upper()}]"
        metavar = shown if tyro.conf.Positional in marks and words.is_word(bare) else None
        about = tyro.conf.arg(help=helps.get(field.name), help_behavior_hint=_default, metavar=metavar)
        hint = _annotated(hints[field.name], about)
        default: Any = dataclasses.field(default=field.default, default_factory=field.default_factory)
        members.append((field.name, hint, default))
    return kind(**vars(_parsed(dataclasses.make_dataclass("Everything", members), prog, arguments, description)))


def _parsed(kind: Any, prog: str, arguments: Sequence[str], description: str) -> Any:
    """The values of a dataclass whose hints hold their help. Raises `ConfigurationError` for words that do not fit."""
    words.check(kind, prog, arguments, _REGISTRY)
    asked, unknown = tyro.cli(
        kind, prog=prog, args=list(arguments), description=description, registry=_REGISTRY, return_unknown_args=True
    )
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} is one argument too many; `{prog} --help` lists what it takes.")
    return asked


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """The rule for `int | None` and the like. Without it tyro writes {None}|INT."""
    kinds = get_args(info.type)
    if info.type_origin not in (Union, UnionType) or len(kinds) != 2 or NoneType not in kinds:
        return None
    (kind,) = (one for one in kinds if one is not NoneType)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        spec,
        instance_from_str=lambda given: None if given == ["None"] else spec.instance_from_str(given),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["unset"] if value is None else spec.str_from_instance(value),
        choices=spec.choices and (*spec.choices, "None"),
    )


def _default(label: str) -> str:
    """The end of an option's help; nothing for options without a default, whose text says what happens."""
    if label == "required":
        return "(required)"
    return "" if label in ("unset", "", "''") else f"(default: {label})"


def _grouped(kind: Any, default: Any, prog: str, arguments: Sequence[str], description: str) -> dict[str, Any]:
    """The values, given or default, of a run's settings and of `kind`'s own options, by name."""
    from thinwire.app.trainer.run import PART_OF, PARTS, Run

    members: dict[str, list[tuple[str, Any, Any]]] = {group: [] for group in _GROUPS}
    settings, own = default.run_settings.settings(), vars(default)
    for home, values in (
        (kind, own),
        (Run, {"seed": settings["seed"]}),
        *((part, settings) for part in PARTS.values()),
    ):
        helps, hints = _helps(home), get_type_hints(home, include_extras=True)
        for name in helps.keys() & values.keys() - {"run", "run_settings"}:
            group = "most_used" if name in (*MOST_USED, *kind.MOST_USED) else PART_OF.get(name) or "command"
            hint = _annotated(hints[name], tyro.conf.arg(help=helps[name], help_behavior_hint=_default))
            members[group].append((name, hint, dataclasses.field(default=values[name])))
    order = [*MOST_USED, *kind.MOST_USED, *PART_OF, *own]
    groups: list[tuple[str, Any, Any]] = []
    for group, (title, about) in _GROUPS.items():
        made = dataclasses.make_dataclass(
            group, sorted(members[group], key=lambda one: order.index(one[0])), frozen=True
        )
        hint = _annotated(made, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help=about))
        groups.append((group, hint, dataclasses.field(default=made())))
    file = _annotated(
        Path | None, tyro.conf.Positional, tyro.conf.arg(help=_helps(kind)["run"], help_behavior_hint=_default)
    )
    everything = dataclasses.make_dataclass("Everything", [("run", file, None), *groups], frozen=True)
    asked = _parsed(everything, prog, arguments, description)
    return {"run": asked.run} | {
        name: value for group in _GROUPS for name, value in vars(getattr(asked, group)).items()
    }


def _annotated(hint: Any, *marks: Any) -> Any:
    return Annotated.__class_getitem__((hint, *marks))  # type: ignore[attr-defined]


@cache
def _helps(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass in its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def advise(line: str) -> None:
    """Print a line of advice for people."""
    print(line, file=sys.stderr)


def warn_of_outcome(folder: Path) -> None:
    """Print a warning if the run in `folder` has no result or has diverged, for those who use its model."""
    from thinwire.app.records.losses import useless
    from thinwire.app.records.run_record import RunRecord

    with suppress(DataError):  # a model without a log
        if useless(status := RunRecord.load(folder).status):
            advise(f"warning: {printable(str(folder))}: {printable(status, 400)}")


def _base(arguments: Sequence[str]) -> Run:
    from thinwire.app.trainer.run import Run

    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if file is None and "--resume" in arguments and (folder := _value(arguments, "--out")):
        begun = Path(folder) / "run.toml"
        return Run.load(begun) if begun.exists() else Run()  # a folder without a run is refused later
    return Run.load(Path(file)) if file else Run()


def _value(arguments: Sequence[str], flag: str) -> str | None:
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(flag + "="):
            return argument.split("=", 1)[1]
    return None


def console(as_json: bool) -> Terminal:
    """The console for people: stdout, or stderr if stdout is for programs. In a file tables get their full width."""
    stream = sys.stderr if as_json else sys.stdout
    return Terminal(file=stream, width=None if stream.isatty() else 160)


def teller(console: Console) -> Callable[[str], object]:
    """Print a line without markup."""
    return lambda line: console.print(line, soft_wrap=True, highlight=False)


def answer(as_json: bool, facts: Any) -> int:
    """Print `facts` as JSON, if a program reads stdout; the exit code of a verb that has worked."""
    if as_json:
        from thinwire.app.records.losses import for_json  # it needs numpy

        print(json.dumps(for_json(facts)), flush=True)
    return 0


def table(title: str) -> Table:
    """A table without lines; title and caption are on the left."""
    return Table(
        title=title, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", caption_justify="left"
    )  # fmt: skip
