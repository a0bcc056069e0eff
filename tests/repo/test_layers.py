"""The house keeps its order: who imports whom, how long a file is, which words are used. Read from the source, not run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import thinwire
from thinwire.parsing import PIECES

HOUSE = Path(thinwire.__file__).parent
FILES = sorted(path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py"))

# From the ground up: a room imports only from rooms before it, and files of one room from each other.
_ORDER = """
errors version state rng observer printable files own_files
packet kernels comm diagnosis
codecs membership records
pieces report
exchange checkpoint
strategy catalogue parsing
recipes runtime
elastic methods ddp_hook simulate
replica
testing integrations
lm plan cli
public
"""
ROOMS = _ORDER.split()

# Longer than 400 lines, with the reason and how long at most.
LONG_FILES = {
    "recipes.py": (650, "half of it says what the settings are"),
    "exchange/base.py": (430, "the protocol with its declarations stands beside what a round is"),
}
LONG_FUNCTIONS: dict[str, str] = {}
ENVIRONMENT = "lm/launch.py"  # what torchrun says is read there


def tree(file: str) -> ast.Module:
    return ast.parse((HOUSE / file).read_text(encoding="utf-8"))


def room(module: str) -> str:
    """The room of `codecs/block.py` or of `thinwire.codecs.block`; the root itself is ''."""
    parts = module.removesuffix(".py").replace("/", ".").removeprefix("thinwire").strip(".").split(".")
    return "" if parts[0] in ("__init__", "__main__") else parts[0]


def imports(file: str) -> set[str]:
    """Every module that a file names, inside functions too. `from thinwire import x` is `thinwire.x`."""
    found = set()
    for statement in ast.walk(tree(file)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{file}:{statement.lineno}: write imports in full"
            names = {f"thinwire.{alias.name}" for alias in statement.names}
            found |= names if statement.module == "thinwire" else {statement.module or ""}
    return found


def test_there_are_files():
    assert len(FILES) > 30 and "replica.py" in FILES and "codecs/block.py" in FILES


def test_every_room_has_its_place():
    assert {room(file) for file in FILES} - {""} <= set(ROOMS)
    assert not {"utils", "common", "helpers", "helper", "manager", "misc", "base_classes"} & {
        p for f in FILES for p in Path(f).with_suffix("").parts
    }


@pytest.mark.parametrize("file", FILES)
def test_imports_go_down(file):
    own = room(file)
    if own == "":
        return  # the front door names everything
    for module in imports(file):
        if module.split(".")[0] != "thinwire":
            continue
        other = room(module)
        assert other in ROOMS, f"{file} imports the house itself, not a room"
        assert ROOMS.index(other) <= ROOMS.index(own), f"{file} imports {module}, which is above it"


@pytest.mark.parametrize("file", FILES)
def test_nothing_that_runs_code_from_bytes(file):
    text = (HOUSE / file).read_text(encoding="utf-8")
    assert not {module.split(".")[0] for module in imports(file)} & {
        "pickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
    }
    assert not re.search(
        r"torch\.load\b|\b(all_gather|broadcast|gather|scatter)_object|\b(eval|exec)\(", re.sub(r"\.eval\(", "", text)
    )


@pytest.mark.parametrize("file", FILES)
def test_the_environment_is_read_in_one_place(file):
    assert file == ENVIRONMENT or not re.search(
        r"\benviron(?!ments)|\bgetenv", (HOUSE / file).read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("file", FILES)
def test_files_are_short(file):
    lines = len((HOUSE / file).read_text(encoding="utf-8").splitlines())
    most, _ = LONG_FILES.get(file, (400, ""))
    assert lines <= most, f"{file} has {lines} lines"
    assert file not in LONG_FILES or lines > 400, f"{file} has become short: take it off the list"


def test_replica_is_a_face():
    """What happens around an inner step is in a driver, chosen once."""
    text = (HOUSE / "replica.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 210
    assert text.count("isinstance(") == 2 and "isinstance(" not in text[text.index("class Replica") :]


@pytest.mark.parametrize("file", FILES)
def test_functions_are_short(file):
    for function in ast.walk(tree(file)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (function.end_lineno or 0) - function.lineno + 1
            assert lines <= 60 or f"{file}:{function.name}" in LONG_FUNCTIONS, (
                f"{file}:{function.name} has {lines} lines"
            )


@pytest.mark.parametrize("file", FILES)
def test_one_word_for_one_idea(file):
    """A replica is a replica."""
    words = re.findall(
        r"\b(?:worker|node|client|island|learner)s?\b", (HOUSE / file).read_text(encoding="utf-8"), re.IGNORECASE
    )
    assert not words, f"{file} says {sorted(set(words))}; see the words in docs/design.md"


@pytest.mark.parametrize("file", FILES)
def test_files_say_what_they_are(file):
    text = (HOUSE / file).read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(tree(file)), f"{file} has no docstring"


PUBLIC = """
Aggregate CheckpointError Codec ConfigurationError DataError DisagreementError Exchange Filter Fragment
GradientHook Group Inner LinkError Merge ModelError NonFiniteError Outer PacketError Partition
PeerError Policy Replica Schedule ThinwireError ThreadGroup TorchGroup cgx co2 data_parallel demo
dgc diloco eager_diloco econtrol ef14 ef21 finetune l_greco local_sgd muloco one_bit_adam outer_dgc parse
power_sgd qsgd qsr run_threads short_first sparse_loco streaming_diloco
"""  # beside the pieces of the catalogue


def test_what_is_public():
    """The names that `import thinwire as tw` gives: none is added or lost by accident."""
    public = {name for name in dir(thinwire) if not name.startswith("_")}
    modules = {path.stem for path in HOUSE.iterdir()} | {"annotations"}
    assert public - modules == set(PUBLIC.split()) | set(PIECES)


def test_the_tree_of_errors():
    """As drawn at the top of errors.py: every error is one of Thinwire's own, and says so in one line."""
    from thinwire import errors

    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [name for name, value in vars(errors).items() if isinstance(value, type) and name != "ThinwireError"]
    assert sorted(drawn) == sorted(defined)
    assert all(
        issubclass(getattr(errors, name), errors.ThinwireError) and getattr(errors, name).__doc__ for name in defined
    )
    assert issubclass(errors.LinkError, errors.PeerError) and issubclass(errors.DisagreementError, errors.PeerError)
