"""Do the tests notice an error? Change one operator, number or condition of a module at a time, and run the tests of its package.

    make mutants                                    # all modules of PACKAGES: many hours
    make mutants MUTANTS="codecs/base --sample 20"  # some: a sample with a seed

The changes are cosmic-ray's operators, one for each place. Each mutant runs in a fork of a process that has loaded torch, so that it
costs what its tests cost; no file is changed. A mutant of `codecs/base` meets those of tests/codecs that reach its line, most
different first, until one fails. Results are kept in build/mutants, and what is there is not run again (`--again`: the survivors are).
tests/mutants.toml explains survivors that no test can kill. Out of scope: numba's kernels, and processes that tests start.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import re
import signal
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE, TESTS, RESULTS = ROOT / "src" / "thinwire", ROOT / "tests", ROOT / "build" / "mutants"
PACKAGES = ("runtime", "exchange", "membership", "codecs", "pieces")
PRELOADED = (
    "hypothesis",
    "numba",
    "pytest",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "xdist",
)
EXPLAINED = TESTS / "mutants.toml"

# One change for each operator: the one that a person would make by mistake.
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


def mutants_of(path: Path) -> list[Mutant]:
    """One for each place that an operator can change, where the result is another program."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = path.read_text(encoding="utf-8")
    types = {
        (n.lineno, column) for n in annotations(ast.parse(text)) for column in range(n.col_offset, n.end_col_offset)
    }  # type: ignore[attr-defined]
    found = []
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [p for node in ast_nodes(get_ast(text)) for p in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            try:
                changed = mutate_code(text, operator, occurrence)
            except AttributeError:  # cosmic-ray cannot change `except module.Error`
                continue
            if start in types or changed is None or not compiled(changed, path):
                continue
            lines = list(difflib.ndiff(text.splitlines(), changed.splitlines()))
            was, now = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
            found.append(Mutant(f"{name}:{occurrence}", start[0], was, now, changed))
    return found


def compiled(text: str, path: Path) -> CodeType | None:
    try:
        return compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError:
        return None


class Instead(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from another text."""

    def __init__(self, module: str, path: Path, text: str) -> None:
        self.module, self.path, self.text = module, path, text

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname == self.module:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)
        return None

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, str(self.path), "exec", dont_inherit=True)


class Only:
    """Runs these tests in this order."""

    def __init__(self, ids: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(ids)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda item: self.places[item.nodeid])


class Watched:
    """Which lines of the package each test reaches, and how long it takes."""

    def __init__(self, package: str) -> None:
        import coverage

        self.seconds: dict[str, float] = defaultdict(float)
        self.coverage = coverage.Coverage(data_file=None, include=[str(SOURCE / package / "*")])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")

    def save(self, path: Path) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        reached = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        path.write_text(json.dumps({"seconds": self.seconds, "reached": reached}))


def forked(work: Callable[[], int], log: Path, limit: float) -> int | None:
    """The status of `work` in a fork, in a process group of its own; None if it took longer than `limit` seconds."""
    if not (pid := os.fork()):
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    timer.join()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests left behind
    return None if late.is_set() else os.waitstatus_to_exitcode(status)


def digest(*paths: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def reach(package: str) -> dict[str, Any]:
    """What `Watched` saw of the tests of a package as they are; they must pass."""
    import pytest

    of = digest(*(SOURCE / package).rglob("*.py"), *(TESTS / package).rglob("*.py"))
    path = RESULTS / f"{package}-{of}.json"
    if not path.exists():
        print(f"{package}: its tests as they are ...", flush=True)

        def watched() -> int:
            watch = Watched(package)
            status = int(pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS / package)], plugins=[watch]))
            if not status:
                watch.save(path)
            return status

        if forked(watched, log := RESULTS / f"{package}.log", 3600.0):
            sys.exit(f"the tests of {package} fail without a mutant, see {log}")
    return json.loads(path.read_text())


def chosen(seen: dict[str, Any], path: Path, line: int, seconds: float) -> list[str]:
    """The tests that reach the line: of each function the quickest case first, then the second of each, for at most `seconds`."""
    lines = seen["reached"].get(str(path), {})
    ids = {i for i in lines.get(str(line), []) if i} or {
        i for each in lines.values() for i in each if i
    }  # or it runs at import
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(ids, key=lambda name: seen["seconds"].get(name, 0.0)):
        cases[name.split("[")[0]].append(name)
    turns = sorted(
        (turn, seen["seconds"].get(name, 0.0), name) for names in cases.values() for turn, name in enumerate(names)
    )
    spent, ordered = 0.0, []
    for _, duration, name in turns:
        if not ordered or spent + duration <= seconds:
            spent += duration
            ordered.append(name)
    return ordered


def outcome(module: str, path: Path, mutant: Mutant, tests: list[str], limit: float) -> str:
    import pytest

    if not tests:
        return "survived"

    def run() -> int:
        name = "thinwire." + module.replace("/", ".")
        sys.meta_path.insert(0, Instead(name.removesuffix(".__init__"), path, mutant.source))
        files = sorted({str(ROOT / name.split("[")[0]) for name in tests})
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[Only(tests)]))

    return "killed" if forked(run, RESULTS / "last.log", limit) else "survived"


def examine(module: str, options: argparse.Namespace) -> tuple[int, int, dict[str, str]]:
    """Run the mutants of one module that have no result yet. How many it has, how many were run, and the outcome of each."""
    path = SOURCE / f"{module}.py"
    everything = mutants_of(path)
    sample = sorted(everything)
    random.Random(options.seed).shuffle(sample)
    sample = sample[: options.sample]
    file = RESULTS / f"{module.replace('/', '.')}-{digest(path)}.txt"
    lines = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
    known = {key: result for key, result, *_ in lines}
    seen = reach(module.split("/")[0])
    for mutant in sample:
        if known.get(mutant.key) == "killed" or (known.get(mutant.key) and not options.again):
            continue
        tests = chosen(seen, path, mutant.line, options.seconds)
        began = time.monotonic()
        known[mutant.key] = outcome(module, path, mutant, tests, 60.0 + 20 * options.seconds)
        words = [mutant.key, known[mutant.key], str(mutant.line), mutant.was, mutant.now]
        with file.open("a") as out:
            out.write("\t".join(words) + "\n")
        print(
            f"  {module}:{mutant.line} {known[mutant.key]} ({time.monotonic() - began:.0f} s): {mutant.was} -> {mutant.now}",
            flush=True,
        )
    return len(everything), len(sample), {mutant.key: verdict(module, mutant, known[mutant.key]) for mutant in sample}


def verdict(module: str, mutant: Mutant, result: str) -> str:
    explained = tomllib.loads(EXPLAINED.read_text())["explained"]
    why = [e for e in explained if (e["module"], e["was"], e["now"]) == (module, mutant.was, mutant.now)]
    return "explained" if why and result == "survived" else result


def modules() -> list[str]:
    paths = [path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    return [
        str(path.relative_to(SOURCE).with_suffix(""))
        for path in paths
        if path.name != "__init__.py" and not re.search(r"^from numba|^import numba", path.read_text(), re.MULTILINE)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as codecs/base; all of them without")
    parser.add_argument("--sample", type=int, help="how many mutants of each module, drawn with --seed; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests that a mutant meets at most")
    parser.add_argument("--again", action="store_true", help="run those that survived anew")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    rows = []
    for module in options.modules or modules():
        whole, run, results = examine(module, options)
        counts = [list(results.values()).count(word) for word in ("killed", "explained", "survived")]
        rows.append((module, whole, run, *counts))
    print("module | mutants | run | killed | explained | survived | share killed or explained")
    for module, whole, run, killed, explained, survived in [*rows, ("all", *map(sum, list(zip(*rows))[1:]))]:
        share = (killed + explained) / max(1, run)
        print(f"{module} | {whole} | {run} | {killed} | {explained} | {survived} | {share:.0%}")


if __name__ == "__main__":
    main()
