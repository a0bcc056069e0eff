"""`thinwire docs`: the pages of the documentation, which are part of the package."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import tyro

from thinwire.app.cli import options
from thinwire.choices import listed, nearest
from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """The options of `thinwire docs`."""

    page: tyro.conf.Positional[str] = ""
    """A page's name, such as elastic or methods/diloco. Default: the list of pages, in groups."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "docs", arguments, "Show a page of the documentation.")
    console, found = options.console(asked.json), pages()
    if not asked.page:
        for line in listing(found["index"].read_text(encoding="utf-8"), found):
            console.print(line, highlight=False, markup=False)
        return options.answer(asked.json, {"pages": list(found)})
    name = _named(asked.page, found)
    if name not in found:
        raise ConfigurationError(
            f"{asked.page!r} is no page{nearest(asked.page, found)}; there are {listed(found, 'thinwire docs')}."
        )
    text = found[name].read_text(encoding="utf-8")
    console.print(text, highlight=False, soft_wrap=True)
    return options.answer(asked.json, {"page": name, "text": text})


def listing(index: str, found: Collection[str]) -> list[str]:
    """The groups of docs/index.md, which is the one list of pages: the command that shows each page, and its title. Other pages are last."""
    lines = []
    for group, title, name in re.findall(r"^(?:## (.+)|- \[(.+?)\]\((.+?)\.md\).*)$", index, re.MULTILINE):
        lines += ["", group] if group else [f"  thinwire docs {name:<20} {title}"]
    others = ", ".join(name for name in found if name != "index" and f"({name}.md)" not in index)
    return [
        *lines[1:],
        "",
        "One method or trainer each (thinwire docs NAME)",
        fill(others, 79, initial_indent="  ", subsequent_indent="  "),
    ]


def _named(given: str, found: Collection[str]) -> str:
    """The name of the page that `given` means: as pages and messages write it in links (docs/secure.md#the-hub), or without its folder."""
    name = given.removeprefix("docs/").partition("#")[0].removesuffix(".md")
    ends = [one for one in found if one.endswith(f"/{name}")]
    return ends[0] if name not in found and len(ends) == 1 else name


def pages() -> dict[str, Path]:
    """The pages by name: beside the modules of an installed package, in the docs of a checkout."""
    package = Path(__file__).parents[2]
    folder = next(
        folder for folder in (package / "docs", package.parents[1] / "docs") if (folder / "start.md").exists()
    )
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
