"""Mutation tests: change one operator, number or condition of a module at a time, and check that a test of its package fails.

    make mutants                                    # all modules of PACKAGES: many hours
    make mutants MUTANTS="codecs/base --sample 20"  # a random sample of one module

The changes are cosmic-ray's operators, one for each place; no file is changed. A mutant of `codecs/base` is run against those
tests of tests/codecs that reach its statement, in varied order, until one fails. If the change is inside functions that no import
calls, a process that has collected the tests is forked, and the fork replaces the code of these functions; so a mutant costs only
its tests. Any other mutant is imported in a fork that has loaded only torch. A mutant whose tests take far longer than without the
change is `late`, which counts as killed. Results are kept in build/mutants and are not computed again (`--again` repeats survivors).
Out of scope: numba's kernels, and processes that tests start.
"""

from __future__ import annotations

import argparse
import ast
import gc
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
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from mutations import NOT_CHANGED, Mutant, changed_functions, compiled, mutant, places_of

ROOT = Path(__file__).parents[2]
SOURCE, TESTS, RESULTS = ROOT / "src" / "thinwire", ROOT / "tests", ROOT / "build" / "mutants"
PACKAGES = ("runtime", "exchange", "membership", "codecs", "pieces")
PRELOADED = (
    "hypothesis",
    "numba",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # an optimizer's first step imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "xdist",
)
# Tests outside tests/<package> that also test modules of the package.
ALSO = {
    "codecs": ("laws/test_recorded_results.py", "pieces/test_aggregates.py", "pieces/test_table_of_pieces.py"),
    "exchange": ("lab/gossip/test_laws.py", "pieces/test_aggregates.py"),
    "pieces": ("app/trainer/test_own_pieces.py",),
    "runtime": (
        "lab/gossip/test_laws.py",
        "laws/test_recorded_results.py",
        "laws/test_unlike_processors.py",
        "test_checkpoint.py",
    ),
}
TOLD = os.fdopen(os.dup(1), "w", buffering=1)  # the real output, also in forks whose output goes to a log
# exit status of a fork; 5: no tests
RESULT = defaultdict(lambda: "killed", {0: "survived", 5: "survived", None: "late"})


