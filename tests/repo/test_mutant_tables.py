"""tests/mutants explains lines as they stand in the modules: an entry whose line was changed explains nothing any more."""

from __future__ import annotations

import tomllib

import pytest
from pages import ROOT

TABLES = sorted((ROOT / "tests/mutants").glob("*.toml"))
EXPLAINED = [(table.stem, one) for table in TABLES for one in tomllib.loads(table.read_text())["explained"]]


@pytest.mark.parametrize("package", sorted({package for package, _ in EXPLAINED}))
def test_each_explained_line_is_in_its_module(package: str) -> None:
    entries = [one for name, one in EXPLAINED if name == package]
    lines = {
        module: {line.strip() for line in (ROOT / f"src/thinwire/{module}.py").read_text().splitlines()}
        for module in {one["module"] for one in entries}
    }
    assert {module.split("/")[0] for module in lines} == {package}
    assert [one for one in entries if one["was"] not in lines[one["module"]]] == []


def test_no_change_is_explained_twice() -> None:
    changes = [
        (one["module"], one["was"], now)
        for _, one in EXPLAINED
        for now in ([one["now"]] if isinstance(one["now"], str) else one["now"])
    ]
    assert sorted({change for change in changes if changes.count(change) > 1}) == []
