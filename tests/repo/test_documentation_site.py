"""The documentation site: its navigation has every page, its map shows the imports, the project's files agree."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import code_map
import pytest
import yaml
from pages import ROOT

import thinwire

DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation():
    """docs/site_hooks.py adds the pages of methods and the pages outside docs/. The navigation lists all others."""
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for section in sections for pages in section.values() for page in pages}
    assert {path.name for path in DOCS.glob("*.md")} == listed - {"benchmarks.md"}


def test_the_map_shows_imports_and_refuses_a_circle(tmp_path):
    """On a small example: arrows that follow from other arrows are left out, and a circle is refused."""
    for name, text in {
        "ground.py": "import os",
        "middle/__init__.py": "from thinwire.ground import x",
        "middle/other.py": "from thinwire.middle import y",
        "top.py": "from thinwire import middle\nimport thinwire.ground\ndef f():\n    import thinwire.top2",
        "top2.py": "import thinwire.top",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = code_map.imports(tmp_path)
    assert graph == {"ground": set(), "middle": {"ground"}, "top": {"middle", "ground"}, "top2": {"top"}}
    assert code_map.floors(graph) == {"ground": 0, "middle": 1, "top": 2, "top2": 3}
    assert code_map.direct(graph) == {"ground": set(), "middle": {"ground"}, "top": {"middle"}, "top2": {"top"}}
    with pytest.raises(ValueError, match="middle → top → middle"):
        code_map.floors({"top": {"middle"}, "middle": {"top"}})


def test_the_map_shows_every_package(monkeypatch):
    graph = code_map.imports()
    monkeypatch.setattr(code_map, "imports", lambda *_: graph)  # parses all modules
    picture = code_map.drawing()
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert sorted(map(str, texts)) == sorted(code_map.packages()) and "replica" in texts
    assert picture == code_map.drawing()


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == thinwire.__version__ and citation["license"] == "Apache-2.0"


def test_pre_commit_hooks_equal_make_check():
    check = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    assert (
        repo["repo"] == "local"
        and check
        and all(f"$(BIN)/{tool}" in check[1] for tool in tools)
        and tools == {"ruff", "mypy"}
    )