class Instead(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from another source text."""

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
    """Runs only these tests, in this order."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids

    def pytest_collection(self) -> None:
        """Runs before tests are imported, and turns off shrinking: a smaller failing example tells nothing here."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.get_profile("tests"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        of = {item.nodeid: item for item in items}
        items[:] = [of[name] for name in self.ids if name in of]


class InPlace(Only):
    """Collects the tests once. Each mutant runs its tests in a fork, in which its code replaces that of the imported functions."""

    def __init__(self, path: Path, work: list[tuple[Mutant, list[str], float]], told: Callable[..., None]) -> None:
        super().__init__(sorted({name for _, tests, _ in work for name in tests}))
        self.path, self.work, self.told = path, work, told

    def pytest_runtestloop(self, session: Any) -> bool:
        whole = compiled(self.path.read_text(encoding="utf-8"), self.path)
        of = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # conftest.py hides what is collected from the garbage collector
        functions = [
            f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == str(self.path)
        ]
        assert whole is not None and functions, f"no function of {self.path} is imported"
        for one, tests, limit in self.work:
            now = compiled(one.source, self.path)
            pairs = changed_functions(whole, now) if now else None
            assert pairs

            def run(pairs: list[tuple[CodeType, CodeType]] = pairs, tests: list[str] = tests) -> int:
                for function in functions:
                    for old, new in pairs:
                        if function.__code__ == old:
                            function.__code__ = new
                items = [of[name] for name in tests if name in of]
                for item, following in zip(items, [*items[1:], None]):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if session.testsfailed or session.shouldfail or session.shouldstop:
                        return 1
                return 0

            began = time.monotonic()
            self.told(one, RESULT[forked(run, RESULTS / "last.log", limit)], time.monotonic() - began)
        return True


class Watched:
    """Records which lines of the package each test reaches, and how long the test takes."""

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
        reached = {str(Path(file).relative_to(ROOT)): data.contexts_by_lineno(file) for file in data.measured_files()}
        path.write_text(json.dumps({"seconds": self.seconds, "reached": reached}))


def forked(work: Callable[[], int], log: Path | None, limit: float) -> int | None:
    """Runs `work` in a fork with its own process group. Returns its exit status, or None if it took longer than `limit` seconds."""
    sys.stdout.flush()
    if not (pid := os.fork()):
        os.setsid()
        status = 70
        if log:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
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
        os.killpg(pid, signal.SIGKILL)  # the processes that its tests left behind
    return None if late.is_set() else os.waitstatus_to_exitcode(status)


def digest(*paths: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


@cache
def reach(package: str, given: tuple[str, ...]) -> dict[str, Any]:
    """Returns what `Watched` recorded of the tests of a package, or of the given tests, without a mutant. They must pass."""
    import pytest

    files = sorted((TESTS / package).rglob("test_*.py")) + [TESTS / also for also in ALSO.get(package, ())]
    whole: dict[str, Any] = {"seconds": {}, "reached": {}}
    for tests in given or [str(path.relative_to(ROOT)) for path in files]:
        own = ROOT / tests.split("::")[0]
        name = f"{package}-{re.sub('[^a-z_]+', '-', tests)}-{digest(own, *(SOURCE / package).rglob('*.py'))}.json"
        path = RESULTS / name
        if not path.exists():
            print(f"{tests} as it is ...", flush=True)

            def watched(path: Path = path, tests: str = tests) -> int:
                watch = Watched(package)
                status = int(pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / tests)], plugins=[watch]))
                if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    watch.save(path)
                    return 0
                return status

            if forked(watched, log := RESULTS / f"{package}.log", 3600.0):
                sys.exit(f"{tests} fails without a mutant, see {log}")
        seen = json.loads(path.read_text())
        whole["seconds"] |= seen["seconds"]
        for file, lines in seen["reached"].items():
            reached = whole["reached"].setdefault(file, {})
            for line, ids in lines.items():
                reached[line] = reached.get(line, []) + ids
    return whole


def statement(text: str, line: int) -> range:
    """Returns the lines of the smallest statement that holds this line, without the statements inside it."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt | ast.ExceptHandler)]
    around = [n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]
    if not around:
        return range(line, line + 1)
    node = max(around, key=lambda n: n.lineno)
    body = getattr(node, "body", None)
    return range(node.lineno, max(node.lineno + 1, body[0].lineno) if body else (node.end_lineno or node.lineno) + 1)


def reaching(seen: dict[str, Any], path: Path, lines: range) -> tuple[set[str], set[str], bool]:
    """Returns the tests that reach one of these lines, the tests that reach any line of the module, and whether an import reaches these
    lines. If it does, the first are all tests, because a test may read what a class declares without running a line of the module.
    """
    reached = seen["reached"].get(str(path.relative_to(ROOT)), {})
    ids = {i for line in lines for i in reached.get(str(line), [])}
    near = {i for them in reached.values() for i in them} - {""}
    imported = "" in ids
    return set(seen["seconds"]) if imported else ids - {""}, near, imported


def ordered(seen: dict[str, Any], ids: set[str], near: set[str], stem: str, seconds: float) -> tuple[list[str], float]:
    """Orders tests: those of the module's own test file first, then those `near` it; the fastest case of each function, then the second
    of each, for at most `seconds`. Returns them and their total time.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(ids, key=lambda name: seen["seconds"].get(name, 0.0)):
        cases[name.split("[")[0]].append(name)
    turns = sorted(
        (f"/test_{stem}.py" not in name, name not in near, turn, seen["seconds"].get(name, 0.0), name)
        for names in cases.values()
        for turn, name in enumerate(names)
    )
    spent, first = 0.0, []
    for *_, duration, name in turns:
        if not first or spent + duration <= seconds:
            spent += duration
            first.append(name)
    return first, spent


def imported_anew(module: str, path: Path, mutant: Mutant, tests: list[str], limit: float) -> str:
    import pytest

    def run() -> int:
        name = "thinwire." + module.replace("/", ".")
        sys.meta_path.insert(0, Instead(name.removesuffix(".__init__"), path, mutant.source))
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files_of(tests)], plugins=[Only(tests)]))

    return RESULT[forked(run, RESULTS / "last.log", limit)]


def files_of(tests: list[str]) -> list[str]:
    return sorted({str(ROOT / name.split("::")[0]) for name in tests})


def examine(module: str, options: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """Runs the mutants of one module that have no result yet. Returns the number of places, and the outcome of each mutant run."""
    import pytest

    path = SOURCE / f"{module}.py"
    text = path.read_text(encoding="utf-8")
    file = RESULTS / f"{module.replace('/', '.')}-{digest(path)}.txt"
    lines = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
    known = {key: result for key, result, *_ in lines}
    seen = reach(module.split("/")[0], tuple(options.tests))

    def told(mutant: Mutant, result: str, took: float) -> None:
        with file.open("a") as out:
            out.write("\t".join([mutant.key, result, str(mutant.line), mutant.was, mutant.now]) + "\n")
        print(f"  {module}:{mutant.line} {result} ({took:.1f} s): {mutant.was} -> {mutant.now}", file=TOLD)

    places = sorted(places_of(text))
    random.Random(options.seed).shuffle(places)
    rows = text.splitlines()
    places = [(key, line) for key, line in places if not NOT_CHANGED.match(rows[line - 1].strip())]
    sample: list[Mutant] = []
    in_place = []
    whole = compiled(text, path)
    for key, line in places:
        if len(sample) == options.sample:
            break
        if (one := mutant(path, text, key, line)) is None:
            continue
        sample.append(one)
        if key in known and not (options.again and known[key] == "survived"):
            continue
        ids, near, imported = reaching(seen, path, statement(text, one.line))
        tests, spent = ordered(seen, ids, near, path.stem, options.seconds)
        limit, now = 30.0 + 10 * spent, compiled(one.source, path)
        if not tests:
            told(one, "survived", 0.0)
        elif not imported and whole and now and changed_functions(whole, now):
            in_place.append((one, tests, limit))
        else:
            began = time.monotonic()
            told(one, imported_anew(module, path, one, tests, 60.0 + limit), time.monotonic() - began)
    if in_place:
        files = files_of([name for _, tests, _ in in_place for name in tests])
        run = InPlace(path, in_place, told)
        forked(
            lambda: int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-s", *files], plugins=[run])),
            RESULTS / "collected.log",
            3600.0,
        )
    lines = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
    known = {key: result for key, result, *_ in lines}
    return len(places), {m.key: known[m.key] for m in sample}


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
    parser.add_argument("--tests", nargs="*", default=[], help="these files or tests alone, in place of the package's")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    sys.path.append(str(ROOT))  # as `python -m pytest` does, for processes that tests start
    rows = []
    for module in options.modules or modules():
        whole, results = examine(module, options)
        counts = [list(results.values()).count(word) for word in ("killed", "late", "survived")]
        rows.append((module, whole, len(results), *counts))
    print("module | mutants | run | killed | late | survived | share of the first two")
    for module, whole, run, *counts in [*rows, ("all", *map(sum, list(zip(*rows))[1:]))]:
        print(" | ".join(map(str, (module, whole, run, *counts, f"{1 - counts[-1] / max(1, run):.0%}"))))


if __name__ == "__main__":
    main()
