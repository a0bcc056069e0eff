"""Adding a piece takes one file and one row: in a copy of the repository, parser and laws follow from the row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "tests/conftest.py",
    *("tests/support", "tests/pieces", "tests/codecs", "tests/laws", "tests/repo/test_layers.py"),
    "docs/code_map.py",
    "docs/tables.py",
    "docs/recipes.py",
    "pyproject.toml",
)
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
ROW = "from thinwire.codecs.mine import Mine as Mine\n"
TESTS = (
    *(
        "tests/pieces/test_table_of_pieces.py",
        "tests/codecs/test_claims.py",
        "tests/repo/test_layers.py",
        "tests/laws/test_every_piece.py",
    ),
    *("-k", "Mine or every_piece_has_a_row or text_of_a_piece or public_names"),
)
SAYS = """
import thinwire as tw
from thinwire.testing import check
from thinwire.codecs.mine import Mine
from thinwire.catalogue.parsing import parse
assert Mine(2) == parse("Mine(2)") and tw.catalogue.Mine is Mine
strategy = tw.Strategy(codec=tw.codecs.TopK(0.5, Mine()))
assert parse(repr(strategy)) == strategy
print(len(check(Mine()).laws), tw.__file__)
"""


@pytest.mark.slow
def test_a_piece_is_added_by_one_file_and_one_row(tmp_path: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (tmp_path / "docs/methods").mkdir()
    (tmp_path / "src/thinwire/codecs/mine.py").write_text(MINE)
    with (tmp_path / "src/thinwire/catalogue/__init__.py").open("a") as catalogue:
        catalogue.write(ROW)

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    count, where = run("-c", SAYS).split()
    assert int(count) >= 15 and where.startswith(str(tmp_path))
    tried = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *TESTS)
    for test in (
        "test_codecs_keep_the_claims_of_their_rows[Mine(spare=1)]",
        "test_the_text_of_a_piece_parses_to_an_equal_piece",
        "test_the_public_names_are_exactly_those_listed",
    ):
        assert any(line.startswith("PASSED ") and test in line for line in tried.splitlines()), test
    assert "test_law_1_any_codec_and_partition[Mine(spare=1)" in tried


def test_a_piece_without_its_row_is_not_found() -> None:
    """So it is the row by which the test above finds the piece."""
    import thinwire as tw

    with pytest.raises(tw.ConfigurationError, match="'Mine' is not known"):
        tw.catalogue.parsing.parse("Mine")
