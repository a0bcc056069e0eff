"""What the site has beside the pages of docs/: files from elsewhere in the repository, the API reference, the map of the code.

MkDocs calls the functions named `on_...` (mkdocs.yml names this file). Nothing that is made here is kept in git.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))
import code_map

ROOT = Path(__file__).parents[1]
PAGES = {  # beside those of docs/: where in the repository, where in the site
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "benchmarks/README.md": "benchmarks.md",
}
BESIDE = {  # names that users meet, beside the top level, pieces and recipes
    "thinwire.codecs.base": ("Codec",),
    "thinwire.exchange.base": ("Exchange",),
    "thinwire.catalogue.parsing": ("parse",),
    "thinwire.pieces.aggregate": ("Aggregate",),
    "thinwire.pieces.inner_optimizers": ("Inner",),
    "thinwire.pieces.merge": ("Merge",),
    "thinwire.pieces.outer": ("Outer",),
    "thinwire.pieces.partition": ("Fragment", "Partition"),
    "thinwire.pieces.policy": ("Policy",),
    "thinwire.pieces.schedule": ("Schedule", "short_first"),
    "thinwire.pieces.transforms": ("Filter",),
    "thinwire.checkpoint": ("save", "read", "load", "newest_common"),
    "thinwire.app.records.events": ("EventLog",),
    "thinwire.app.diagnosis": ("Rules",),
    "thinwire.membership.rendezvous": ("Membership", "View", "Member"),
    "thinwire.membership.lighthouse": ("LighthouseRendezvous",),
    "thinwire.membership.timeouts": ("Timeouts",),
}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the sections whose pages are found, not listed."""
    methods, trainers = (
        [f"{folder}/{path.name}" for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
        for folder in ("methods", "integrations")
    )
    project = [page for page in PAGES.values() if page != "benchmarks.md"]
    assert config.nav is not None
    found = [{"Your trainer": trainers}, {"Methods": methods}, {"API": list(reference())}, {"Project": project}]
    config.nav = [*config.nav, *found]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for page, text in reference().items():
        files.append(File.generated(config, page, content=text))
    for path in _linked():
        source = str(ROOT / path)  # of Python too, which mkdocs.yml excludes from docs/
        files.append(File.generated(config, f"files/{path}", abs_src_path=source, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draws the map, and turns links of the repository into links of the site."""
    markdown = markdown.replace("<!-- map -->", code_map.drawing().replace("\n", ""))
    homes = {site: path for path, site in PAGES.items()}
    here = homes.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2]))
        return f"{link[1]}{posixpath.relpath(_site(path), posixpath.dirname(page.file.src_uri) or '.')}{link[3]}"

    return _LINK.sub(moved, markdown)


def _site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path in PAGES:
        return PAGES[path]
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def _linked() -> list[str]:
    """Files outside docs/ to which a page leads, and that are no pages themselves."""
    found = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / path for path in PAGES)]:
        for _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(page.relative_to(ROOT).parent.as_posix(), target))
            if "://" not in target and _site(path).startswith("files/") and (ROOT / path).is_file():
                found.add(path)
    return sorted(found)


# ---- the API reference


def reference() -> dict[str, str]:
    """A page for each package: its public names, each with its signature and docstring."""
    names: dict[str, list[str]] = {}
    modules = ("thinwire.public", "thinwire.catalogue", "thinwire.recipes.table")
    for module, exported in [*(one for name in modules for one in _exports(name)), *BESIDE.items()]:
        names.setdefault(module.split(".")[1], []).extend(f"{module}.{name}" for name in exported)
    names["methods"] = [f"thinwire.lab.methods.{name}" for name in _all("thinwire.lab.methods") if name != "METHODS"]
    return {
        f"api/{package}.md": "\n\n".join(
            [f"# thinwire.{package}", *(f"::: {name}" for name in sorted(set(of_package)))]
        )
        + "\n"
        for package, of_package in sorted(names.items())
    }


def _source(module: str) -> ast.Module:
    path = ROOT / "src" / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def _exports(module: str) -> list[tuple[str, list[str]]]:
    """The modules from which `module` imports its names, and these names."""
    found = list[tuple[str, list[str]]]()
    for statement in _source(module).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("thinwire."):
            found.append((str(statement.module), [alias.asname or alias.name for alias in statement.names]))
    return found


def _all(module: str) -> list[str]:
    for statement in _source(module).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise ValueError(f"{module} has no __all__")
