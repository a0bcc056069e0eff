"""The words of a command line, checked before tyro reads them, because tyro answers a wrong word in a box of several lines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from thinwire.choices import nearest
from thinwire.errors import ConfigurationError

_TYRO = ("-h", "--help", "--tyro-")  # options that tyro adds
# by what `--help` calls them
_KINDS = {
    "INT": ("a whole number", "whole numbers"),
    "FLOAT": ("a number", "numbers"),
    "PATH": ("a file or folder", "files or folders"),
}


class _Taken(NamedTuple):
    """An option, or an argument without a name, and how its values are read."""

    name: str  # as `--help` writes it
    help: str
    positional: bool
    required: bool
    spec: PrimitiveConstructorSpec[Any] | None  # None: it takes no value, or tyro alone can read it


def is_word(hint: Any) -> bool:
    """Whether an argument of this type is any word; `--help` calls it by its own name, because STR would say nothing."""
    return hint in (str, str | None)


def check(kind: Any, prog: str, arguments: Sequence[str], registry: ConstructorRegistry) -> None:
    """Compare the words of a command line with the options of a dataclass.

    Raises:
        ConfigurationError: an option does not exist, has no value or a wrong one, or an argument is missing.
    """
    with registry:
        known = list(_taken(kind))
    named = {one.name: one for one in known if not one.positional}
    due = [one for one in known if one.positional]
    words, free, seen = list(arguments), [], set()
    while words and words[0] != "--":
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not re.match("--?[a-z]", flag):  # a folder may be named _texts
            free.append(word)
            continue
        flag = flag.replace("_", "-")
        if flag.startswith(_TYRO):
            return
        if flag not in named:
            raise ConfigurationError(f"{flag} is no option{nearest(flag, named)}; `{prog} --help` lists the options.")
        option = named[flag]
        seen.add(flag)
        if option.spec:
            left = sum(one.required for one in due) - len(free)
            given = [value] if equals else _values(option.spec, words, left)
            _check_values(option, given, prog)
    _check_free(due, [*free, *words[1:]], prog)
    for option in named.values():
        if option.required and option.name not in seen:
            raise ConfigurationError(_missing(option, prog))


def _values(spec: PrimitiveConstructorSpec[Any], words: list[str], left: int) -> list[str]:
    """Take an option's values from `words`; a list of any length leaves `left` words for arguments that are needed."""
    least, most = (1, spec.nargs) if isinstance(spec.nargs, int) else (0, len(words) - left)
    given: list[str] = []
    while words and len(given) < max(least, most) and not re.match("--?[a-z]|--$", words[0]):
        given.append(words.pop(0))
    return given


def _check_free(due: list[_Taken], free: list[str], prog: str) -> None:
    for argument in due:
        several = argument.spec is not None and argument.spec.nargs == "*"
        given, free = (free, []) if several else (free[:1], free[1:])
        if given:
            _check_values(argument, given, prog)
        elif argument.required and not several:
            raise ConfigurationError(_missing(argument, prog))


def _check_values(option: _Taken, given: list[str], prog: str) -> None:
    spec = option.spec
    if spec is None:
        return
    choices = [one for one in spec.choices or () if one != "None"]
    word = (re.findall("[A-Z]+", spec.metavar) or [""])[0]
    needed = _KINDS.get(word, ("a value", "values"))[spec.nargs == "*"]
    needed = f"one of {', '.join(choices)}" if choices else needed
    needed += " are needed" if spec.nargs == "*" else " is needed"
    if isinstance(spec.nargs, int) and len(given) < spec.nargs:
        raise ConfigurationError(f"{option.name} was given without a value; {needed}. `{prog} --help` explains it.")
    wrong = spec.choices is not None and any(one not in spec.choices for one in given)
    wrong |= word == "PATH" and "" in given  # as of an unset variable of a shell; it would be the current folder
    if not wrong:
        try:
            spec.instance_from_str(given)
        except ValueError:
            wrong = True
    if wrong:
        near = nearest(given[0], choices) if choices and given else ""
        told = (
            repr(" ".join(given))
            if option.positional
            else f"{option.name} {' '.join(one or repr(one) for one in given)}"
        )
        raise ConfigurationError(f"{told}{near}: {needed}. `{prog} --help` explains it.")


def _missing(option: _Taken, prog: str) -> str:
    first = re.split(r"(?<=\.) ", option.help)[0].rstrip(".")
    return f"{option.name} is missing: {first}. `{prog} --help` lists what is needed."


def _taken(kind: Any) -> Iterator[_Taken]:
    """The options of a dataclass and of the groups in it, as they are written on a command line."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(bare):
            yield from _taken(bare)
            continue
        found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(bare, set()))
        spec = found if isinstance(found, PrimitiveConstructorSpec) and bare is not bool else None
        helped = next((mark.help for mark in marks if isinstance(getattr(mark, "help", None), str)), "")
        absent = dataclasses.MISSING, tyro.MISSING
        required = field.default in absent and field.default_factory is dataclasses.MISSING
        if tyro.conf.Positional in marks:
            yield _Taken(
                spec.metavar if spec and not is_word(bare) else field.name.upper(), helped, True, required, spec
            )
            continue
        name = "--" + field.name.replace("_", "-")
        yield _Taken(name, helped, False, required, spec)
        if bare is bool:
            yield _Taken("--no-" + name[2:], helped, False, False, None)
