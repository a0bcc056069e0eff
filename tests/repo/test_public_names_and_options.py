"""Public names and command-line options, and their documentation, change only in a visible diff."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pages import ROOT
from pieces import over

import thinwire
from thinwire.app.cli.verbs import verbs
from thinwire.app.trainer.run import PART_OF, PARTS, Run
from thinwire.lab.cli.simulate.command import STUDIES

if TYPE_CHECKING:
    from public_names import DOCUMENTED

pytestmark = pytest.mark.usefixtures("late_imports")

# The options of `train` and `compare`, which are also the keys of a run file.
RUN = """
strategy replicas steps seed every delay fragments merge codec partition offsets exchange outer_lr outer_momentum anchors state_dtype
privacy guard carrier aggregate attack liars topology buffers
least grace weigh evict link uplink timeout
model job lora positions text own_text column tokenizer batch sequence accumulate optimizer lr warmup
weight_decay clip precision models eval_every eval_batches checkpoint_every keep publish slow
"""
# Each verb and each part of one. The verbs themselves are one table: app/cli/verbs.py and the entry points.
COMMANDS = [
    *(name.replace(".", " ") for name in verbs() if name != "simulate"),
    *(f"simulate {study}" for study in STUDIES),
]
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(thinwire.__path__, "thinwire.") if not m.name.endswith("__main__")
)


def test_dunder_all_names_exactly_the_public_names():
    """tests/repo/test_layers.py holds the names themselves."""
    modules = {path.stem for path in Path(thinwire.__file__ or "").parent.iterdir()}
    assert set(thinwire.__all__) == {name for name in dir(thinwire) if not name.startswith("_")} - modules


def test_public_names_are_documented():
    """Each has a docstring of its own (not one that `dataclass` made) and is on a page of the docs."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]
    words = {word for page in pages for word in re.findall(r"\w+", page.read_text())}
    for name, thing in DOCUMENTED.items():
        text = inspect.getdoc(thing) or ""
        assert text and not text.startswith(f"{name}("), f"{name} has no docstring"
        assert name in words, f"{name} is in no page of docs/ and in no example"


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_the_options_of_a_run_are_exactly_those_listed():
    assert sorted(PART_OF) == sorted(RUN.split()) and fields(Run) == ["seed", *PARTS, "resolved"]


def options_of(command: str) -> type:
    """Returns the class with the options of a verb, or of a part of one."""
    verb, _, study = command.partition(" ")
    found = verbs()[command.replace(" ", ".") if verb == "plan" else verb].load()
    kind: type = (importlib.import_module(f"{found.__name__}.{study}") if verb == "simulate" else found).Options
    return kind


@over("command", COMMANDS)
def test_every_option_is_explained(command):
    """The docstring below each field is its help text."""
    source = "".join(map(inspect.getsource, (options_of(command), Run, *PARTS.values())))
    for name in [*fields(options_of(command)), *RUN.split()]:
        if name != "run_settings":
            assert re.search(rf'^    {name}: [^\n]*\n    """', source, re.MULTILINE), name


def test_the_verbs_of_the_readme_exist():
    named = set(re.findall(r"^thinwire (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named and named <= set(verbs()), named - set(verbs())


def test_examples_in_docstrings_run():
    bridges = {"thinwire.integrations.torchtitan": "torchtitan"}
    # the dev extra does not install every bridge's library
    here = [n for n in MODULES if n not in bridges or importlib.util.find_spec(bridges[n])]
    found, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    modules = map(importlib.import_module, here)
    # To run the others takes as long.
    tests = [test for module in modules for test in found.find(module) if test.examples]
    failed = [test.name for test in tests if runner.run(test).failed]
    assert not failed and runner.tries > 20


def test_the_version_is_the_same_everywhere():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == thinwire.__version__
    release = thinwire.__version__.split(".dev")[0]
    assert re.search(rf"^## {re.escape(release)} ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_constraints_pin_every_dependency():
    """Each pinned version is one that pyproject.toml allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {
        canonicalize_name(n): v
        for n, v in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["dev"], *extras["parquet"], *extras["rivals"]]:
        needed = Requirement(line)
        if needed.name != "thinwire":
            assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), line
