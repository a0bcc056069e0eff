"""Every public docstring has `Args:` with units, shapes and dtypes, `Raises:`, and an example that runs."""

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

from thinwire.catalogue.methods import NAMED
from thinwire.catalogue.parsing import PIECES
from thinwire.codecs import Codec, RandomK
from thinwire.exchange import Exchange

if TYPE_CHECKING:
    from public_names import COMPOSED, DOCUMENTED, EXAMPLES, PUBLIC

pytestmark = pytest.mark.usefixtures("late_imports")

# An accepted description of a number: a unit, what is counted, or a range.
UNIT = re.compile(
    r"seconds|bytes|\b(?:bits|tokens|columns|elements|neighbours|values|fragments|replicas|ranks|rounds)\b|inner steps?|number"
    r"|share|factor|[Rr]ank of|norm\b|learning rate|standard deviation|iterations|\d to \d|[\[(]0, 1[\])]"
)

# In a docstring of a piece: an equation is set off by four spaces, and is no row of a table.
EQUATION = re.compile(r"^    (?! |\|).*[=←→≤≥∈~]", re.MULTILINE)
CITATION = re.compile(
    r"arXiv\s\d{4}\.\d{4,5}|doi:\s?10\.|\bOCP\b|\b(?:RFC|IEEE) \d|\b[A-Z]\w+ (?:19|20)\d\d\b|et al\., \d{4}"
)
OURS = re.compile(r"\*Source\*: none[;.]")
DIFFERS = re.compile(r"\*Differs\*[: ]\s*\S")
WIRE = re.compile(r"\*Wire\*[:,](?:.|\n(?!\n))*?(?:bytes|bits)")
ARRAYS = r"Tensor|NDArray|Floats|Integers|Flags|Edges|Weights"
SHAPE = re.compile(r"\[|\b(?:flat|shape|dtype|fp32|float64|int64|uint8|boolean|elements)\b")


def gaps(thing: object) -> set[str]:
    """Returns which parts the docstring of a public class or function lacks.

    args     `Args:` does not name every parameter; the parameters of a class are those of its constructor
    raises   the code (of a class: its constructor), or a function that it calls, raises an error, and there is no `Raises:`
    units    `Args:` names no unit, count or range for a number; a seed needs none
    shapes   `Args:` names no shape or dtype for a tensor or an array
    example  there is no `>>>`; a Protocol and an error need none. test_public_names_and_options.py runs the examples
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


def unsaid(piece: type) -> set[str]:
    """Returns what the docstring of a piece leaves out of what a reader needs to compare it with its paper.

    equation  no equation or rule, set off by four spaces
    source    no paper (arXiv number, DOI, venue and year), no standard, and no `*Source*: none; …`
    differs   no `*Differs*: …`, with `nothing.` where the code is the source's; not needed where the source is none
    wire      no `*Wire*: …` in bytes or bits; for codecs and exchanges
    """
    before = re.split(r"^(?:Args|Raises):$|^>>> ", inspect.getdoc(piece) or "", maxsplit=1, flags=re.MULTILINE)[0]
    ours = bool(OURS.search(before))
    said = {
        "equation": EQUATION.search(before),
        "source": ours or CITATION.search(before),
        "differs": ours or DIFFERS.search(before),
        "wire": not {Codec, Exchange} & set(piece.__mro__) or WIRE.search(before),
    }
    return {part for part, found in said.items() if not found}


def parameters(thing: object) -> list[str]:
    assert callable(thing)
    if isinstance(thing, type) and issubclass(thing, Enum):
        return []  # an Enum is never constructed by a user
    try:
        given = inspect.signature(thing).parameters
    except ValueError:
        return []
    return [name for name in given if name not in ("self", "args", "kwargs") and not name.startswith("_")]


def of_type(names: str, thing: object) -> list[str]:
    """Returns the parameters whose type is, or contains, one of `names`."""
    assert callable(thing)
    each = inspect.signature(thing).parameters if parameters(thing) else {}
    return [name for name in each if re.search(rf"\b(?:{names})\b", str(each[name].annotation))]


def fields(thing: object) -> dict[str, str]:
    """Returns the docstring below each field of a class, by field name, as options and run files have them."""
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
    """Returns what `Args:` says of each name. Several names may share a line, as in `every, delay: inner steps`."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    lines = re.findall(r"^    ([\w, ]+):(.*\n?(?: {5,}.*\n?)*)", section[1], re.MULTILINE) if section else []
    return {name.strip(): said for names, said in lines for name in names.split(",")}


