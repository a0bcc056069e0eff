"""Public docstrings have `Args:` with units, shapes and dtypes, `Raises:` and an example that runs: all of them, without a gap."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from enum import Enum
from typing import TYPE_CHECKING

import pytest
from pages import ROOT
from pieces import over

from thinwire.decoupled.method import DECOUPLED
from thinwire.methods import CODISTILL, METHODS
from thinwire.recipes import RECIPES

if TYPE_CHECKING:
    from public_names import COMPOSED, DOCUMENTED, EXAMPLES, PUBLIC

pytestmark = pytest.mark.usefixtures("late_imports")

# A unit, what is counted, or the range of a plain number.
UNIT = re.compile(
    r"seconds|bytes|\b(?:bits|tokens|columns|elements|neighbours|values|fragments|replicas|ranks|rounds)\b|inner steps?|number"
    r"|share|factor|[Rr]ank of|norm\b|learning rate|standard deviation|iterations|\d to \d|[\[(]0, 1[\])]"
)

ARRAYS = r"Tensor|NDArray|Floats|Integers|Flags|Edges|Weights"
SHAPE = re.compile(r"\[|\b(?:flat|shape|dtype|fp32|float64|int64|uint8|boolean|elements)\b")


def gaps(thing: object) -> set[str]:
    """What the docstring of a public class or function lacks.

    args     a parameter that `Args:` does not name; a class takes those with which it is made
    raises   it has a `raise`, for a class when it is made, and no `Raises:`
    units    a parameter that is a number, and what `Args:` says of it names no unit, count or range; a seed needs none
    shapes   a parameter that is a tensor or an array, and what `Args:` says of it names no shape or dtype
    example  no `>>>`; a Protocol and an error need none. That examples run is held by test_surface.py
    """
    text = inspect.getdoc(thing) or ""
    error = isinstance(thing, type) and issubclass(thing, BaseException)
    abstract = bool(getattr(thing, "_is_protocol", False))
    found = set()
    if not error and not abstract and not set(parameters(thing)) <= {*described(text), *fields(thing)}:
        found.add("args")
    said = described(text) | fields(thing)
    if any(not UNIT.search(said[name]) for name in of_type(r"int|float", thing) if name in said and name != "seed"):
        found.add("units")
    if any(not SHAPE.search(said[name]) for name in of_type(ARRAYS, thing) if name in said):
        found.add("shapes")
    if not abstract and raises(thing) and not re.search(r"^Raises:\n    \S", text, re.MULTILINE):
        found.add("raises")
    if not error and not abstract and ">>> " not in text:
        found.add("example")
    return found


def parameters(thing: object) -> list[str]:
    assert callable(thing)
    if isinstance(thing, type) and issubclass(thing, Enum):
        return []  # nobody makes one
    try:
        given = inspect.signature(thing).parameters
    except ValueError:
        return []
    return [name for name in given if name not in ("self", "args", "kwargs") and not name.startswith("_")]


def of_type(names: str, thing: object) -> list[str]:
    """The parameters whose type has one of these names, or holds such a one."""
    assert callable(thing)
    each = inspect.signature(thing).parameters if parameters(thing) else {}
    return [name for name in each if re.search(rf"\b(?:{names})\b", str(each[name].annotation))]


def fields(thing: object) -> dict[str, str]:
    """What the docstrings below its fields say, where a class explains them there, by name: those of options and run files."""
    if not isinstance(thing, type):
        return {}
    (of_class,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(of_class, ast.ClassDef)
    found = {}
    for field, text in zip(of_class.body, of_class.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = str(getattr(text.value, "value", ""))
    return found


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


def test_public_docstrings_have_their_sections():
    for name, thing in PUBLIC.items():
        elsewhere = (ROOT / EXAMPLES[name]).read_text() if name in EXAMPLES else ""
        shown = re.search(rf"\b{name.split('.')[-1]}\(", elsewhere)
        found = gaps(thing) - ({"example"} if shown else set())
        assert not found, f"the docstring of {name} lacks {sorted(found)}: {gaps.__doc__}"


def test_the_public_names_are_counted():
    """None is left out, of those that pages name, and an example elsewhere is one that a docstring lacks."""
    assert {id(thing) for thing in DOCUMENTED.values() if callable(thing)} <= set(map(id, PUBLIC.values()))
    assert all("example" in gaps(PUBLIC[name]) for name in EXAMPLES if name in PUBLIC)
    assert len(PUBLIC) > 300


@over("name", RECIPES | METHODS | DECOUPLED | CODISTILL)
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
