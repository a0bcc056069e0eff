"""Benchmarks: the options and strategies exist that they pass as text. They take minutes, so only slow tests run them, with `--quick`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from thinwire.app.cli.verbs import verbs
from thinwire.app.trainer.run import PARTS
from thinwire.catalogue.methods import RECIPES
from thinwire.lab.methods import METHODS

FILES = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
OTHERS = {"bind", "min_replicas", "join_timeout_ms", "heartbeat_timeout_ms", "porcelain"}  # torchft's lighthouse, git


@cache
def options():
    """The names of all options of all verbs."""
    modules = [verb.load() for name, verb in verbs().items() if name != "resume"]
    kinds = [*(module.Options for module in modules if hasattr(module, "Options")), *PARTS.values()]
    return {field.name for kind in kinds for field in dataclasses.fields(kind)} | {"seed", "help"}


def texts(tree):
    """All strings of a program; the values in an f-string are zeros."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)


def unknown(program):
    """What a program passes and Thinwire does not know."""
    tree, known, makers = ast.parse(program), options(), {**RECIPES, **METHODS}
    own = {
        name.value.removeprefix("--")
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for name in call.args
        if isinstance(name, ast.Constant)
    }
    for text in texts(tree):
        option = re.fullmatch(r"--([a-z][a-z_-]*)(=.*)?", text)
        if option and option[1] not in own | OTHERS and option[1].replace("-", "_") not in known:
            yield text
        if (call := re.fullmatch(r"([a-z_]+)\(.*\)", text)) and call[1] in makers:
            made = ast.parse(text, mode="eval").body
            assert isinstance(made, ast.Call)
            if {one.arg for one in made.keywords} - inspect.signature(makers[call[1]]).parameters.keys():
                yield text


def test_options_and_strategies_of_benchmarks_exist():
    assert not {file.name: found for file in FILES if (found := [*unknown(file.read_text())])}


def test_wrong_options_and_strategies_are_found():
    assert [*unknown('f("train", "--stepz=3", "--steps", f"diloco(evry={n})", "diloco(every=3)")')] == [
        "--stepz=3", "diloco(evry=0)",
    ]  # fmt: skip


def test_benchmarks_can_be_imported():
    """The strategies that they make at once exist with today's defaults."""
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", program, *(file.stem for file in FILES)]
    ended = subprocess.run(command, cwd=FILES[0].parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_changed_bit_is_no_unchanged_run(monkeypatch):
    """A learning rate of the outer step that is larger by its last bits in fp32 is found in the weights, and the same run twice is not."""
    monkeypatch.syspath_prepend(str(FILES[0].parent))
    unchanged = importlib.import_module("unchanged")
    runs = [
        unchanged.over_threads(unchanged.parsed(f"diloco(every=4, outer_lr={rate})"), 2)
        for rate in ("0.7", "0.7", "0.7000001")
    ]
    assert not unchanged.differences(runs[0], runs[1])
    differ = {path for path, _, _ in unchanged.differences(runs[0], runs[2])}
    assert {"replicas › 0 › weights", "replicas › 1 › weights"} <= differ
    assert not {path for path in differ if path.startswith("bytes")}


def test_a_comparison_with_a_recording_names_what_differs(tmp_path):
    """As it is run after each step: exit code 0 if nothing differs, else 1 and the path, and so for what is missing."""
    file, command = tmp_path / "recording.json", [sys.executable, str(FILES[0].parent / "unchanged.py")]

    def run(verb: str) -> subprocess.CompletedProcess[str]:
        words = [*command, verb, str(file), "--only", "solvers"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    recorded = run("record")
    assert recorded.returncode == 0, recorded.stderr
    recording = json.loads(file.read_text())
    found = recording["findings"]["solvers"]
    same, found["dadao"] = found["dadao"], "0" * 16
    del found["minmax"]["masha2"]
    file.write_text(json.dumps(recording))
    compared = run("compare")
    assert compared.returncode == 1, compared.stderr
    assert "solvers › dadao\n" in compared.stdout and same in compared.stdout
    assert "solvers › minmax › masha2 › 0\n" in compared.stdout and "not there" in compared.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [file.name for file in FILES if '"--quick"' in file.read_text()])
def test_a_quick_benchmark_runs(name, tmp_path):
    for folder in ("benchmarks", "examples"):  # copies, so the recorded results stay as they are
        shutil.copytree(FILES[0].parents[1] / folder, tmp_path / folder)
    program = [sys.executable, str(tmp_path / "benchmarks" / name), "--quick"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    if done.returncode and (" cannot run here: " in done.stderr or " needs torchft" in done.stderr):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