def raises(thing: object) -> bool:
    """Says whether calling (of a class: constructing) `thing` raises an error in its own code, or in a function that this code calls."""
    where = [thing] if inspect.isfunction(thing) else [vars(thing).get(name) for name in ("__init__", "__post_init__")]
    return any(raises_within(each, thing, deeper=True) for each in where)


def raises_within(function: object, owner: object, deeper: bool) -> bool:
    if not inspect.isfunction(function) or function.__code__.co_filename == "<string>":
        return False
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    waiting, found = list(ast.iter_child_nodes(tree)), []
    while waiting:
        found.append(waiting.pop())
        if not isinstance(found[-1], ast.FunctionDef | ast.Lambda):  # a function inside raises later, if at all
            waiting += ast.iter_child_nodes(found[-1])
    if any(isinstance(node, ast.Raise) and node.exc is not None for node in found):
        return True
    called = [node.func for node in found if isinstance(node, ast.Call)] if deeper else []
    named = [function.__globals__.get(each.id) for each in called if isinstance(each, ast.Name)]
    named += [
        inspect.getattr_static(owner, each.attr, None)
        for each in called
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]
    ours = [each for each in named if inspect.isfunction(each) and each.__module__.startswith("thinwire")]
    return any(raises_within(each, owner, deeper=False) for each in ours)


def test_public_docstrings_have_their_sections():
    for name, thing in PUBLIC.items():
        elsewhere = (ROOT / EXAMPLES[name]).read_text() if name in EXAMPLES else ""
        shown = re.search(rf"\b{name.split('.')[-1]}\(", elsewhere)
        found = gaps(thing) - ({"example"} if shown else set())
        assert not found, f"the docstring of {name} lacks {sorted(found)}: {gaps.__doc__}"


def test_every_documented_name_is_checked_and_every_exemption_is_needed():
    """The checked names include every name on a page. An example elsewhere is accepted only where the docstring has none."""
    assert {id(thing) for thing in DOCUMENTED.values() if callable(thing)} <= set(map(id, PUBLIC.values()))
    assert all("example" in gaps(PUBLIC[name]) for name in EXAMPLES if name in PUBLIC)
    assert len(PUBLIC) > 300


@over("name", NAMED)
def test_methods_have_equation_difference_and_bytes(name):
    """Each `--strategy` docstring has an equation, a *Differs* and a *Wire* paragraph, and an example that predicts bytes."""
    text = inspect.getdoc(COMPOSED[name]) or ""
    before = text.partition("\nArgs:\n")[0]
    assert re.search(r"^    .*(?:[←=≤]|Δ\()", before, re.MULTILINE), "no equation, set off by four spaces"
    assert re.search(r"^\*Differs\*", before, re.MULTILINE), "no *Differs*"
    assert re.search(r"^\*Wire\*[:,](?:.|\n(?!\n))*?(?:bytes|as `)", before, re.MULTILINE), "no *Wire*"
    assert f">>> {name}(" in text and re.search(r"\.nbytes_per_period\(.*# bytes", text), (
        "no example that predicts bytes"
    )


def test_pieces_have_equation_source_difference_and_bytes():
    found = {name: sorted(unsaid(piece)) for name, piece in PIECES.items() if isinstance(piece, type) and unsaid(piece)}
    assert not found, f"of {len(PIECES)} pieces {len(found)} leave something out: {found}: {unsaid.__doc__}"
    assert len(PIECES) > 100


def test_a_piece_that_leaves_something_out_is_reported():
    class Bare(Codec):
        """Sends x = 3 in few bytes (a paper of 2024; docs/experiments.md, 2026-11-22).

        Args:
            x: *Source*: none; *Differs*: nothing.

        >>> y = 3
        """

    class Whole(Bare):
        """Sends the nearest of three.

            q(x) = 3

        *Source*: Nobody et al. (arXiv 1234.56789). *Differs*: nothing. *Wire*: 3 bytes.
        """

    class Own(Whole):
        """Sends.

            q(x) ∈ {1, 2}

        *Source*: none; the usual rounding. *Wire*: 8 bits.
        """

    assert unsaid(Bare) == {"equation", "source", "differs", "wire"}
    assert unsaid(Whole) == unsaid(Own) == set()
    Whole.__doc__ = (Whole.__doc__ or "").replace("*Differs*: nothing.", "").replace("q(x) = 3", "| q(x) = 3 |")
    assert unsaid(Whole) == {"equation", "differs"}


def test_incomplete_docstrings_are_reported():
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
    assert raises(gaps) is False and raises(RandomK) is True  # RandomK calls a function that raises
    whole.__doc__ = (whole.__doc__ or "").replace("numbers.", "what is added.")
    assert gaps(whole) == {"units"}
