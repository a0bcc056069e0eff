"""The package's order, read from the source without running it: imports, no unpickling, public names, errors."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import code_map
import pytest

import thinwire
from thinwire.app.cli import VERBS

SOURCE, TESTS = Path(thinwire.__file__).parent, Path(__file__).parents[1]
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

# From the bottom up: a package imports only packages before it; files of one package may import each other.
_ORDER = """
errors version types rng data_ledger
packet state_tree kernels comm diagnosis
codecs membership records topology
pieces report
exchange checkpoint
strategy catalogue
recipes runtime
elastic methods decoupled simulate
replica
testing integrations jobs
lm plan cli
public
"""
PACKAGES = _ORDER.split()

FACES = ("__init__", "__main__")  # `import thinwire`, `python -m thinwire`
ENVIRONMENT = "app/trainer/launch.py"  # reads the variables that torchrun sets


@cache
def source(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


def package(module: str) -> str:
    """Returns the package of `codecs/block.py` or of `thinwire.codecs.block`; the root package is ''."""
    parts = module.removesuffix(".py").replace("/", ".").removeprefix("thinwire").strip(".").split(".")
    return "" if parts[0] in ("__init__", "__main__") else parts[0]


@cache
def imports(file: str) -> frozenset[str]:
    """Returns every module that a file imports, also inside functions. `from thinwire.x import y` is `thinwire.x` and `thinwire.x.y`."""
    found = set()
    for statement in ast.walk(tree(file)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{file}:{statement.lineno}: write imports in full"
            names = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= names if statement.module == "thinwire" else {statement.module or "", *names}
    return frozenset(found)


def test_the_package_has_files_to_check():
    assert len(FILES) > 30 and "replica.py" in FILES and "codecs/block.py" in FILES


def test_every_package_has_a_place_in_the_order():
    assert {package(file) for file in FILES} - {""} <= set(PACKAGES)
    assert not {"utils", "common", "helpers", "helper", "manager", "misc", "base_classes"} & {
        p for f in FILES for p in Path(f).with_suffix("").parts
    }


def test_contributing_lists_the_packages_in_this_order():
    text = (TESTS.parent / "CONTRIBUTING.md").read_text().split("src/thinwire/\n", 1)[1].split("\ntests/", 1)[0]
    told = [re.split(r"\s{3,}", line.strip())[0].split() for line in text.splitlines()]
    assert [Path(name).stem for names in told for name in names] == PACKAGES


def test_imports_name_only_lower_packages():
    """A package imports only packages below it. The root package may import all of them."""
    for file in FILES:
        own = package(file)
        for module in imports(file):
            if own == "" or module.split(".")[0] != "thinwire":
                continue
            other = package(module)
            assert other in PACKAGES, f"{file} imports thinwire itself, not a package in it"
            assert PACKAGES.index(other) <= PACKAGES.index(own), f"{file} imports {module}, which is above it"


# recipes are tested in laws/, the table of pieces in pieces/ and laws/, testing in test_testing.py
TESTED_ELSEWHERE = {"catalogue", "recipes", "testing"}
# folders of tests of more than one package
OF_THE_WHOLE = {"laws", "repo", "security", "support"}


def test_tests_mirror_the_packages():
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    folders = {path.parent.name for path in TESTS.glob("*/*.py")}
    assert packages - folders == TESTED_ELSEWHERE and folders - packages == OF_THE_WHOLE


def test_files_import_each_other_in_no_circle():
    """Imports below `if TYPE_CHECKING` count too. What a package's __init__.py re-exports does not."""
    names = {file.removesuffix(".py").replace("/", "."): file for file in FILES if not file.endswith("__init__.py")}
    graph = {
        name: {other.removeprefix("thinwire.") for other in imports(file)} & names.keys()
        for name, file in names.items()
        if name != "__main__"
    }
    code_map.floors(graph)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_imports_no_other_verb(verb: str):
    """What several verbs use is in a module of its own. `thinwire resume` is `thinwire train --resume`."""
    others = {f"thinwire.app.cli.{other}" for other in VERBS if other != verb and (verb, other) != ("resume", "train")}
    for file in FILES:
        if file.startswith((f"cli/{verb}.", f"cli/{verb}/")):
            assert not imports(file) & others, file


def test_no_file_unpickles_or_evaluates_bytes():
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    calls = r"torch\.load\b|\b(all_gather|broadcast|gather|scatter)_object|\b(eval|exec)\("
    for file in FILES:
        assert not {module.split(".")[0] for module in imports(file)} & banned, file
        assert not re.search(calls, re.sub(r"\.eval\(", "", source(file))), file


def test_the_environment_is_read_in_one_place():
    assert [file for file in FILES if re.search(r"\benviron\b|\bgetenv", source(file))] == [ENVIRONMENT]


PUBLIC = """
CheckpointError ConfigurationError DataError DisagreementError GradientHook Group LinkError ModelError NonFiniteError
PacketError PeerError Replica Strategy ThinwireError ThreadGroup TorchGroup data_parallel diloco finetune local_sgd run_threads
streaming_diloco streaming_sign
"""  # all other names are in modules


def test_the_public_names_are_exactly_those_listed():
    """`import thinwire as tw` gives these names. No name is added or lost by accident."""
    public = {name for name in dir(thinwire) if not name.startswith("_")}
    modules = {path.stem for path in SOURCE.iterdir()} | {"annotations"}
    assert public - modules == set(PUBLIC.split())


def test_the_tree_of_errors_is_drawn_in_errors_py():
    """Every error is in the tree at the top of errors.py and has a docstring of one line."""
    from thinwire import errors

    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [name for name, value in vars(errors).items() if isinstance(value, type) and name != "ThinwireError"]
    assert sorted(drawn) == sorted(defined)
    assert all(
        issubclass(getattr(errors, name), errors.ThinwireError) and getattr(errors, name).__doc__ for name in defined
    )
    assert issubclass(errors.LinkError, errors.PeerError) and issubclass(errors.DisagreementError, errors.PeerError)
