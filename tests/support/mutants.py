"""Mutation tests of the core: one wrong line at a time; do the tests of its own part notice?

    make mutants                                               # 200 random mutants of the core: about an hour
    make mutants MUTANTS="codecs pieces/guard.py --sample 20"  # a random sample of these parts

A mutant is a comparison, operator, number, condition, argument or statement that is changed or removed. No file of the checkout is
changed: a copy of the sources is, and a process that has loaded torch is forked, in which the copy comes first in the path (and in
those that tests start). The tests of its part (`tests_of`) run until one fails. A mutant that they run far longer than without
it is `late`, which counts as noticed. Some mutants are the same program in other words, which only a reader can tell.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE, TESTS, WORK = ROOT / "src" / "thinwire", ROOT / "tests", ROOT / "build" / "mutants"
NOT_CORE = ("app", "lab", "net", "integrations", "testing")
PRELOADED = ("hypothesis", "numba", "pytest", "safetensors.torch", "torch._dynamo", "torch.distributed.tensor", "xdist")
# A part has the tests of the folder or file of its name, and these; elastic runs take minutes, and are left out of the drivers.
ALSO = {
    "codecs": ("laws/test_every_piece.py",),
    "exchange": ("laws/test_every_piece.py",),
    "files": ("test_checkpoint.py",),
    "pieces": ("laws/test_every_piece.py", "laws/test_error_feedback.py"),
    "recipes": ("laws/test_every_recipe.py", "laws/test_published_equations.py"),
    "drivers": ("laws/test_failed_rounds.py", "laws/test_order_of_events.py"),
    "replica": ("drivers",),
    "strategy": ("laws/test_bad_configurations.py", "pieces", "drivers"),
}
# The last kills the processes that it traces, which does not work in a fork.
LEFT_OUT = ("elastic", "test_disk.py", "test_torch_features.py", "test_checkpoint_kills.py")
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}


class Mutant(NamedTuple):
    file: str  # below src/thinwire
    line: int
    was: str
    now: str
    text: str  # of the whole file


def replaced(node: ast.AST) -> Iterator[ast.AST]:
    """Gives what a wrong line may have in place of a node."""
    copy: Any = deepcopy(node)
    match node:
        case ast.Compare(ops=[only]):
            copy.ops = [COMPARISONS[type(only)]()]
            yield copy
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            copy.op = OPERATORS[type(operator)]()
            yield copy
            if isinstance(operator, ast.Sub | ast.Div | ast.FloorDiv):
                yield ast.BinOp(node.right, operator, node.left)
        case ast.BoolOp(op=operator):
            copy.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield copy
            yield ast.BoolOp(operator, node.values[:-1]) if len(node.values) > 2 else node.values[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value) if value + 1 != value:
            yield ast.Constant(value + 1)
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.If() | ast.While():
            pass
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            copy.args = [second, first, *rest]
            yield copy
        case ast.Call(keywords=[*_, last]) if last.arg:
            copy.keywords.pop()
            yield copy
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Return(value=ast.expr()):
            yield ast.Return(None)


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Gives the nodes that do something a test can see: no annotations, names of types, decorators or words of errors."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr() | ast.ImportFrom() | ast.Import():
            return
        case ast.FunctionDef(name="__repr__" | "__str__" | "describe"):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assert():
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params", "exc") or (
            isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("cast", "TypeVar", "warn", "overload")
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_of(child)


def places_of(path: Path) -> list[tuple[Path, ast.AST, ast.AST]]:
    """Returns each node that may be wrong, with what stands in its place."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(path, node, other) for node in nodes_of(tree) for other in replaced(node)]


def mutant(path: Path, node: Any, other: ast.AST) -> Mutant | None:
    """Returns the file with `other` for `node`; None if that is the same program, or none."""
    whole = path.read_bytes()
    starts = [0, *itertools.accumulate(map(len, whole.splitlines(keepends=True)))]
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    written = ast.unparse(ast.fix_missing_locations(other))
    if isinstance(node, ast.expr):
        written = f"({written})"
    changed = whole[:begin] + written.encode() + whole[end:]
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(whole)):
            return None
    except SyntaxError:
        return None
    was = " ".join(whole[begin:end].decode().split())
    return Mutant(str(path.relative_to(SOURCE)), node.lineno, was, written, changed.decode())


