"""What is added takes few edits: in a copy of the repository, parser, command, tables and laws follow from one row each.

A piece: one file and one row. A recipe: one file, one row, one page. A method with its own loop: the same, in the lab. A verb: one file, one row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("src", "docs", "README.md", "pyproject.toml")
TESTED = ("tests/conftest.py", *(f"tests/{part}" for part in ("support", "pieces", "codecs", "laws", "repo")))
BESIDE = ("examples", "benchmarks", "CONTRIBUTING.md", "mkdocs.yml")
MINE = '''"""One piece more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Identity
from thinwire.rng import Key


@dataclass(frozen=True)
class Mine(Codec):
    """Every value in fp32, and a byte to spare. It is of no use."""

    spare: int = 1

    claims: ClassVar[frozenset[str]] = frozenset({"exact", "odd", "contractive", "idempotent"})

    def nbytes(self, numel: int) -> int:
        return 4 * numel + self.spare * bool(numel)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        payload[4 * x.numel() :] = 0
        Identity().encode(x, payload[: 4 * x.numel()], key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        Identity().decode_add(payload[: 4 * out.numel()], out, key, weight)
'''
RECIPE = '''"""One recipe more."""

from __future__ import annotations

from thinwire.codecs import Cast
from thinwire.pieces.schedule import Every
from thinwire.strategy import Strategy


def rare_sgd(*, every: int = 6) -> Strategy:
    """Local SGD in bf16, which is of no use.

        anchor ← anchor − (1/M)·Σ_m Δ_m          Δ_m = anchor − θ_m

    *Differs*: nothing, it is ours.
    *Wire*: (M−1)·(2·N + 48) bytes every H steps from each of M replicas.

    Args:
        every: H, inner steps between two rounds.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> rare_sgd().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    2000192
    """
    return Strategy(schedule=Every(every), codec=Cast("bf16"))
'''
METHOD = '''"""One method more, with its own loop."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.lab.methods.control_rules import Plain, Rule
from thinwire.lab.methods.control_variates import ControlVariates


@dataclass(frozen=True, kw_only=True)
class Mean(ControlVariates):
    """The mean of all replicas, as a method that takes its own steps."""

    rule: Rule = Plain()


def own_mean(*, every: int = 6) -> Mean:
    """The mean of all replicas, in a loop of its own, which is of no use.

        x ← x − mean of the x − y_i

    *Differs*: nothing, it is ours.
    *Wire*: (M−1)·(48 + 4·N) bytes every H steps from each of M replicas.

    Args:
        every: H, inner steps between two rounds.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> own_mean().nbytes_per_period(1_000_000, size=2)  # bytes
    4000048
    """
    return Mean(every=every)
'''
PAGE = """# {name}

It is of no use.

**Settings** [published, if different]: `every=6` (H).

<!-- numbers {name} -->
<!-- end -->

```bash
thinwire train --strategy {name} --every 50
```
"""
VERB = '''"""`thinwire greet`: one verb more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.app.cli import options


@dataclass(frozen=True)
class Options:
    """The options of `thinwire greet`."""

    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "greet", arguments, "Say hello.")
    print("hello")
    return options.answer(asked.json, {"hello": True})
