"""Parses compositions: text that `repr` prints of a strategy, a codec or any other piece. Executes nothing."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from thinwire import catalogue, registered
from thinwire.choices import listed, nearest
from thinwire.errors import ConfigurationError
from thinwire.pieces.own_files import resolve

PIECES: dict[str, Callable[..., Any]] = {
    name: piece for name, piece in vars(catalogue).items() if isinstance(piece, type)
} | dict(registered.registered(registered.PIECES))


LONGEST = 10_000  # most characters of a composition that is parsed
# the last two: too deep
_UNREADABLE = (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError)


def pieces_of(kind: type) -> list[str]:
    """The names of the pieces of one `kind`, such as Codec or Partition: the core's, then those of packages."""
    found = [name for name, piece in PIECES.items() if isinstance(piece, type) and kind in piece.__mro__]
    return sorted(found, key=lambda name: (not hasattr(catalogue, name), name))


def parse(
    text: str,
    names: Mapping[str, Callable[..., Any]] = PIECES,
    offered: Collection[str] = (),
    *,
    own_files: bool = False,
) -> Any:
    """Make the value that `text` describes, such as `E3M0(block=64)` or `E3M0`. The text may only call `names` with literals. With
    `own_files`, `my_file.py:Mine(3)` is allowed too: that file is imported, so set it only for text that the user wrote.

    The message of an error lists the `offered` names, or all `names`.

    Args:
        text: the `repr` of a piece; defaults may be left out.
        names: the functions that the text may call, by name.
        offered: the names that an error message lists; empty: all.
        own_files: whether to import the user's own Python files that `text` names.

    Raises:
        ConfigurationError: the text is not such a call; the message says what can be written.

    >>> parse('E3M0(block=64)')
    E3M0(block=64, scale='exponent', rounding='nearest')
    """

    def value(term: ast.expr, inside: bool = True) -> Any:
        if isinstance(term, ast.Name):
            term = ast.Call(term, [], [])
        if isinstance(term, ast.Call) and isinstance(term.func, ast.Name):
            name = term.func.id
            if name not in names:
                raise _unknown(name, text, names if inside else offered or sorted(names), inside)
            given = [value(argument) for argument in term.args]
            keywords = {keyword.arg or "**": value(keyword.value) for keyword in term.keywords}
            return _called(name, names[name], given, keywords, text)
        if isinstance(term, ast.Tuple):
            return tuple(map(value, term.elts))
        try:
            return ast.literal_eval(term)
        except ValueError:
            pieces = listed(offered or sorted(names), "thinwire docs pieces")
            wrong = f"{ast.unparse(term)!r} in {text!r} is no plain value"
            raise ConfigurationError(f"{wrong}; write a number, a text in quotes, or one of {pieces}.") from None

    if len(text) > LONGEST:
        raise ConfigurationError(f"{text[:40]!r}… has {len(text):,} characters: at most {LONGEST:,} are read.")
    if own_files:
        written, own = resolve(text)
        names = dict(names) | own
    else:
        written = text
    try:
        return value(ast.parse(written.strip(), mode="eval").body, inside=False)
    except ConfigurationError:
        raise
    except _UNREADABLE as error:
        raise ConfigurationError(
            f"cannot read {text!r} ({getattr(error, 'msg', error)}); write a name with arguments, such as E3M0(block=64)."
        ) from None


def _unknown(name: str, text: str, known: Collection[str], inside: bool) -> ConfigurationError:
    page = "thinwire docs strategies" if "diloco" in known else "thinwire docs pieces"
    instead = "write a number, a text in quotes, or a piece" if inside else f"choose from {listed(known, page)}"
    where = "" if name == text.strip() else f" in {text!r}"
    group = registered.METHODS if "diloco" in known else registered.PIECES
    return ConfigurationError(
        f"{name!r}{where} is not known{nearest(name, known)}; {instead}.{registered.absent(group)}"
    )


def _called(name: str, function: Callable[..., Any], given: list[Any], keywords: dict[str, Any], text: str) -> Any:
    """The value that `function` makes of these arguments. Raises `ConfigurationError` if it does not take them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class that is written in C may have no signature
        return function(*given, **keywords)
    try:
        bound = signature.bind(*given, **keywords)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise ConfigurationError(f"{name} in {text!r}: {error}; it takes {takes}.") from None
    try:
        made = function(*given, **keywords)  # a piece's own message says more than the next line's
    except (TypeError, ArithmeticError):
        _check_whole(name, bound)
        raise
    _check_whole(name, bound)
    return made


def _check_whole(name: str, bound: inspect.BoundArguments) -> None:
    """Raise `ConfigurationError` if another value than a whole number of 64 bits was given where one is needed."""
    for key, value in bound.arguments.items():
        hint = bound.signature.parameters[key].annotation
        hint = hint if isinstance(hint, str) else inspect.formatannotation(hint)
        whole = hint == "int" or (hint == "int | None" and value is not None)
        if whole and (type(value) is not int or not -(2**63) <= value < 2**63):
            raise ConfigurationError(f"{name}({key}={value!r}): a whole number is needed, below 2**63.")