def tests_of(file: str) -> list[str]:
    """Returns the test files of the part that a source file belongs to: those of its own name first."""
    part, stem = Path(file).parts[0].removesuffix(".py"), Path(file).stem
    paths = [path for also in (part, *ALSO.get(part, ())) for path in sorted((TESTS / also).rglob("test_*.py"))]
    paths += [TESTS / also for also in ALSO.get(part, ()) if also.endswith(".py")] + sorted(
        TESTS.glob(f"test_{part}*.py")
    )
    paths = [path for path in paths if not set(LEFT_OUT) & set(path.relative_to(TESTS).parts)]
    return [str(path) for path in sorted(dict.fromkeys(paths), key=lambda path: stem not in path.stem)]


def run(mutant: Mutant, tree: Path, tests: list[str], limit: float) -> tuple[str, str]:
    """Runs the tests in a fork, with its own process group. Returns noticed, late or survived, and the test that noticed."""
    (tree / "thinwire" / mutant.file).write_text(mutant.text, encoding="utf-8")
    log = tree / "log"
    if not (pid := os.fork()):
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 70
        try:
            import pytest

            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
            status = int(pytest.main([*options, *tests]))
        finally:
            os._exit(status)
    late = threading.Event()
    timer = threading.Timer(limit, lambda: (late.set(), os.killpg(pid, signal.SIGKILL)))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    timer.join()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the processes that its tests left behind
    shutil.copy2(SOURCE / mutant.file, tree / "thinwire" / mutant.file)
    if late.is_set():
        return "late", ""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("noticed" if os.waitstatus_to_exitcode(status) else "survived"), (said or [""])[0][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="folders or files below src/thinwire; the whole core without")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", help="these tests alone, in place of the part's")
    parser.add_argument("--out", type=Path, default=WORK / "mutants.json")
    options = parser.parse_args()
    roots = [SOURCE / part for part in options.parts] or [
        path for path in SOURCE.iterdir() if path.name not in NOT_CORE and (path.is_dir() or path.suffix == ".py")
    ]
    files = sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py")))
    places = [place for file in files for place in places_of(file)]
    random.Random(options.seed).shuffle(places)
    sample = list(itertools.islice(filter(None, itertools.starmap(mutant, places)), options.sample))
    tree = WORK / f"tree-{os.getpid()}"
    shutil.copytree(SOURCE, tree / "thinwire")  # with the dates of files, so that numba's cache holds
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    sys.path.append(str(ROOT))  # as `python -m pytest` does
    limits: dict[tuple[str, ...], float] = {}
    rows, counts = [], defaultdict(lambda: defaultdict(int))
    for one in sample:
        began = time.monotonic()
        tests = options.tests or tests_of(one.file)
        if tests and (among := tuple(sorted(tests))) not in limits:
            whole = Mutant(one.file, 0, "", "", (SOURCE / one.file).read_text(encoding="utf-8"))
            result, test = run(whole, tree, tests, 3600.0)
            if result != "survived":
                sys.exit(f"the tests of {one.file} fail without a mutant: {test}")
            limits[among] = 60.0 + 5 * (time.monotonic() - began)
            print(f"the tests of {Path(one.file).parts[0]} take {time.monotonic() - began:.0f} s", flush=True)
            began = time.monotonic()
        result, test = run(one, tree, tests, limits[among]) if tests else ("survived", "no tests")
        print(
            f"{result:9}{one.file}:{one.line} ({time.monotonic() - began:.0f} s): {one.was[:100]} -> {one.now[:100]}  {test}",
            flush=True,
        )
        rows.append(
            {
                "file": one.file,
                "line": one.line,
                "was": one.was,
                "now": one.now,
                "result": result,
                "test": test,
            }
        )
        counts[Path(one.file).parts[0]][result] += 1
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    shutil.rmtree(tree)
    print(
        f"seed {options.seed}, {len(sample)} of {len(places)} places\npart | run | noticed | late | survived | share noticed"
    )
    for part, of in [
        *sorted(counts.items()),
        ("all", {word: sum(c[word] for c in counts.values()) for word in ("noticed", "late", "survived")}),
    ]:
        whole = max(1, sum(of.values()))
        print(
            f"{part} | {whole} | {of['noticed']} | {of['late']} | {of['survived']} | {1 - of['survived'] / whole:.0%}"
        )


if __name__ == "__main__":
    main()
