"""The walls, read from the source without running it: imports, no unpickling, public names, errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import code_map
import pytest

import thinwire
from thinwire.app.cli.verbs import OWN

SOURCE, TESTS = Path(thinwire.__file__).parent, Path(__file__).parents[1]
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

MOST_LOADED, MOST_LINES = 55, 9_000  # files by `from thinwire import Replica`, and their lines
MOST_IN_TRAINING = 80  # files of a default Replica that has trained

# What each wall may import. The top folder of a file says behind which wall it is; the rest is the core.
WALLS = {
    "core": {"core"},
    "integrations": {"core", "integrations"},
    "net": {"core", "net"},
    "app": {"core", "net", "app"},
    "lab": {"core", "net", "app", "lab"},
}

DOOR = "__main__.py"  # `python -m thinwire` is the command
ENVIRONMENT = "app/trainer/launch.py"  # reads the variables that torchrun sets


@cache
def source(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


def wall(module: str) -> str:
    """Behind which wall `codecs/block.py` or `thinwire.codecs.block` is."""
    top = module.removesuffix(".py").replace("/", ".").removeprefix("thinwire.").split(".")[0]
    return top if top in WALLS else "core"


@cache
def imports(file: str, in_functions: bool = True) -> frozenset[str]:
    """Returns every module that a file imports, if asked inside functions too. `from thinwire.x import y` is `thinwire.x` and `thinwire.x.y`."""
    found = set()
    for statement in ast.walk(tree(file)) if in_functions else code_map.outside_functions(tree(file)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{file}:{statement.lineno}: write imports in full"
            names = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= names if statement.module == "thinwire" else {statement.module or "", *names}
    return frozenset(found)


def test_the_package_has_files_to_check():
    assert len(FILES) > 30 and "replica.py" in FILES and "codecs/block.py" in FILES


def test_no_arrow_goes_through_a_wall():
    """The lab comes in by entry points, as anybody's package does: nothing names it. Imports in functions count, and those for types."""
    broken = {
        f"{file} -> {module}"
        for file in FILES
        for module in imports(file)
        if file != DOOR
        and module.split(".")[0] == "thinwire"
        and module != "thinwire"
        and wall(module) not in WALLS[wall(file)]
    }
    assert not broken


def test_no_file_is_named_for_nothing():
    assert not {"utils", "common", "helpers", "helper", "manager", "misc", "base_classes"} & {
        p for f in FILES for p in Path(f).with_suffix("").parts
    }


def loaded_by(program: str) -> list[str]:
    """The modules of thinwire after `program`."""
    told = "print(*(name for name in sys.modules if name.split('.')[0] == 'thinwire'))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, torch\n{program}\n{told}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_what_a_first_import_loads():
    """`from thinwire import Replica` loads what it needs, and nothing behind a wall."""
    loaded = loaded_by("from thinwire import Replica")
    assert {wall(module) for module in loaded if module != "thinwire"} == {"core"}
    lines = 0
    for module in loaded:
        path = SOURCE.parent / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        lines += len(file.read_text(encoding="utf-8").splitlines())
    assert len(loaded) <= MOST_LOADED and lines <= MOST_LINES, (
        f"{len(loaded)} files, {lines} lines; what a user does not use is loaded at its first use (lazy.py)"
    )


TRAINING = """
import thinwire as tw
def train(group):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.Replica(tw.streaming_sign(every=4), model, optimizer, group):
        for _ in range(8):
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
tw.run_threads(2, train)
"""


def test_what_a_replica_at_work_loads():
    """What comes at its first use is counted too, so that the first import is not small because all comes right after it."""
    loaded = loaded_by(TRAINING)
    assert {wall(module) for module in loaded if module != "thinwire"} == {"core"}
    assert len(loaded) <= MOST_IN_TRAINING, f"{len(loaded)} files"


def test_the_reading_path_names_ten_short_files():
    """docs/reading.md promises that they are in the core, and together no more than a morning's reading."""
    page = (TESTS.parent / "docs/reading.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d+\. \[`[^`]+`\]\(\.\./src/thinwire/([^)]+)\)", page, re.MULTILINE)
    assert len(files) == len(set(files)) == 10 and {wall(file) for file in files} == {"core"}
    assert sum(len(source(file).splitlines()) for file in files) <= 2000


def test_the_walk_of_a_delta_turns_back_twice_at_most():
    """docs/reading.md names the two: into the queue of the sending thread, and on to the receiving thread."""
    program = [sys.executable, str(TESTS.parent / "benchmarks/walk.py")]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    found = re.search(r"^(\d+) returns:", ended.stdout, re.MULTILINE)
    assert found and int(found[1]) <= 2, ended.stdout + ended.stderr


def test_files_import_each_other_in_no_circle():
    """Imports below `if TYPE_CHECKING` count too; those in functions, and what a package's __init__.py re-exports, do not."""
    names = {file.removesuffix(".py").replace("/", "."): file for file in FILES if not file.endswith("__init__.py")}
    graph = {
        name: {other.removeprefix("thinwire.") for other in imports(file, in_functions=False)} & names.keys()
        for name, file in names.items()
        if name != "__main__"
    }
    code_map.floors(graph)


@pytest.mark.parametrize("verb", OWN)
def test_a_verb_imports_no_other_verb(verb: str):
    """What several verbs use is in a module of its own. `thinwire resume` is `thinwire train --resume`."""
    others = {f"thinwire.app.cli.{other}" for other in OWN if other != verb and (verb, other) != ("resume", "train")}
    for file in FILES:
        if file.startswith((f"app/cli/{verb}.", f"app/cli/{verb}/")):
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
