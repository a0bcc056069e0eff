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
OPTIONS = {
    "train": "run_settings out resume from_start trust run elastic lighthouse name secret log json",
    "resume": "run_settings out resume from_start trust run elastic lighthouse name secret log json",
    "compare": "run_settings strategies seeds out trust run json",
    "new": "file json",
    "report": "runs diagnose out log json",
    "top": "run once page json",
    "checkpoints": "run verify prune json",
    "sample": "run prompt tokens temperature seed prior json",
    "follow": "run out once every name keys json",
    "export": "run to out json",
    "evaluate": "run text prior batch sequence eval_batches column json",
    "branch": "run_settings run domain out flops trained trust json",
    "probe": "run what out model job sequence link replicas seconds trips name timeout json",
    "plan": "links machines replicas run trust model job sequence text tokenizer tokens batch_tokens memory utilization deadline loss methods ranks "
    "degrees levels top out frontier rates json",
    "plan fit": "file variables reference draws level json",
    "plan pack": "file ranks capacity model out json",
    "plan topology": "topologies replicas links degree out rates strategy model explain plot json",
    "plan tp": "model ranks explain link machine batch sequence json",
    "simulate utilization": "parameters layers step_seconds method every delay fragment_layers bits_per_parameter grid plot json",
    "simulate run": "run_settings step_seconds slower step_variation links link_variation sharing loss jitter stragglers outages failures "
    "encode_seconds decode_seconds out run trust json",
    "simulate pipeline": "stages micro_batches forward_seconds backward_seconds hop_seconds links activation slower plot json",
    "simulate fabric": "leaves spines hosts flows nbytes rate failed pattern policy draws seed plot json",
    "simulate overlap": "ranks produce_seconds send_seconds nbytes link contention plot json",
    "simulate disrupted": "topology replicas who shares data at_round rounds graphs runs plot json",
    "simulate sampled": "peers sample aggregators offline away patience rounds seconds seed json",
    "simulate stragglers": "replicas step_seconds compute_share pattern pause burst_every burst_steps recorded stragglers patience probe steps "
    "seed plot json",
    "lighthouse": "host port heartbeat_timeout secret json",
    "hub": "do who out listen address run_file published publishers publish_bytes uses hours reduce elastic heartbeat_timeout name group now json",
    "join": "token run name out resume trust keys group publish timeout json",
    "doctor": "run trust link step_seconds master_addr master_port firewall runs json",
    "docs": "page json",
}
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
    assert sorted(PART_OF) == sorted(RUN.split()) and fields(Run) == ["seed", *PARTS]


def options_of(command: str) -> type:
    """Returns the class with the options of a verb, or of a part of one."""
    verb, _, study = command.partition(" ")
    found = verbs()[command.replace(" ", ".") if verb == "plan" else verb].load()
    kind: type = (importlib.import_module(f"{found.__name__}.{study}") if verb == "simulate" else found).Options
    return kind


@over("command", OPTIONS)
def test_the_options_of_each_verb_are_exactly_those_listed(command):
    assert sorted(fields(options_of(command))) == sorted(OPTIONS[command].split())


@over("command", OPTIONS)
def test_every_option_is_explained(command, capsys):
    """The docstring below each field is its help text."""
    source = "".join(map(inspect.getsource, (options_of(command), Run, *PARTS.values())))
    for name in [*OPTIONS[command].split(), *RUN.split()]:
        if name != "run_settings":
            assert re.search(rf'^    {name}: [^\n]*\n    """', source, re.MULTILINE), name


def test_verbs_equal_those_on_the_pages():
    tree = (ROOT / "README.md").read_text()
    there = {name.replace(".", " ") for name in verbs()}
    assert {name for name in there if " " not in name} == {command.split()[0] for command in OPTIONS}
    beside = {f"simulate {study}" for study in STUDIES} | {name for name in there if " " in name}
    assert beside == {command for command in OPTIONS if " " in command}
    assert all(f"thinwire {verb}" in tree for verb in there if " " not in verb)


def test_examples_in_docstrings_run():
    bridges = {
        "thinwire.integrations.torchtitan": "torchtitan",
        "thinwire.app.report.trackers.mlflow": "mlflow",
        "thinwire.app.report.trackers.wandb": "wandb",
    }
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
