"""Splits README and docs into blocks that can be checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BENCHMARKS = ROOT / "benchmarks/README.md"  # a page of the site whose commands need root
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """The text between two fences of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = [Block(page, text[: m.start()].count("\n") + 1, m[1], m[2]) for m in _BLOCK.finditer(text)]
    return [block for block in found if block.language in languages]


def commands() -> list[tuple[Block, str]]:
    """Returns every line of every ```bash block, without comments."""
    lines = [
        (b, line.split(" #")[0].strip()) for page in PAGES for b in blocks(page, "bash") for line in b.text.splitlines()
    ]
    return [(block, line) for block, line in lines if line and not line.startswith("#")]
