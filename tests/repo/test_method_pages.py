"""Every recipe and method has one page, whose settings and bytes are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re

import pytest
import recipes
import tables
from pages import ROOT, commands

from thinwire.catalogue.methods import RECIPES
from thinwire.lab import methods

NAMED = recipes.NAMED
METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))
BESIDE = {name: getattr(methods, name) for name in methods.__all__}  # these have a page, but are no `--strategy`

each_page = pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)


def paragraph(page, begin):
    """Returns the paragraph of a page that begins with this, in one line."""
    found = next(part for part in page.read_text().split("\n\n") if part.startswith(begin))
    return re.sub(r"\s+", " ", found)


# ---- which pages there are


def test_every_name_has_exactly_one_page():
    told = [name for page in METHOD_PAGES for name in recipes.title(page)]
    assert len(told) == len(set(told))
    assert set(NAMED) <= set(told) <= set(NAMED) | set(BESIDE)


@each_page
def test_blocks_use_the_names_of_their_page(page):
    ours = [name for name in recipes.title(page) if name in NAMED]
    found = {kind: names.split() for _, kind, names, _ in recipes.BLOCK.findall(page.read_text())}
    assert found == ({"numbers": ours} if ours else {})


def test_every_name_is_used_in_a_command():
    """Another test, of all pages, parses these commands and their strategies."""
    homes, found = recipes.homes(), commands()
    for name in NAMED:
        lines = [command for block, command in found if block.page == homes[name]]
        assert any(re.search(rf"--strategy \"?{name}\b", line) for line in lines), name


# ---- what pages say


@each_page
def test_settings_on_a_page_are_those_of_the_signature(page):
    """The paragraph names each setting of each name on the page, with its default as one would write it, and no other setting."""
    said = paragraph(page, "**Settings**").split("]: ", 1)[1]
    due = {}
    for name in recipes.title(page):
        for setting in inspect.signature((NAMED | BESIDE)[name]).parameters.values():
            default = setting.default
            if default is dataclasses._HAS_DEFAULT_FACTORY:
                default = getattr(BESIDE[name](step=0.1), setting.name)
            written = [] if default is inspect.Parameter.empty else [tables.repr_without_defaults(default)]
            due.setdefault(setting.name, set()).update(written)
    for name, defaults in due.items():
        parts = (
            [f"`{name}={next(iter(defaults))}`"] if len(defaults) == 1 else [f"`{part}`" for part in (name, *defaults)]
        )
        assert all(part in said for part in parts), parts
    assert {name for name in re.findall(r"`(\w+)=[^`]*`", said.split("**")[0])} <= set(due)


def test_summaries_are_short_and_complete():
    for name in NAMED:
        said = recipes.summary(name)
        assert 10 < len(said) < 120 and said.count("(") == said.count(")") and "arXiv" not in said, said


IN_WORDS = {"l_greco", "choco", "moshpit"}  # they say what a codec or a group decides
STAGES = {"one_bit_adam"}  # its first formula is of the first rounds


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - IN_WORDS - STAGES))
def test_the_formula_of_bytes_in_a_docstring_gives_the_bytes(name):
    """For two replicas and one matrix, within a percent: the headers of further messages are not in it."""
    said = re.sub(r"\s+", " ", RECIPES[name].__doc__)
    formula = re.search(r"\*Wire\*: (.+?) bytes", said)[1].replace(" and ", " + ")
    formula = re.sub(r"log₂ ([\w.]+)", r"log2(\1)", formula.replace("·", "*").replace("−", "-"))
    bits = re.search(r"\bb = ([\d+/. ]*\d)", said)
    numbers = {"M": 2, "N": 10**6, "P": 0, "n": 1000, "m": 1000, "r": 4, "Q": 4, "log2": math.log2}
    settings = {one.name: one.default for one in inspect.signature(RECIPES[name]).parameters.values()}
    told = eval(formula, settings | numbers | ({"b": eval(bits[1])} if bits else {}))
    assert told == pytest.approx(RECIPES[name]().nbytes_per_period([((1000, 1000),)], 2), rel=0.01), formula


# ---- what is filled in


def test_the_table_of_bytes_is_that_of_the_strategies(tmp_path):
    lines = recipes.numbers(["outer_dgc", "qsr", "just_one_byte"], tmp_path, "").splitlines()
    strategy, shapes = RECIPES["outer_dgc"](), [fragment.shapes for fragment in recipes.fragments("outer_dgc")]
    late, first = (strategy.nbytes_per_period(shapes, 2, number) for number in (1000, 0))
    assert lines[2].startswith(f"| `outer_dgc` | {late:,} in 30 steps | ")
    assert lines[3].startswith(f"| `outer_dgc`, round 0 | {first:,} in 30 steps | ")
    assert any(re.match(r"\| `qsr` \| [\d,]+ in 4 steps \| ≤ 8 \|", line) for line in lines)
    assert "| `just_one_byte` | 52 in a step | 0.000844 | 0 |" in lines and lines[-1].startswith("*Predicted: ")
    bounds = recipes.numbers(["plexus", "codistill", "decoupled_diloco"], tmp_path, "")
    assert bounds.count(" ≤ ") == 2 and re.search(r"\| `decoupled_diloco` \| .* \| 16 \|", bounds)


def test_the_table_of_measurements_marks_old_and_missing_rows(tmp_path):
    row = {"eval_loss": 1.5, "eval_loss_spread": 0.01, "bits_per_parameter_per_step": 32.0, "seeds": 3}
    found = [
        row | {"strategy": name, "composition": repr(RECIPES[name]()), "eval_loss": loss}
        for name, loss in (("data_parallel", 1.5), ("ef14", 1.53), ("ef21", float("nan")))
    ]
    found[1]["composition"] = "Strategy()"
    result = {"word": "measured", "date": "2026-11-21T00:00:00+00:00", "commit": "0123456789", "rows": found}
    result |= {"setting": {"model": "nano", "steps": 500, "replicas": 2}, "machine": {"cpu": " A CPU", "cores": 2}}
    path = tmp_path / recipes.FAMILY
    assert recipes.numbers(["ef14"], tmp_path, "").endswith("Loss: not measured yet.*")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    lines = recipes.numbers(["data_parallel", "ef14", "ef21", "econtrol"], tmp_path, "../../").splitlines()
    assert [line.split(" | ", 4)[4] for line in lines[2:6]] == [
        "1.5000 ± 0.0100 | control | 3 |",
        "1.5300 ± 0.0100 † | +2.00% | 3 |",
        "nan ± 0.0100 | – | 3 |",
        "not measured yet |  |  |",
    ]
    assert " Measured, 2026-11-21: model `nano`, 500 steps, 2 replicas, defaults;" in lines[-1]
    assert "commit 0123456, A CPU, 2 cores. [All methods](../../docs/family.md)." in lines[-1]
    assert lines[-1].endswith("†: before its defaults became what they are today.*")
    assert recipes.numbers(["econtrol"], tmp_path, "").endswith("Loss: not measured yet.*")
    # each beside its own control
    more = [
        found[0] | {"eval_loss": 2.0},
        found[0] | {"strategy": "econtrol", "eval_loss": 2.2},
    ]
    (tmp_path / recipes.DEFAULTS).write_text(json.dumps(result | {"rows": more}))
    assert "| +10.00% |" in recipes.numbers(["econtrol"], tmp_path, "")
    assert "| 1.5000 ± 0.0100 | control |" in recipes.numbers(["data_parallel"], tmp_path, "").splitlines()[2]
