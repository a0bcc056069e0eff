"""Public docstrings have `Args:` with units, `Raises:` and an example that runs: all of them, without a gap."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
from pages import ROOT
from public_names import COMPOSED, DOCUMENTED, EXAMPLES

# A unit, what is counted, or the range of a plain number.
UNIT = re.compile(
    r"seconds|bytes|\b(?:bits|tokens|columns|elements|neighbours|values|fragments|replicas|ranks|rounds)\b|inner steps?|number"
    r"|share|factor|norm\b|learning rate|standard deviation|iterations|\d to \d|[\[(]0, 1[\])]"
)


def gaps(thing: object) -> set[str]:
    """What the docstring of a public class or function lacks.

    args     a parameter that `Args:` does not name; a class takes those with which it is made
    raises   it has a `raise`, for a class when it is made, and no `Raises:`
    units    a parameter that is a number, and what `Args:` says of it names no unit, count or range
    example  no `>>>`; a Protocol and an error need none. That examples run is held by test_surface.py
    """
    text = inspect.getdoc(thing) or ""
    error = isinstance(thing, type) and issubclass(thing, BaseException)
    abstract = bool(getattr(thing, "_is_protocol", False))
    found = set()
    if not error and not abstract and not set(parameters(thing)) <= set(described(text)):
        found.add("args")
    if any(not UNIT.search(described(text)[name]) for name in numbers(thing) if name in described(text)):
        found.add("units")
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


def numbers(thing: object) -> list[str]:
    """The parameters whose type is int or float, or holds such a one."""
    assert callable(thing)
    each = inspect.signature(thing).parameters if parameters(thing) else {}
    return [name for name in each if re.search(r"\b(?:int|float)\b", str(each[name].annotation))]


def described(text: str) -> dict[str, str]:
    """What a docstring's `Args:` says, by name; several names may share a line, as in `every, delay: inner steps`."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    lines = re.findall(r"^    ([\w, ]+):(.*\n?(?: {5,}.*\n?)*)", section[1], re.MULTILINE) if section else []
    return {name.strip(): said for names, said in lines for name in names.split(",")}


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


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_docstrings_have_their_sections(name):
    elsewhere = (ROOT / EXAMPLES[name]).read_text() if name in EXAMPLES else ""
    found = gaps(DOCUMENTED[name]) - ({"example"} if elsewhere else set())
    assert not found, f"the docstring of {name} lacks {sorted(found)}: {gaps.__doc__}"


@pytest.mark.parametrize("name", COMPOSED)
def test_methods_have_equation_difference_and_bytes(name):
    """A name of `--strategy` says what it computes, what is not the paper's, what it sends, and predicts the bytes in its example."""
    text = inspect.getdoc(COMPOSED[name]) or ""
    before = text.partition("\nArgs:\n")[0]
    assert re.search(r"^    .*(?:[←=≤]|Δ\()", before, re.MULTILINE), "no equation, set off by four spaces"
    assert re.search(r"^\*Differs\*", before, re.MULTILINE), "no *Differs*"
    assert re.search(r"^\*Wire\*[:,](?:.|\n(?!\n))*?(?:bytes|as `)", before, re.MULTILINE), "no *Wire*"
    assert f">>> {name}(" in text and re.search(r"\.nbytes_per_period\(.*# bytes", text), (
        "no example that predicts bytes"
    )


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
    whole.__doc__ = (whole.__doc__ or "").replace("numbers.", "what is added.")
    assert gaps(whole) == {"units"}
