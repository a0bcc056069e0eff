"""The changes that `make mutants` makes to a module: their places, texts, and functions. See mutants.py."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

# One change for each operator: the one that a person would most likely make by mistake.
BINARY = "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul RShift_LShift LShift_RShift BitAnd_BitOr BitOr_BitAnd BitXor_BitAnd"
COMPARISON = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
OTHERS = (
    "AddNot ExceptionReplacer NumberReplacer RemoveDecorator ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ReplaceFalseWithTrue ReplaceTrueWithFalse ReplaceUnaryOperator_USub_UAdd "
    "ReplaceUnaryOperator_Delete_Not ZeroIterationForLoop"
)
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY.split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISON.split()),
    *OTHERS.split(),
]


# Lines for readers, type checkers or memory, which change no result that a test can see.
NOT_CHANGED = re.compile(
    r"@(abstractmethod|runtime_checkable|override|lru_cache\(maxsize=[\d <]+\)|dataclass\(frozen=True\))$"
)


class Mutant(NamedTuple):
    key: str  # operator and occurrence
    line: int
    was: str
    now: str
    source: str


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (given := getattr(node, name, None)) is not None:
                yield given


def places_of(text: str) -> list[tuple[str, int]]:
    """Returns operator and occurrence, and the line, of each place that an operator can change, without type annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    taken = {
        (n.lineno, column) for n in annotations(ast.parse(text)) for column in range(n.col_offset, n.end_col_offset)
    }  # type: ignore[attr-defined]
    nodes, found = list(ast_nodes(get_ast(text))), []
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        for occurrence, (start, _) in enumerate(p for node in nodes for p in operator.mutation_positions(node)):
            if start not in taken:
                taken.add(start)
                found.append((f"{name}:{occurrence}", start[0]))
    return found


def mutant(path: Path, text: str, key: str, line: int) -> Mutant | None:
    """Returns the mutant of one place on `line`; None if the result is the same program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    name, occurrence = key.split(":")
    try:
        changed = mutate_code(text, get_operator(f"core/{name}")(), int(occurrence))
    except AttributeError:  # cosmic-ray cannot change `except module.Error`
        return None
    if changed is None or not compiled(changed, path):
        return None
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):  # 1e30 + 1 is 1e30
        return None
    differ = list(difflib.ndiff(text.splitlines(), changed.splitlines()))
    was, now = (" ".join(one[2:].strip() for one in differ if one[0] == sign and one[2:].strip()) for sign in "-+")
    return Mutant(key, line, was, now, changed)


def compiled(text: str, path: Path) -> CodeType | None:
    try:
        return compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError:
        return None


def changed_functions(was: CodeType, now: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Returns each function whose code differs, before and after; None if a module or class differs outside its functions."""
    pairs = []
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (was, now)]
    if [c.co_qualname for c in inner[0]] != [c.co_qualname for c in inner[1]]:
        return None
    for old, new in zip(*inner):
        is_function = bool(old.co_flags & inspect.CO_OPTIMIZED)
        if is_function and old != new:
            if old.co_freevars != new.co_freevars:
                return None
            pairs.append((old, new))
        if (deeper := changed_functions(old, new)) is None and not is_function:
            return None
        pairs += deeper or []
    outer = [[c for c in code.co_consts if not isinstance(c, CodeType)] for code in (was, now)]
    same = was.co_code == now.co_code and was.co_names == now.co_names and repr(outer[0]) == repr(outer[1])
    return pairs if same or was.co_flags & inspect.CO_OPTIMIZED else None