'''
EDITS: dict[str, Callable[[str], str]] = {  # by file, each counted
    "src/thinwire/codecs/mine.py": lambda _: MINE,
    "src/thinwire/catalogue/__init__.py": lambda text: text + "from thinwire.codecs.mine import Mine as Mine\n",
    "src/thinwire/recipes/rare.py": lambda _: RECIPE,
    "src/thinwire/recipes/table.py": lambda text: text.replace(
        "\n\n", "\n\nfrom thinwire.recipes.rare import rare_sgd as rare_sgd\n", 1
    ),
    "docs/methods/rare_sgd.md": lambda _: PAGE.format(name="rare_sgd"),
    "src/thinwire/lab/own_mean.py": lambda _: METHOD,
    "src/thinwire/lab/named.py": lambda text: (
        text + "from thinwire.lab.own_mean import own_mean\n\nNAMED |= {'own_mean': own_mean}\n"
    ),
    "docs/methods/own_mean.md": lambda _: PAGE.format(name="own_mean"),
    "src/thinwire/app/cli/greet.py": lambda _: VERB,
    "src/thinwire/app/cli/verbs.py": lambda text: text.replace(
        '"doctor": ', '"greet": "say hello",\n        "doctor": ', 1
    ),
}
FOUND = """
import recipes
import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.trainer.run import Run
from thinwire.catalogue.methods import NAMED, RECIPES
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.codecs.mine import Mine
from thinwire.testing import check
assert tw.__file__.startswith(HERE), tw.__file__
assert Mine(2) == parse("Mine(2)") and tw.catalogue.Mine is Mine
strategy = tw.Strategy(codec=tw.codecs.TopK(0.5, Mine()))
assert parse(repr(strategy)) == strategy and len(check(Mine()).laws) >= 15
assert parse("rare_sgd(every=4)", PIECES | NAMED) == tw.recipes.rare_sgd(every=4) == RECIPES["rare_sgd"](every=4)
assert Run.of(strategy="rare_sgd", every=4, codec=None).make_strategy().schedule.every == 4
assert Run.of(strategy="own_mean", every=4).make_method().every == 4
assert {"rare_sgd", "own_mean"} <= NAMED.keys() and "own_mean" not in RECIPES
table = recipes.recipes()
assert all(f"[{name}](methods/{name}.md)" in table for name in ("rare_sgd", "own_mean"))
assert main(["greet"]) == 0
assert main(["--help"]) == 0
"""
TESTS = (
    *("tests/pieces/test_table_of_pieces.py", "tests/codecs/test_claims.py", "tests/repo/test_layers.py"),
    *("tests/laws/test_every_piece.py", "tests/laws/test_every_recipe.py", "tests/repo/test_method_pages.py"),
    *("tests/repo/test_docstrings.py", "tests/repo/test_public_names_and_options.py"),
    *(
        "-k",
        "Mine or rare_sgd or own_mean or greet or every_piece_has_a_row or text_of_a_piece or public_names_are "
        "or every_name or every_option or methods_have",
    ),
)
DUE = (
    "test_codecs_keep_the_claims_of_their_rows[Mine(spare=1)]",
    "test_the_text_of_a_piece_parses_to_an_equal_piece",
    "test_the_public_names_are_exactly_those_listed",
    "test_law_1_any_codec_and_partition[Mine(spare=1)",
    "test_zero_gradients_move_no_weight[rare_sgd]",
    "test_replicas_with_equal_data_equal_one_replica[rare_sgd]",
    "test_the_formula_of_bytes_in_a_docstring_gives_the_bytes[rare_sgd]",
    "test_settings_on_a_page_are_those_of_the_signature[own_mean]",
    "test_methods_have_equation_difference_and_bytes",
    "test_every_name_has_exactly_one_page",
    "test_every_option_is_explained",
)


def edited(folder: Path, parts: tuple[str, ...]) -> Callable[..., str]:
    """Copies these parts of the repository to `folder` and makes the edits; returns what runs Python there and gives its output."""
    for name in parts:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for name, edit in EDITS.items():
        path = folder / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = edit(before)
        assert after != before, name
        path.write_text(after, encoding="utf-8")

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder / 'docs'}"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout

    return run


def test_parser_command_and_tables_find_what_is_added(tmp_path: Path) -> None:
    said = edited(tmp_path, CODE)("-c", f"HERE = {str(tmp_path)!r}\n{FOUND}")
    assert "hello" in said and "greet" in said.split("hello", 1)[1]


@pytest.mark.slow
def test_the_tables_of_the_tests_find_what_is_added(tmp_path: Path) -> None:
    tried = edited(tmp_path, (*CODE, *TESTED, *BESIDE))("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *TESTS)
    passed = [line for line in tried.splitlines() if line.startswith(("PASSED ", "SUBPASSED"))]
    for test in DUE:
        assert any(test in line for line in passed), test


def test_a_piece_without_its_row_is_not_found() -> None:
    """So it is the row by which the test above finds the piece."""
    import thinwire as tw

    with pytest.raises(tw.ConfigurationError, match="'Mine' is not known"):
        tw.catalogue.parsing.parse("Mine")
