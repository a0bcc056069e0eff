"""Public docstrings have `Args:`, `Raises:` and an example that runs. What is still missing is listed, and may only become less."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
from public_names import DOCUMENTED


def gaps(thing: object) -> set[str]:
    """What the docstring of a public class or function lacks.

    args     a parameter that `Args:` does not name; a class takes those with which it is made
    raises   it has a `raise`, for a class when it is made, and no `Raises:`
    example  no `>>>`; a Protocol and an error need none. That examples run is held by test_surface.py
    """
    text = inspect.getdoc(thing) or ""
    error = isinstance(thing, type) and issubclass(thing, BaseException)
    abstract = bool(getattr(thing, "_is_protocol", False))
    found = set()
    if not error and not abstract and not set(parameters(thing)) <= set(described(text)):
        found.add("args")
    if not abstract and raises(thing) and not re.search(r"^Raises:\n    \S", text, re.MULTILINE):
        found.add("raises")
    if not error and not abstract and ">>> " not in text:
        found.add("example")
    return found


def parameters(thing: object) -> list[str]:
    assert callable(thing)
    try:
        return [name for name in inspect.signature(thing).parameters if name not in ("self", "args", "kwargs")]
    except ValueError:
        return []


def described(text: str) -> list[str]:
    """The names in a docstring's `Args:`; several may share a line, as in `every, delay: inner steps`."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    lines = re.findall(r"^    ([\w, ]+):", section[1], re.MULTILINE) if section else []
    return [name.strip() for line in lines for name in line.split(",")]


def raises(thing: object) -> bool:
    """Whether its own code raises one of Thinwire's errors when it is called, or made."""
    where = [thing] if inspect.isfunction(thing) else [vars(thing).get(name) for name in ("__init__", "__post_init__")]
    code = [
        textwrap.dedent(inspect.getsource(each))
        for each in where
        if inspect.isfunction(each) and each.__code__.co_filename != "<string>"
    ]
    return any(
        isinstance(node, ast.Raise) and node.exc is not None for each in code for node in ast.walk(ast.parse(each))
    )


# What is missing. May only shrink: take off what you have written.
MISSING: dict[str, str] = {}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_docstrings_have_their_sections(name):
    found, known = gaps(DOCUMENTED[name]), set(MISSING.get(name, "").split())
    assert found <= known, f"the docstring of {name} lacks {sorted(found - known)}: {gaps.__doc__}"
    assert found >= known, f"{name} has {sorted(known - found)} now: take it off MISSING"


def test_what_is_missing_is_of_names_that_are_there():
    assert set(MISSING) <= set(DOCUMENTED)


def test_gaps_are_found():
    def bare(a: int, b: int) -> None:
        """Adds."""
        raise ValueError

    def whole(a: int, b: int) -> None:
        """Adds.

        Args:
            a, b: numbers.

        Raises:
            ValueError: always.

        >>> 1 + 1
        2
        """
        raise ValueError

    assert gaps(bare) == {"args", "raises", "example"} and gaps(whole) == set()
