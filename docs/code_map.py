"""The map of the code: packages and modules of src/thinwire, floor by floor, drawn from their imports.

    python docs/code_map.py map.svg

A floor is the longest way down to a package that imports no other. The picture is made of the source alone: the same source gives
the same bytes, and nothing is imported or run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"
LEFT_OUT = {"__init__", "__main__", "docs"}
WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR_HEIGHT, EDGE = 980, 104, 28, 74, 20


def packages(source: Path = SOURCE) -> dict[str, list[Path]]:
    """The files of each package, and of each module at the top."""
    found: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).with_suffix("").parts[0]
        if name not in LEFT_OUT:
            found.setdefault(name, []).append(path)
    return found


def imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """Which packages each one imports. An import inside a function is a door that is opened when somebody comes, and is not drawn."""
    files = packages(source)
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, paths in files.items():
        for path in paths:
            for statement in outside_functions(ast.parse(path.read_text(encoding="utf-8"))):
                for module in _modules(statement):
                    other = module.removeprefix("thinwire.").split(".")[0]
                    if module.startswith("thinwire.") and other in files and other != name:
                        found[name].add(other)
    return found


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module but those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from outside_functions(node)


def _modules(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        if statement.module == "thinwire":
            return [f"thinwire.{alias.name}" for alias in statement.names]
        return [statement.module or ""]
    return []


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """How far above the ground each package lies. Raises ValueError where they form a cycle."""
    height: dict[str, int] = {}

    def of(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(f"imports form a cycle: {' → '.join([*above, name])}")
        if name not in height:
            height[name] = max((of(other, (*above, name)) + 1 for other in sorted(graph[name])), default=0)
        return height[name]

    for name in sorted(graph):
        of(name, ())
    return height


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others."""
    below: dict[str, set[str]] = {}
    for name in sorted(graph, key=floors(graph).__getitem__):
        below[name] = graph[name].union(*(below[other] for other in graph[name]))
    return {
        name: {to for to in others if not any(to in below[other] for other in others)} for name, others in graph.items()
    }


def drawing(source: Path = SOURCE) -> str:
    """The picture, as the text of an SVG file."""
    graph = imports(source)
    height, arrows = floors(graph), direct(graph)
    places = _places(graph, height)
    tall = FLOOR_HEIGHT * (max(height.values()) + 1) + 2 * EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" role="img" aria-label="Map of the code" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#8aa0b4"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{tall}" fill="#ffffff"/>',
    ]
    for name in sorted(arrows):
        for other in sorted(arrows[name]):
            (x, y), (to_x, to_y) = places[name], places[other]
            start, end = y + BOX_HEIGHT // 2, to_y - BOX_HEIGHT // 2
            bend = (end - start) // 2
            curve = f"M{x},{start} C{x},{start + bend} {to_x},{end - bend} {to_x},{end}"
            lines.append(f'<path d="{curve}" fill="none" stroke="#8aa0b4" stroke-width="1" marker-end="url(#head)"/>')
    for name in sorted(places):
        x, y = places[name]
        top, left = y - BOX_HEIGHT // 2, x - BOX_WIDTH // 2
        fill = "#ffe2b8" if name == "replica" else "#e4eef7" if (source / name).is_dir() else "#f3f3f3"
        lines.append(
            f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{fill}" stroke="#51687d"/>'
        )
        lines.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="#1c2b39">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _places(graph: Mapping[str, set[str]], height: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The middle of each box: a floor's boxes in the order of the middles of those that they import, ties by name."""
    places: dict[str, tuple[int, int]] = {}
    for floor in range(max(height.values()) + 1):
        names = sorted(name for name in graph if height[name] == floor)

        def middle(name: str) -> float:
            xs = [places[other][0] for other in graph[name]]
            return sum(xs) / len(xs) if xs else 0.0

        names.sort(key=lambda name: (middle(name), name))
        step = (WIDTH - 2 * EDGE) / len(names)
        y = EDGE + FLOOR_HEIGHT * (max(height.values()) - floor) + FLOOR_HEIGHT // 2
        for place, name in enumerate(names):
            places[name] = (int(EDGE + step * (place + 0.5)), y)
    return places


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(), encoding="utf-8")
